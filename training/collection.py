"""The data of a step: prompts, the policy's responses to them, their scores."""

from dataclasses import replace
from itertools import chain

from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.protocol import DataProto
from data.sampler import PromptLoader
from data.seeding import derive_seed
from data.types import SamplingParams
from training.advantage import check_log_probs, estimator_needs
from training.episodes import greedy_scores
from training.game import begun
from training.health import check_failures
from training.metric_utils import timer
from training.mini_batches import rows_by_prompt
from training.reward import RewardManager, count_as_reward, reward_metrics
from training.reward_model import scored
from training.roles import Roles
from training.selection import groups_by_signal


class Collector:
    """Asks the policy and scores what it says; `loader` hands out the prompts."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        roles: Roles,
        reward: RewardManager,
        loader: PromptLoader,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.rollout, self.rm = roles.rollout, roles.rm
        self.reward = reward
        self.loader = loader
        self.left_out: DataProto | None = None  # rows that the last step drew and does not learn from
        self.needs_greedy_scores = "reward_baselines" in estimator_needs(config.algorithm.adv_estimator)

    def collect(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Scored responses to the prompts of `step`, and metrics of them; the seconds go to `timing`.

        With algorithm.filter_groups, as many groups, whose samples differ, from further prompts if need be
        (dynamic sampling, arXiv:2503.14476); after max_num_gen_batches, groups that tie fill the batch up.
        """
        batch = self.draw(step, 0, timing)
        metrics = reward_metrics(batch)
        settings = self.config.algorithm.filter_groups
        if not settings.enable:
            return batch, metrics
        wanted, draws = len(rows_by_prompt(batch)), 1
        differ, tie = groups_by_signal(batch, settings.metric)
        while len(differ) < wanted and draws != settings.max_num_gen_batches:
            batch = DataProto.concat([batch, self.draw(step, draws, timing)])
            differ, tie = groups_by_signal(batch, settings.metric)
            draws += 1
        groups = [*differ, *tie]
        metrics |= {"train/num_gen_batches": draws, "group/kept_frac": len(differ) / len(groups)}
        self.left_out = batch.select_idxs([*chain(*groups[wanted:])]) if len(groups) > wanted else None
        return batch.select_idxs([*chain(*groups[:wanted])]), metrics

    def draw(self, step: int, number: int, timing: dict[str, float]) -> DataProto:
        """Scored responses to the next prompts, the draw of this number in the step.

        For ReMax, column reward_baselines [B]: the score of the greedy response to the row's prompt.
        """
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams.from_config(rollout, rollout.response_length)
        seed = derive_seed(self.config.trainer.seed, "rollout", step, number)
        prompts = self.next_prompts(step, number)
        with timer("gen", timing):
            batch = self.rollout.generate_sequences(prompts.repeat(rollout.n, interleave=True), sampling, seed)
            check_failures(batch, self.config.env.max_failed_fraction)
            check_log_probs(batch, self.config.algorithm.rollout_correction)
        count_as_reward(batch, timing)
        with timer("reward", timing):
            batch = scored(batch, self.reward, self.rm, self.tokenizer, self.config.reward)
        if self.needs_greedy_scores:
            with timer("gen_max", timing):
                greedy = self.rollout.generate_sequences(prompts, replace(sampling, do_sample=False), seed)
                greedy = scored(greedy, self.reward, self.rm, self.tokenizer, self.config.reward)
            batch.batch["reward_baselines"] = greedy_scores(greedy, batch)
        return batch

    def next_prompts(self, step: int, number: int) -> DataProto:
        """The next prompts of the data, each under a uid of its own."""
        prompts = DataProto.from_single_dict(self.loader.next_batch())
        uids = [f"{step}-{number}-{place}" for place in range(len(prompts))]
        prompts = prompts.union(DataProto.from_single_dict({"uid": uids}))
        return begun(prompts, self.config)
