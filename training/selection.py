"""Which rollouts are learnt from: dynamic sampling (DAPO), re-sampling by score (PF-PPO).

Pure functions of a batch; the trainer decides when.
"""

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from data.protocol import DataProto
from training.core_algos import Groups, pf_ppo_weights

TOLERANCE = 1e-6  # float32 sums of the same rewards of several turns may differ in the last bit


def select_lesson(batch: DataProto, learnt_mask: Tensor, config: AlgorithmConfig, seed: int) -> DataProto:
    """What the updates learn from: `batch` under `learnt_mask` [B, R]; with PF-PPO its rows are drawn anew."""
    lesson = DataProto(batch.batch.copy(), batch.non_tensor_batch, batch.meta_info)
    lesson.batch["response_mask"] = learnt_mask
    if not config.use_pf_ppo:
        return lesson
    settings, generator = config.pf_ppo, torch.Generator().manual_seed(seed)
    return compute_pf_ppo_reweight_data(lesson, settings.reweight_method, settings.weight_pow, generator=generator)


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


def compute_pf_ppo_reweight_data(
    batch: DataProto,
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    *,
    generator: torch.Generator | None = None,
) -> DataProto:
    """PF-PPO (arXiv:2409.06957): as many rows as `batch`, drawn with replacement by `pf_ppo_weights` of their scores.

    Failed rows are never drawn; if all failed, the batch stays. The drawn rows take the uids of the places they go
    to, so that mini-batches are as many and as large as without. Raises ValueError on an unknown method.
    """
    completed = batch.batch["response_mask"].any(1).nonzero()[:, 0]
    if len(completed) == 0:
        return batch
    weights = pf_ppo_weights(batch.batch["token_level_scores"].sum(1)[completed], reweight_method, weight_pow)
    drawn = completed[torch.multinomial(weights, len(batch), replacement=True, generator=generator)]
    resampled = batch.select_idxs(drawn)
    if "uid" in batch.non_tensor_batch:
        resampled.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"]
    return resampled
