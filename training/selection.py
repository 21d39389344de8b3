"""Which rollouts are learnt from: dynamic sampling (DAPO), rows drawn by their score (PF-PPO).

Pure functions of a batch; the trainer decides when.
"""

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from data.protocol import DataProto
from training.core_algos import Groups, pf_ppo_weights

TOLERANCE = 1e-6  # float32 sums of the same rewards of several turns may differ in the last bit


def rows_with_signal(batch: DataProto, metric: str) -> Tensor:
    """[B] bool: rows of the groups (rows of one uid) whose completed samples differ in `metric`.

    `metric` is "score" (or "reward"), the sum of token_level_scores, or a numeric column such as what the reward
    returned beside the score. Raises ValueError if there is no such column, or it holds anything but numbers.
    """
    values = metric_of_rows(batch, metric)
    groups = Groups(batch.non_tensor_batch["uid"], batch.batch["response_mask"])
    spread = groups.reduce(values, "amax") - groups.reduce(values, "amin")
    return spread > TOLERANCE * groups.reduce(values.abs(), "amax").clamp(min=1)


def metric_of_rows(batch: DataProto, metric: str) -> Tensor:
    """[B] float32, the numbers that `rows_with_signal` compares."""
    if metric in ("score", "reward"):
        return batch.batch["token_level_scores"].sum(1)
    key = f"algorithm.filter_groups.metric={metric}"
    if metric not in batch.non_tensor_batch:
        raise ValueError(
            f"{key}: the reward returns no such number. Use score, or one of {batch.meta_info['reward_extra_keys']}."
        )
    try:
        return torch.tensor([float(value) for value in batch.non_tensor_batch[metric]])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: the reward must return a number under that name in every row; {error}.") from error


def draw_rows(batch: DataProto, config: AlgorithmConfig, seed: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Column drawn_row with `use_pf_ppo` (arXiv:2409.06957), [B] int64: the row that is learnt from in each place.

    Rows are drawn with replacement, each as often as `pf_ppo_weights` of its score says. Failed rows are never drawn;
    if all failed, each stays. Places keep their uids, so mini-batches are as many and as large as without. No metrics.
    """
    if not config.use_pf_ppo:
        return {}, {}
    completed = batch.batch["response_mask"].any(1).nonzero()[:, 0]
    if len(completed) == 0:
        return {"drawn_row": torch.arange(len(batch))}, {}
    scores, settings = batch.batch["token_level_scores"].sum(1)[completed], config.pf_ppo
    weights = pf_ppo_weights(scores, settings.reweight_method, settings.weight_pow)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(weights, len(batch), replacement=True, generator=generator)
    return {"drawn_row": completed[drawn]}, {}
