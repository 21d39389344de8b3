"""Prints what the calls of a step send: `python -m tests.wire_bytes [R …]`, of 256 prompts × 8 made-up rows.

Before the arrow every tensor as it is, after it those that the verb reads, by data/wire.py. Bytes are exact; seconds
are this machine's, of pickling, copying as into Ray's store, and reading.
"""

import pickle
import sys
import time
from itertools import accumulate, chain, pairwise

import torch

from configs.schema import Config
from data.protocol import DataProto
from training.roles import ROLES, SEQUENCES
from workers.group import shares_of

SAMPLED = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "weight_versions")
CALLS = {  # (role, verb): columns of floats that the batch has by then
    ("rollout", "answers"): ["rollout_log_probs"],
    ("actor", "compute_log_prob"): ["rollout_log_probs", "token_level_scores"],
    ("actor", "answers"): ["old_log_probs"],
    ("ref", "compute_log_prob"): ["rollout_log_probs", "token_level_scores", "old_log_probs"],
    ("ref", "answers"): ["ref_log_prob"],
    ("actor", "update_policy"): [
        *("token_level_scores", "token_level_rewards", "old_log_probs", "ref_log_prob", "advantages", "returns"),
    ],
}


def made_up(prompts: int, samples: int, prompt_width: int, width: int) -> DataProto:
    """Lays out rows whose lengths are lognormal, a third of the widths on average, with every column of `CALLS`."""
    draw = torch.Generator().manual_seed(0)
    rows = prompts * samples
    prompt, response = torch.randn(2, rows, 1, generator=draw).mul(0.8).exp() / 4
    place = torch.arange(-prompt_width, width)
    is_real = (place >= -1 - prompt * prompt_width) & (place <= response * width)
    ids, real = torch.randint(151_936, is_real.shape, generator=draw) * is_real, is_real[:, prompt_width:]
    scores = torch.zeros(real.shape).scatter(1, real.sum(1, keepdim=True) - 1, 1.0)
    floats = {name: torch.rand(real.shape, generator=draw) * real for name in sorted({*chain(*CALLS.values())})}
    return DataProto.from_dict(
        {
            **floats,
            **dict.fromkeys(["token_level_scores", "token_level_rewards"], scores),
            "prompts": ids[:, :prompt_width],
            "responses": ids[:, prompt_width:],
            "input_ids": ids,
            "attention_mask": is_real.long(),
            "position_ids": (is_real.cumsum(1) - 1).clamp(min=0),
            "response_mask": real.long(),
            "weight_versions": real.long() * 8 - 1,
        }
    )


class Plain(DataProto):
    """Pickles every tensor as it is, as earlier versions did."""

    def __getstate__(self) -> tuple:
        states = {}
        for name, tensor in self.tensors.items():
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            states[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content
        return (self.batch.batch_size, states), self.non_tensor_batch, self.meta_info


def before_and_after(batch: DataProto, role: str, verb: str, workers: int) -> tuple[list[DataProto], list[DataProto]]:
    """Makes the shares of a call, or the answers to it: as earlier versions sent them, and as they are sent."""
    if verb == "answers" and role != "rollout":
        kept, reads = CALLS[role, verb], None
    else:
        kept, reads = [*SAMPLED, *CALLS[role, verb]], ROLES[role].reads(Config()).get(verb)
    columns = batch.select(kept)
    rows = [share.batch for share in shares_of(batch.select([*SAMPLED]), workers)]
    starts = [0, *accumulate(map(len, rows))]
    shares = [columns[start:end] for start, end in pairwise(starts)]
    read = [share.select([name for name in kept if reads is None or name in {*SEQUENCES, *reads}]) for share in shares]
    return [Plain(share.batch) for share in shares], read


def sent(pieces: list[DataProto]) -> tuple[int, float]:
    """Returns the bytes of pieces, and the seconds in which they are pickled, copied and read."""
    start, buffers = time.perf_counter(), []
    pickled = pickle.dumps(pieces, protocol=5, buffer_callback=buffers.append)
    copies = [bytes(buffer.raw()) for buffer in buffers]
    pickle.loads(pickled, buffers=copies)
    return len(pickled) + sum(map(len, copies)), time.perf_counter() - start


def main(widths: list[int]) -> None:
    for width in widths:
        batch, workers = made_up(256, 8, 512 if width < 8192 else 1024, width), 8 if width < 8192 else 64
        totals = [0.0] * 4
        for role, verb in CALLS:
            figures = [number for pieces in before_and_after(batch, role, verb, workers) for number in sent(pieces)]
            totals = [total + number for total, number in zip(totals, figures, strict=True)]
            print(f"R={width} {role + '.' + verb:<24}", LINE.format(*figures))
        print(f"R={width} {'a step':<24}", LINE.format(*totals))


LINE = "{:>14,.0f} bytes {:6.2f} s -> {:>14,.0f} bytes {:6.2f} s"

if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1024, 8192])
