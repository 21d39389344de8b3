"""Measures the policy by answers to held-out prompts, and by whole episodes in the real environment."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.protocol import DataProto
from data.sampler import PromptLoader
from data.seeding import derive_seed
from data.types import SamplingParams
from training.environment import ENVIRONMENT, EnvSetup, assign_agents, begin_episodes, episode_seeds
from training.episode_rows import EpisodeRows, check_failures, valid_episodes
from training.messages import print_samples, spread
from training.metric_utils import flatten_validation_metrics, process_validation_metrics
from training.reward import RewardManager, add_scores, concat_scored

Metrics = dict[str, float]


class Validator:
    """Validates on the rows of `loader`, on episodes of `game`, or on both, whichever is given."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        roles: Mapping[str, Any],
        reward: RewardManager,
        loader: PromptLoader | None,
        game: EnvSetup | None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.rollout = roles["rollout"]
        self.reward = reward
        self.run_stages: Callable[..., Metrics] = lambda *_: {}  # the trainer's, which sets it
        self.loader = loader
        self.game = game

    def run(self, step: int) -> tuple[Metrics, list[DataProto]]:
        """Computes metrics of the present policy, under verl's names, and returns its answers; prints a few samples."""
        parts = {self.on_rows: self.loader, self.on_episodes: self.game}
        found = [part() for part, given in parts.items() if given is not None]
        for _, batch in found:
            scores = EpisodeRows(batch).scores().tolist()
            print_samples(
                f"validation at step {step}",
                batch,
                self.tokenizer,
                spread(scores, self.config.trainer.log_val_generations),
            )
        return {name: value for metrics, _ in found for name, value in metrics.items()}, [batch for _, batch in found]

    def on_rows(self) -> tuple[Metrics, DataProto]:
        """Measures val_kwargs.n answers to each validation row, or as many episodes; failed ones count nowhere."""
        batch = concat_scored([self.answer_batch(number, rows) for number, rows in enumerate(self.loader)])
        if "episode" in batch:
            check_failures(batch, self.config.env.max_failed_fraction)
        answers = valid_episodes(batch)
        columns = {name: answers.non_tensor_batch[name] for name in batch.meta_info["reward_extra_keys"]}
        columns["reward"] = answers.batch["token_level_scores"].sum(1).tolist()
        metrics = process_validation_metrics(answers.data_source, answers.uid, columns)
        return flatten_validation_metrics(metrics), batch

    def answer_batch(self, number: int, rows: dict[str, Any]) -> DataProto:
        """Generates and scores answers to the number-th batch of the validation set."""
        rollout = self.config.actor_rollout_ref.rollout
        prompts = DataProto.from_single_dict(rows)
        uids = [f"val-{number}-{place}" for place in range(len(prompts))]
        prompts = assign_agents(prompts.union(DataProto.from_single_dict({"uid": uids})), self.config)
        batch = self.generate(prompts.repeat(rollout.val_kwargs.n, interleave=True), number)
        batch = add_scores(batch, self.reward, self.tokenizer, self.config.reward)
        self.run_stages("scored", batch, {})
        return batch

    def on_episodes(self) -> tuple[Metrics, DataProto]:
        """Measures env.val_episodes whole episodes, with reset seeds that count up from env.val_seed.

        `return` is the sum of an episode's rewards, `acc` whether it was a success. Where nobody says what a success is
        there is no `acc`; where anyone does, an episode of which nothing was said is none. Those that failed count
        nowhere.
        """
        batch = self.generate(episode_prompts(self.game, episode_seeds(self.config.env)), 0)
        check_failures(batch, self.config.env.max_failed_fraction)
        ends = valid_episodes(batch)
        columns = {"return": list(ends.episode_return)}
        if any(success is not None for success in ends.success):
            columns = {"acc": [float(success or False) for success in ends.success], **columns}
        turns = ends.non_tensor_batch["__num_turns__"]
        metrics = process_validation_metrics(ends.data_source, ends.uid, columns)
        return flatten_validation_metrics(metrics, num_turns=turns), batch

    def generate(self, prompts: DataProto, number: int) -> DataProto:
        """Generates responses with the sampling of validation; `number` counts the calls of one validation.

        The draws do not depend on the step, so that steps are compared on equal terms.
        """
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams.from_config(rollout.val_kwargs, rollout.response_length)
        prompts.meta_info = {**prompts.meta_info, "validate": True}  # rewards may ask
        return self.rollout.generate_sequences(
            prompts, sampling, derive_seed(self.config.trainer.seed, "validation", number)
        )


def episode_prompts(game: EnvSetup, seeds: Iterable[int]) -> DataProto:
    """Starts the episodes of these reset seeds, except those whose prompts are too long to be shown."""
    states = [game.environment.start_state(seed) for seed in seeds]
    shown = [(state, ids) for state in states if (ids := game.dataset.encode_state(state)) is not None]
    if not shown:
        raise ValueError(
            f"none of {len(states)} validation episodes can be shown: their prompts are longer than "
            "data.max_prompt_length. Raise it, or cut them by data.filter_overlong_prompts=false data.truncation=left."
        )
    rows = {
        "raw_prompt_ids": [ids for _, ids in shown],
        "extra_info": [{"state": state} for state, _ in shown],
        "data_source": [game.environment.env_id] * len(shown),
        "uid": [str(state.seed) for state, _ in shown],
    }
    return begin_episodes(DataProto.from_single_dict(rows), ENVIRONMENT)
