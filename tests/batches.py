"""Small batches: ragged rows, as the actor and the critic are given them, and episodes of several turns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.schema import ActorConfig, CriticConfig
from data.padding import collate, collate_turns
from data.protocol import DataProto
from data.types import Sample
from training.mini_batches import Update, global_batch_info
from workers.engine import TrainEngine
from workers.micro_batches import MicroBatchSize

# Metrics, the gradient that reached the optimiser, and the weights after it.
Recorded = tuple[dict[str, float], list[Tensor], list[Tensor]]

PROMPT_WIDTH, RESPONSE_WIDTH, TEMPERATURE = 8, 6, 0.8
PROMPT_LENGTHS = (3, 8, 1, 5, 5, 2, 7, 4, 6)
RESPONSE_LENGTHS = (6, 1, 4, 2, 5, 3, 1, 6, 4)
MASKED_ROW = 3  # real tokens that the policy did not produce
CUTS = {
    "1 row": MicroBatchSize(1, 0),
    "3 rows": MicroBatchSize(3, 0),
    "8 rows": MicroBatchSize(8, 0),
    "all rows": MicroBatchSize(9, 0),
    "24 tokens": MicroBatchSize(None, 24),
}


def close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    """Asserts that two arrays of numbers agree, relatively or absolutely, as float64."""
    one, other = (torch.as_tensor(numbers, dtype=torch.float64) for numbers in (actual, expected))
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def ragged_batch(seed: int = 0) -> DataProto:
    """Makes 9 rows, padded one place too wide; row 0 has observations in its middle, MASKED_ROW no policy token.

    Every float column is random where the response has tokens, and 1e3 beyond it: padding must not matter.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [random_ids(length, generator) for length in PROMPT_LENGTHS]
    responses = [random_ids(length, generator) for length in RESPONSE_LENGTHS]
    columns = padded(prompts, responses, PROMPT_WIDTH + 1, RESPONSE_WIDTH + 1, pad_token_id=1).tensors
    real = columns["attention_mask"][:, PROMPT_WIDTH + 1 :]
    columns["response_mask"] = real.clone()
    columns["response_mask"][0, 2:4] = 0
    columns["response_mask"][MASKED_ROW] = 0
    for name, mean, spread in [
        ("old_log_probs", -4.6, 0.3),
        ("ref_log_prob", -4.6, 0.3),
        ("advantages", 0.0, 1.0),
        ("values", 0.0, 0.5),
        ("returns", 0.0, 1.0),
        ("rollout_is_weights", 1.0, 0.2),
    ]:
        column = mean + spread * torch.randn(real.shape, generator=generator)
        columns[name] = torch.where(real.bool(), column, 1e3)
    return DataProto.from_dict(columns)


def padded(
    prompts: list[list[int]], responses: list[list[int]], prompt_width: int, response_width: int, pad_token_id: int
) -> DataProto:
    """The columns of a rollout of these responses; one without tokens has failed."""
    samples = []
    for prompt, response in zip(prompts, responses, strict=True):
        samples.append(Sample(prompt, end_reason="terminated" if response else "env_error"))
        samples[-1].extend(response, log_probs=None, policy=True)
    return collate(samples, prompt_width, response_width, pad_token_id)


def update_of(batch: DataProto, config: ActorConfig | CriticConfig) -> Update:
    """The arguments of an update for which `batch` is one mini-batch."""
    return Update(step=0, seed=0, temperature=TEMPERATURE, counts=global_batch_info(batch, config))


def recorded(engine: TrainEngine, update: Callable[[], dict[str, float]]) -> Recorded:
    """Returns what `update`, one step of the engine's optimiser, did."""
    gradient: list[Tensor] = []
    parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradient.extend(parameter.grad.clone() for parameter in parameters)
    )
    metrics = update()
    return metrics, gradient, [parameter.detach().clone() for parameter in parameters]


def random_ids(length: int, generator: torch.Generator) -> list[int]:
    return torch.randint(6, 100, (length,), generator=generator).tolist()


def unpadded(batch: DataProto, row: int) -> tuple[Tensor, int]:
    """(ids of one row without padding, length of its prompt)."""
    columns = batch.batch
    kept = columns["attention_mask"][row].bool()
    prompt = int(kept[: columns["prompts"].shape[1]].sum())
    return columns["input_ids"][row][kept], prompt


def policy_tokens(batch: DataProto, row: int) -> list[int]:
    """Columns of the tokens of a row that the policy produced."""
    return batch.batch["response_mask"][row].nonzero()[:, 0].tolist()


