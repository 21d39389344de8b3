"""Collects the data of a step: prompts, the policy's responses, their scores; selects which of them are learnt from.

Dynamic sampling (DAPO) is pure functions of a batch. An episode of several rows
is one sample, and its score theirs together. Samplers and datasets that follow the run are updated here as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.protocol import DataProto
from data.sampler import Dynamic, PromptLoader, hears_metrics
from data.seeding import derive_seed
from data.types import SamplingParams
from training.advantage import estimator_needs
from training.environment import assign_agents
from training.episode_rows import EpisodeRows, check_failures, greedy_scores
from training.estimators import Groups
from training.metric_utils import timer
from training.mini_batches import rows_by_prompt
from training.reward import RewardManager, add_scores, concat_scored, reward_metrics
from training.torch_functional import masked_sum

TOLERANCE = 1e-6  # float32 sums of the same rewards of several turns may differ in the last bit
LATER = ("advantages", "returns")  # computed after rows were left out


class Collector:
    """Samples responses of the policy to the prompts of `loader`, and scores them."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        roles: Mapping[str, Any],
        reward: RewardManager,
        loader: PromptLoader,
        run_stages: Callable[..., dict[str, float]] = lambda *_: {},
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.rollout = roles["rollout"]
        self.reward = reward
        self.loader = loader
        self.run_stages = run_stages
        self.left_out: DataProto | None = None  # rows that the last step drew and does not learn from
        self.needs_greedy_scores = "reward_baselines" in estimator_needs(config.algorithm.adv_estimator)

    def collect(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Collects scored responses to the prompts of `step`, and their metrics; the seconds go to `timing`.

        With algorithm.filter_groups, as many groups, whose samples differ, from further prompts if need be
        (dynamic sampling, arXiv:2503.14476); after max_num_gen_batches, groups that tie fill the batch up.
        """
        batch, metrics = self.draw(step, 0, timing)
        settings = self.config.algorithm.filter_groups
        if not settings.enable:
            return batch, metrics | reward_metrics(batch)
        wanted, draws = len(rows_by_prompt(batch)), 1
        differ, tie = groups_by_signal(batch, settings.metric)
        while len(differ) < wanted and draws != settings.max_num_gen_batches:
            further, metrics = self.draw(step, draws, timing)
            batch = concat_scored([batch, further])
            differ, tie = groups_by_signal(batch, settings.metric)
            draws += 1
        groups = [*differ, *tie]
        metrics |= {"train/num_gen_batches": draws, "group/kept_frac": len(differ) / len(groups)}
        metrics |= reward_metrics(batch)  # of all that was drawn: what is left of it is chosen by its scores
        self.left_out = batch.select_idxs([*chain(*groups[wanted:])]) if len(groups) > wanted else None
        return batch.select_idxs([*chain(*groups[:wanted])]), metrics

    def draw(self, step: int, number: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Samples and scores responses to the next prompts, as draw `number` of the step; has the metrics of stages.

        For ReMax, column reward_baselines [B]: the score of the greedy response to the row's prompt.
        """
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams.from_config(rollout, rollout.response_length)
        seed = derive_seed(self.config.trainer.seed, "rollout", step, number)
        with timer("data", timing):
            prompts = self.next_prompts(step, number)
        with timer("gen", timing):
            batch = self.rollout.generate_sequences(prompts.repeat(rollout.n, interleave=True), sampling, seed)
            if "episode" in batch:
                check_failures(batch, self.config.env.max_failed_fraction)
        with timer("reward", timing):
            batch = add_scores(batch, self.reward, self.tokenizer, self.config.reward)
            metrics = self.run_stages("scored", batch, timing)
        if self.needs_greedy_scores:
            with timer("gen_max", timing):
                greedy = self.rollout.generate_sequences(prompts, replace(sampling, do_sample=False), seed)
                greedy = add_scores(greedy, self.reward, self.tokenizer, self.config.reward)
                self.run_stages("scored", greedy, timing)
            batch.batch["reward_baselines"] = greedy_scores(greedy, batch)
        return batch, metrics

    def next_prompts(self, step: int, number: int) -> DataProto:
        """Takes the next prompts of the data, each under a uid of its own."""
        prompts = DataProto.from_single_dict(self.loader.next_batch())
        uids = [f"{step}-{number}-{place}" for place in range(len(prompts))]
        prompts = prompts.union(DataProto.from_single_dict({"uid": uids}))
        return assign_agents(prompts, self.config)


def groups_by_signal(batch: DataProto, metric: str) -> tuple[list[list[int]], list[list[int]]]:
    """The rows of each group with signal (`rows_with_signal`), and those of each of the others."""
    groups, has_signal = rows_by_prompt(batch), rows_with_signal(batch, metric).tolist()
    return [rows for rows in groups if has_signal[rows[0]]], [rows for rows in groups if not has_signal[rows[0]]]


def rows_with_signal(batch: DataProto, metric: str) -> Tensor:
    """[B] bool: rows of the groups (rows of one uid) whose completed samples differ in `metric`.

    `metric` is "score" (or "reward", or of a reward that returns a lone number "acc", as in verl), the sum of
    token_level_scores, or a numeric column such as what the reward returned beside the score. Raises ValueError if
    there is no such column, or it holds anything but numbers.
    """
    episodes = EpisodeRows(batch)
    values = metric_of_episodes(episodes, metric)
    groups = Groups(batch.uid[episodes.last_row], episodes.is_complete()[:, None])
    spread = groups.reduce(values, "amax") - groups.reduce(values, "amin")
    has_signal = spread > TOLERANCE * groups.reduce(values.abs(), "amax").clamp(min=1)
    return has_signal[episodes.of_row]


def metric_of_episodes(episodes: EpisodeRows, metric: str) -> Tensor:
    """[E] float32, the numbers that `rows_with_signal` compares; a column's are those of an episode's last row."""
    batch = episodes.batch
    returned, is_column = batch.meta_info.get("reward_extra_keys"), metric in batch.non_tensor_batch
    if metric in ("score", "reward") or (metric == "acc" and not returned and not is_column):
        return episodes.scores()
    key = f"algorithm.filter_groups.metric={metric}"
    if not is_column:
        others = f", or one of {returned}" if returned else ", or let it return a dict with score and others"
        raise ValueError(f"{key}: the reward returns no such number. Use score{others}.")
    try:
        return torch.tensor([float(value) for value in batch.non_tensor_batch[metric][episodes.last_row]])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: the reward must return a number under that name in every row; {error}.") from error


def update_sampler(loader: PromptLoader, batch: DataProto, left_out: DataProto | None) -> None:
    """Updates the sampler and the dataset after a step, by its `batch` and the rows that dynamic sampling left out.

    The sampler by `update(batch)`, where the rows left out come last (`with_left_out`), or by
    `update(indices, metrics)`: the places of these samples in the dataset, [E] int64, and numbers of each
    (`sample_metrics`), without those that failed: they are no measurement. A dataset that has it by
    `on_batch_end(batch)`.
    """
    rows = with_left_out(batch, left_out)
    if hears_metrics(loader.sampler):
        episodes = EpisodeRows(rows)
        measured = episodes.is_complete().numpy()
        metrics = {name: values[measured] for name, values in sample_metrics(rows).items()}
        loader.sampler.update(rows.dataset_position[episodes.last_row][measured].astype(np.int64), metrics)
    else:
        loader.sampler.update(rows)
    if isinstance(loader.dataset, Dynamic):
        loader.dataset.on_batch_end(rows)


def with_left_out(batch: DataProto, left_out: DataProto | None) -> DataProto:
    """`batch`, and below it the rows that were left out; their advantages and returns are 0, as nothing was learnt.

    Columns that only the rows of `batch` have, such as old_log_probs, are left out then.
    """
    if left_out is None:
        return batch
    zeros = {name: torch.zeros_like(left_out.batch["token_level_scores"]) for name in LATER}
    below = DataProto.from_dict({**left_out.tensors, **zeros}, left_out.non_tensor_batch, left_out.meta_info)
    above = batch.select(below.tensors, below.non_tensor_batch)
    return DataProto.concat([above, below])


def sample_metrics(batch: DataProto) -> dict[str, np.ndarray]:
    """Numbers of each sample, by name, [E] float64, and the numbers that the reward returned beside the score.

    A sample is a row, or an episode of several. reward: the score. length: the policy's tokens. loss: the policy
    gradient's before the update, where the ratio is 1, which is the mean over the tokens of -advantage.
    """
    episodes, mask = EpisodeRows(batch), batch.batch["response_mask"]
    lengths = episodes.total(mask.sum(1))
    advantages = episodes.total(masked_sum(batch.batch["advantages"], mask, axis=1))
    metrics = {"reward": episodes.scores(), "length": lengths, "loss": -advantages / lengths.clamp(min=1)}
    numbers = {name: values.double().numpy() for name, values in metrics.items()}
    extra = {name: batch.non_tensor_batch[name][episodes.last_row] for name in batch.meta_info["reward_extra_keys"]}
    return extra | numbers
