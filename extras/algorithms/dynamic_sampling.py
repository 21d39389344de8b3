"""Draws further prompts until enough groups of samples teach something (dynamic sampling of DAPO, arXiv:2503.14476).

An episode of several rows is one sample, and its score theirs together.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from configs.schema import Config
from data.protocol import DataProto
from training.core_algos import Groups, is_close
from training.episode_rows import EpisodeRows
from training.mini_batches import rows_by_prompt
from training.ray_trainer import RayPPOTrainer, Rollouts
from training.reward import concat_scored, reward_metrics


def dynamic_sampling(trainer_class: type[RayPPOTrainer], config: Config) -> type[RayPPOTrainer]:
    """Makes a trainer that samples dynamically of any other; a `collect` of the user's goes first."""
    bases = (DynamicSampling,) if trainer_class is RayPPOTrainer else (trainer_class, DynamicSampling)
    return type(f"DynamicSampling{trainer_class.__name__}", bases, {})


class DynamicSampling(RayPPOTrainer):
    """Learns from groups whose samples differ, by drawing further prompts if need be; after max_num_gen_batches, groups
    that tie fill the batch up."""

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        batch, metrics = self.draw(step, 0, timing)
        needed, draws, settings = len(rows_by_prompt(batch)), 1, self.config.algorithm.filter_groups
        teaches = metrics_compared(self.config), settings.accuracy_lower_bound, settings.accuracy_upper_bound
        differ, tie = groups_by_signal(batch, *teaches)
        while len(differ) < needed and draws != settings.max_num_gen_batches:
            further, metrics = self.draw(step, draws, timing)
            batch = concat_scored([batch, further])
            differ, tie = groups_by_signal(batch, *teaches)
            draws += 1
        groups = [*differ, *tie]
        metrics |= {"train/num_gen_batches": draws, "group/kept_frac": len(differ) / len(groups)}
        metrics |= reward_metrics(batch)  # of all that was drawn, as the scores decide what stays
        left_out = batch.select_idxs([*chain(*groups[needed:])]) if len(groups) > needed else None
        return Rollouts(batch.select_idxs([*chain(*groups[:needed])]), metrics, left_out)


def metrics_compared(config: Config) -> list[str]:
    """Names that by which groups must differ: filter_groups.metric, or, of gdpo's rewards alone, any of them."""
    algorithm = config.algorithm
    is_by_score = algorithm.filter_groups.metric in ("score", "reward")
    reads_several = algorithm.adv_estimator == "gdpo" and is_by_score and algorithm.gdpo_reward_keys
    return [*algorithm.gdpo_reward_keys] if reads_several else [algorithm.filter_groups.metric]


def groups_by_signal(
    batch: DataProto, metrics: Sequence[str], *bounds: float | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the rows of each group with signal in any metric (`rows_with_signal`), and those of each other group."""
    groups = rows_by_prompt(batch)
    has_signal = torch.stack([rows_with_signal(batch, metric, *bounds) for metric in metrics]).any(0).tolist()
    return [rows for rows in groups if has_signal[rows[0]]], [rows for rows in groups if not has_signal[rows[0]]]


def rows_with_signal(batch: DataProto, metric: str, low: float | None = None, high: float | None = None) -> Tensor:
    """Returns [B] bool: rows of the groups (rows of one uid) whose completed samples differ in `metric`, and whose mean
    of it is from `low` to `high`.

    `metric` is "score" (or "reward", or of a reward that returns a lone number "acc", as in verl), the sum of
    token_level_scores, or a numeric column such as what the reward returned beside the score. Raises ValueError if
    there is no such column, or it holds anything but numbers.
    """
    episodes = EpisodeRows(batch)
    values = metric_of_episodes(episodes, metric)
    groups = Groups(batch.uid[episodes.last_row], episodes.is_complete()[:, None])
    has_signal, means = groups.differ(values), groups.mean(values)
    for bound, reaches in ((low, torch.ge), (high, torch.le)):
        has_signal &= bound is None or reaches(means, bound) | is_close(means, torch.tensor(bound))
    return has_signal[episodes.episode_of_row]


def metric_of_episodes(episodes: EpisodeRows, metric: str) -> Tensor:
    """Returns what `rows_with_signal` compares, [E] float32; a column's numbers are those of an episode's last row."""
    batch = episodes.batch
    returned, is_column = batch.meta_info.get("reward_extra_keys"), metric in batch.non_tensor_batch
    if metric in ("score", "reward") or (metric == "acc" and not returned and not is_column):
        return episodes.scores()
    key = f"algorithm.filter_groups.metric={metric}"
    if not is_column:
        choices = f", or one of {returned}" if returned else ", or let it return a dict with score and others"
        raise ValueError(f"{key}: the reward returns no such number. Use score{choices}.")
    try:
        return torch.tensor([float(value) for value in batch.non_tensor_batch[metric][episodes.last_row]])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: the reward must return a number under that name in every row; {error}.") from error
