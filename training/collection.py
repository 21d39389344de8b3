"""The data of a step: prompts, the policy's responses to them, their scores."""

from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.protocol import DataProto
from data.sampler import PromptLoader
from data.seeding import derive_seed
from training.advantage import estimator_needs
from training.metric_utils import timer
from training.reward import RewardManager, add_scores, reward_metrics
from training.roles import Rollout, SamplingParams
from training.selection import rows_with_signal


class Collector:
    """Asks the policy and scores what it says; `loader` hands out the prompts."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        rollout: Rollout,
        reward: RewardManager,
        loader: PromptLoader,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.rollout = rollout
        self.reward = reward
        self.loader = loader
        self.needs = estimator_needs(config.algorithm.adv_estimator)
        rollout_config = config.actor_rollout_ref.rollout
        self.sampling = SamplingParams.from_config(rollout_config, rollout_config.response_length)

    def collect(self, step: int, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Scored responses to the prompts of `step`, and metrics of them; the seconds go to `timing`.

        With algorithm.filter_groups, as many rows, of groups whose samples differ, from further prompts if need be
        (dynamic sampling, arXiv:2503.14476); after max_num_gen_batches, groups that tie fill the batch up.
        """
        batch = self.respond(step, 0, timing)
        metrics = reward_metrics(batch)
        settings = self.config.algorithm.filter_groups
        if not settings.enable:
            return batch, metrics
        wanted, draws = len(batch), 1
        has_signal = rows_with_signal(batch, settings.metric)
        while has_signal.sum() < wanted and draws != settings.max_num_gen_batches:
            batch = DataProto.concat([batch, self.respond(step, draws, timing)])
            has_signal = rows_with_signal(batch, settings.metric)
            draws += 1
        metrics |= {"train/num_gen_batches": draws, "group/kept_frac": has_signal.float().mean().item()}
        informative_first = (~has_signal).int().argsort(stable=True)
        return batch.select_idxs(informative_first[:wanted]), metrics

    def respond(self, step: int, draw: int, timing: dict[str, float]) -> DataProto:
        """Responses to the next prompts with their scores and, for ReMax, those of the policy's greedy responses."""
        prompts, seed = self.next_prompts(step, draw), derive_seed(self.config.trainer.seed, "rollout", step, draw)
        firsts = prompts[:: self.config.actor_rollout_ref.rollout.n]  # before the engine, which may fill the prompts
        with timer("gen", timing):
            batch = self.rollout.generate_sequences(prompts, self.sampling, seed)
        with timer("reward", timing):
            batch = add_scores(batch, self.reward, self.tokenizer)
        if "reward_baselines" in self.needs:
            with timer("gen_max", timing):
                batch.batch["reward_baselines"] = self.greedy_scores(firsts, seed)
        return batch

    def greedy_scores(self, prompts: DataProto, seed: int) -> torch.Tensor:
        """The scores of the greedy responses to `prompts`, each for all the samples of its prompt: [B]."""
        greedy = self.rollout.generate_sequences(prompts, replace(self.sampling, do_sample=False), seed)
        scored = add_scores(greedy, self.reward, self.tokenizer)
        return scored.batch["token_level_scores"].sum(1).repeat_interleave(self.config.actor_rollout_ref.rollout.n)

    def next_prompts(self, step: int, draw: int) -> DataProto:
        """The next prompts, each `rollout.n` times in a row under one uid."""
        prompts = DataProto.from_single_dict(self.loader.next_batch())
        uids = [f"{step}-{draw}-{place}" for place in range(len(prompts))]
        prompts = prompts.union(DataProto.from_single_dict({"uid": uids}))
        rollout = self.config.actor_rollout_ref.rollout
        prompts.meta_info = {
            "temperature": rollout.temperature,
            "update_index": step - 1,
            "calculate_sum_pi_squared": "sum_pi_squared" in self.needs,
        }
        return prompts.repeat(rollout.n, interleave=True)
