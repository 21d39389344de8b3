"""Prints samples of a scored batch, from the best to the worst."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.protocol import DataProto
from training.episode_rows import EpisodeRows
from training.tracking import short_number

BORDERS = 4  # columns of a panel
SHOWN_LINES = 12  # of a sample, as wide as the console; more lose their middle


def spread(scores: Sequence[float], count: int) -> list[int]:
    """Picks the places of `count` scores, evenly spaced from best to worst."""
    ordered = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [ordered[int(index)] for index in np.linspace(0, len(ordered) - 1, min(count, len(ordered)))]


def print_samples(title: str, batch: DataProto, tokenizer: PreTrainedTokenizerBase, count: int) -> None:
    """Prints `count` samples of a scored batch, from best to worst: dim what it was shown, bold » its words «."""
    episodes, console = EpisodeRows(batch), Console()
    scores = episodes.scores().tolist()
    numbers = spread(scores, count)
    columns = ("end_reason", "failure", *batch.meta_info.get("reward_extra_keys", ()))
    for shown, number in enumerate(numbers, start=1):
        rows = (episodes.episode_of_row == number).nonzero()[:, 0].tolist()
        text = Text("\n").join(row_text(batch, row, tokenizer) for row in rows)
        text = without_middle([*text.wrap(console, console.width - BORDERS)])
        facts = {name: batch.get(name)[rows[-1]] for name in columns if name in batch}
        details = "".join(f", {name} {value}" for name, value in facts.items() if value is not None)
        text.append(f"\nscore {short_number(scores[number])}{details}")
        console.print(Panel(text, title=Text(f"{title} · {shown} of {len(numbers)}"), title_align="left"))


def without_middle(lines: list[Text]) -> Text:
    """Joins lines; of many, without the middle ones."""
    if len(lines) > SHOWN_LINES:
        half, left_out = SHOWN_LINES // 2, Text(f"… {len(lines) - SHOWN_LINES + 1} more lines …")
        lines = [*lines[: half - 1], left_out, *lines[-half:]]
    return Text("\n").join(lines)


def row_text(batch: DataProto, row: int, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Decodes the tokens of a row, without padding: those of the policy bold and in marks, which a log shows, too."""
    attended, mask = batch.batch["attention_mask"][row].bool(), batch.batch["response_mask"][row].bool()
    prompt, response = batch.batch["prompts"][row], batch.batch["responses"][row]
    real, text = attended[-len(mask) :], Text()
    pieces = [(prompt[attended[: -len(mask)]].tolist(), "dim")]
    by_speaker = groupby(zip(response[real].tolist(), mask[real].tolist(), strict=True), key=itemgetter(1))
    pieces += [([token for token, _ in tokens], "bold" if policy else "dim") for policy, tokens in by_speaker]
    for ids, style in pieces:
        piece = tokenizer.decode(ids, skip_special_tokens=True)
        text.append_text(Text.from_ansi(f"» {piece} «" if style == "bold" else piece, style=style))
    return text
