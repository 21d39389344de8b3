"""Which rollouts are learnt from: dynamic sampling (DAPO), rows drawn by their score (PF-PPO).

Pure functions of a batch; the trainer decides when. An episode of several rows is one sample, and its score theirs
together.
"""

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from data.protocol import DataProto
from training.core_algos import Groups
from training.episodes import Episodes
from training.mini_batches import rows_by_prompt

TOLERANCE = 1e-6  # float32 sums of the same rewards of several turns may differ in the last bit


def groups_by_signal(batch: DataProto, metric: str) -> tuple[list[list[int]], list[list[int]]]:
    """The rows of each group with signal (`rows_with_signal`), and those of each of the others."""
    groups, has_signal = rows_by_prompt(batch), rows_with_signal(batch, metric).tolist()
    return [rows for rows in groups if has_signal[rows[0]]], [rows for rows in groups if not has_signal[rows[0]]]


def rows_with_signal(batch: DataProto, metric: str) -> Tensor:
    """[B] bool: rows of the groups (rows of one uid) whose completed samples differ in `metric`.

    `metric` is "score" (or "reward"), the sum of token_level_scores, or a numeric column such as what the reward
    returned beside the score. Raises ValueError if there is no such column, or it holds anything but numbers.
    """
    episodes = Episodes(batch)
    values = metric_of_episodes(episodes, metric)
    groups = Groups(batch.uid[episodes.last_row], episodes.completed()[:, None])
    spread = groups.reduce(values, "amax") - groups.reduce(values, "amin")
    has_signal = spread > TOLERANCE * groups.reduce(values.abs(), "amax").clamp(min=1)
    return has_signal[episodes.of_row]


def metric_of_episodes(episodes: Episodes, metric: str) -> Tensor:
    """[E] float32, the numbers that `rows_with_signal` compares; a column's are those of an episode's last row."""
    batch = episodes.batch
    if metric in ("score", "reward"):
        return episodes.scores()
    key = f"algorithm.filter_groups.metric={metric}"
    if metric not in batch.non_tensor_batch:
        raise ValueError(
            f"{key}: the reward returns no such number. Use score, or one of {batch.meta_info['reward_extra_keys']}."
        )
    try:
        return torch.tensor([float(value) for value in batch.non_tensor_batch[metric][episodes.last_row]])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: the reward must return a number under that name in every row; {error}.") from error


def draw_rows(batch: DataProto, config: AlgorithmConfig, seed: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Column drawn_row with `use_pf_ppo` (arXiv:2409.06957), [B] int64: the row that is learnt from in each place.

    Rows are drawn with replacement, each as often as `pf_ppo_weights` of its episode's score says. Failed rows are
    never drawn; if all failed, each stays. Places keep their uids, so mini-batches are as many and as large as without.
    No metrics.
    """
    if not config.use_pf_ppo:
        return {}, {}
    completed = batch.batch["response_mask"].any(1).nonzero()[:, 0]
    if len(completed) == 0:
        return {"drawn_row": torch.arange(len(batch))}, {}
    episodes, settings = Episodes(batch), config.pf_ppo
    scores = episodes.scores()[episodes.of_row[completed]]
    weights = pf_ppo_weights(scores, settings.reweight_method, settings.weight_pow)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(weights, len(batch), replacement=True, generator=generator)
    return {"drawn_row": completed[drawn]}, {}


def pf_ppo_weights(scores: Tensor, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """How often PF-PPO (arXiv:2409.06957) draws each row, with replacement, relative to the others: [B] -> [B].

    "pow" |score|^weight_pow; "max_min" 1 for the highest and the lowest score of the batch, else 0; "max_random" 0.4
    for the highest, else 0.1; all + 1e-8. `scores` are those of rows that did not fail.
    Raises ValueError on another method.
    """
    match reweight_method:
        case "pow":
            weights = scores.abs() ** weight_pow
        case "max_min":
            weights = ((scores == scores.max()) | (scores == scores.min())).to(scores)
        case "max_random":
            weights = 0.1 + 0.3 * (scores == scores.max()).to(scores)
        case _:
            raise ValueError(f"reweight_method is {reweight_method!r}, but must be 'pow', 'max_min' or 'max_random'")
    return weights + 1e-8