def aggregate(losses: list[list[Tensor]], mode: str, scale: float) -> Tensor:
    """Token losses of each row to one number, as the table in training/core_algos.py: agg_loss says."""
    rows = [torch.stack(row) for row in losses if row]
    total, tokens = sum(row.sum() for row in rows), sum(len(row) for row in rows)
    return {
        "token-mean": total / tokens,
        "token-sum": total,
        "seq-mean-token-sum": total / len(rows),
        "seq-mean-token-mean": sum(row.mean() for row in rows) / len(rows),
        "seq-mean-token-sum-norm": total / len(rows) / scale,
    }[mode]


def relative_distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """‖found − wanted‖ / ‖wanted‖ over all tensors together."""
    one, other = (torch.cat([tensor.detach().flatten() for tensor in tensors]) for tensors in (found, wanted))
    return float((one - other).norm() / other.norm())


@dataclass
class Turn:
    """One turn of an episode: tokens of the policy, what it was told after them, and what they earned."""

    said: int
    told: int = 0
    reward: float = 0.0


def episode_batch(
    groups: Sequence[Sequence[Sequence[Turn]]], history: str, seed: int = 0, **columns: list
) -> DataProto:
    """Episodes of `groups` (by prompt, then by sample) as env.history says: a row each (transcript), or a turn (turns).

    The float columns that estimators read are random, and the same for the same token in both forms; `columns` have an
    entry an episode. An episode without turns has failed: one row, with a token that is nobody's.
    """
    generator = torch.Generator().manual_seed(seed)
    names, rows = ("values", "old_log_probs", "ref_log_prob", "sum_pi_squared", "rollout_is_weights"), []
    samples: list[Sample] = []
    for number, (uid, episode) in enumerate((f"group-{g}", turns) for g, group in enumerate(groups) for turns in group):
        extras = {name: values[number] for name, values in columns.items()}
        extras |= {"uid": uid, "episode": number, "failure": None if episode else "hung (my_env.py:7)"}
        extras |= {"episode_return": sum(turn.reward for turn in episode), "__num_turns__": len(episode)}
        parts: list[Sample] = []
        for place, turn in enumerate(episode or [Turn(1)]):
            if not parts or history == "turns":
                end_reason = "terminated" if episode else "timeout"
                parts.append(Sample([5, 6, 7], extras=extras, end_reason=end_reason))
                rows.append([])
            length = turn.said + turn.told
            parts[-1].extend([10 + place] * turn.said, [-0.5] * turn.said, True, turn=place)
            parts[-1].rewards[-1] += turn.reward
            parts[-1].extend([50 + place] * turn.told, None, False, turn=place)
            rows[-1] += torch.rand(length, len(names), generator=generator).tolist()
        if not episode:
            parts[-1].fail()
        samples += parts
    width = max(len(sample.token_ids) for sample in samples)
    batch = collate(samples, 4, width, pad_token_id=0)
    batch.batch.update(collate_turns(samples, width))
    numbers = torch.tensor([row + [[0.0] * len(names)] * (width - len(row)) for row in rows])
    for place, name in enumerate(names):
        is_log = name in ("old_log_probs", "ref_log_prob")
        batch.batch[name] = numbers[..., place].clamp(0.1, 0.9).log() if is_log else numbers[..., place]
    return batch


def random_groups(seed: int) -> list[list[list[Turn]]]:
    """Groups of 1 to 4 episodes of 1 to 5 turns, some failed, of 1 to 3 tokens and up to 2 of observation."""
    rng = np.random.default_rng(seed)

    def turn(last: bool) -> Turn:
        return Turn(int(rng.integers(1, 4)), 0 if last else int(rng.integers(0, 3)), float(rng.integers(-1, 3)))

    def episode() -> list[Turn]:
        turns = 0 if rng.random() < 0.2 else int(rng.integers(1, 6))
        return [turn(place == turns - 1) for place in range(turns)]

    return [[episode() for _ in range(rng.integers(1, 5))] for _ in range(rng.integers(1, 4))]


def scored(scores: list[float], uids: str, failed: tuple[int, ...] = (), **columns) -> DataProto:
    """A row of two tokens for each of `scores`, of the group that its letter in `uids` names."""
    mask = torch.ones(len(scores), 2, dtype=torch.int64)
    mask[list(failed)] = 0
    tensors = {
        "response_mask": mask,
        "token_level_scores": torch.tensor([[0.0, score] for score in scores]),
        "number": torch.arange(len(scores)),  # to know the rows by, wherever they go
    }
    batch = DataProto.from_single_dict({**tensors, "uid": list(uids), "name": [str(i) for i in range(len(scores))]})
    batch.non_tensor_batch |= {name: np.array(values, dtype=object) for name, values in columns.items()}
    batch.meta_info["reward_extra_keys"] = list(columns)
    return batch
