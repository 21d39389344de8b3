"""Prompts that are both trained on and validated on: what validation then finds may be memory."""

from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.checks import counted
from configs.loader import notice

SHOWN = 80  # characters of a prompt


def report_overlap(
    trained: Iterable[Sequence[int]], held_out: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Counts the rows of `held_out` whose prompt is that of a trained row too, in a notice with the first, if there are
    any.

    Args:
        trained, held_out: token ids of prompts, a row each, as the model reads them.
    """
    places = shared_prompts(trained, held_out)
    if not places:
        return
    text = tokenizer.decode(held_out[places[0]], skip_special_tokens=True)
    shown = repr(text[:SHOWN]) + "…" * (len(text) > SHOWN)
    notice(
        f"the prompts of {counted(len(places), 'row')} of {len(held_out)} in data.val_files are in data.train_files "
        f"too, the first is row {places[0]}: {shown}. What validation finds there may be memory: take them out of one "
        "of the two."
    )


def shared_prompts(trained: Iterable[Sequence[int]], held_out: Iterable[Sequence[int]]) -> list[int]:
    """Positions in `held_out` of prompts that `trained` has too."""
    keys = [key(ids) for ids in held_out]
    unseen = set(keys)
    seen = {own for ids in trained if (own := key(ids)) in unseen}
    return [place for place, own in enumerate(keys) if own in seen]


def key(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype=np.int32).tobytes()
