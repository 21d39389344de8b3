"""A small ragged batch of rollouts, as the actor and the critic are given it."""

from collections.abc import Callable

import torch
from torch import Tensor

from configs.schema import ActorConfig, CriticConfig
from data.padding import Sample, collate
from data.protocol import DataProto
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


def ragged_batch(seed: int = 0) -> DataProto:
    """9 rows in one place too wide; row 0 has observation tokens in its middle, MASKED_ROW no policy token at all.

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
    """What an update is told for which `batch` is one mini-batch."""
    return Update(step=0, seed=0, temperature=TEMPERATURE, counts=global_batch_info(batch, config))


def recorded(engine: TrainEngine, update: Callable[[], dict[str, float]]) -> Recorded:
    """What `update`, one step of the engine's optimiser, did."""
    gradient: list[Tensor] = []
    parameters = list(engine.module.parameters())
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
