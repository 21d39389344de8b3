"""Measuring the policy: answers to held-out prompts, and whole episodes in the real environment."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.files import dispensable, dump_jsonl
from data.protocol import DataProto
from data.rl_dataset import encode_prompt
from data.sampler import PromptLoader
from data.seeding import derive_seed
from training.metric_utils import flatten_validation_metrics, process_validation_metrics
from training.reports import print_samples
from training.reward import RewardManager, add_scores, reward_view
from training.roles import Rollout, SamplingParams

Metrics = dict[str, float]
Row = dict[str, Any]


class Environment(Protocol):
    """What an episode needs of an environment (custom/env_wrapper.py: TextEnv)."""

    env_id: str
    prompt: str  # what the player is shown now

    def reset(self, seed: int) -> str:
        """Starts an episode."""

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays an answer: observation, reward, terminated, truncated, info with `success`."""

    def clone(self) -> "Environment":
        """An independent environment with the same settings."""


@dataclass
class Episode:
    """One episode: what was said, what it earned, and why it ended."""

    seed: int
    environment: Environment
    turns: list[Row] = field(default_factory=list)
    reward: float = 0.0
    success: bool = False
    end_reason: str | None = None

    def play(self, answer: str) -> None:
        prompt = self.environment.prompt
        _, reward, _, _, info = self.environment.step(answer)
        self.turns.append({"prompt": prompt, "response": answer, "reward": reward})
        self.reward += reward
        self.success, self.end_reason = info["success"], info["end_reason"]


class Validator:
    """Validates on the rows of `loader`, on episodes of `environment`, or on both, whichever is given."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        rollout: Rollout,
        reward: RewardManager,
        loader: PromptLoader | None,
        environment: Environment | None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.rollout = rollout
        self.reward = reward
        self.loader = loader
        self.environment = environment

    def run(self, step: int) -> Metrics:
        """Metrics of the present policy, under verl's names; a few samples are printed, all are dumped if asked."""
        metrics, samples = {}, []
        for part in (self.on_rows, self.on_episodes):
            part_metrics, part_samples = part(step)
            metrics |= part_metrics
            samples += part_samples
        settings = self.config.trainer
        if settings.validation_data_dir:
            path = Path(settings.validation_data_dir) / f"{step}.jsonl"
            with dispensable(str(path)):
                dump_jsonl(path, samples)
        if settings.log_val_generations:
            shown = spread(samples, settings.log_val_generations)
            print_samples(f"validation at step {step}", [printed(row) for row in shown])
        return metrics

    def on_rows(self, step: int) -> tuple[Metrics, list[Row]]:
        """val_kwargs.n answers to each row of the validation set."""
        if self.loader is None:
            return {}, []
        batch = DataProto.concat([self.answered(number, rows) for number, rows in enumerate(self.loader)])
        columns = {name: batch.non_tensor_batch[name] for name in batch.meta_info["reward_extra_keys"]}
        columns["reward"] = total_scores(batch)
        metrics = process_validation_metrics(batch.data_source, batch.uid, columns)
        return flatten_validation_metrics(metrics), sample_rows(batch, self.tokenizer, step)

    def answered(self, number: int, rows: dict[str, Any]) -> DataProto:
        """The number-th batch of the validation set with its scored answers."""
        rollout = self.config.actor_rollout_ref.rollout
        prompts = DataProto.from_single_dict(rows)
        uids = [f"val-{number}-{place}" for place in range(len(prompts))]
        prompts = prompts.union(DataProto.from_single_dict({"uid": uids}))
        batch = self.generate(prompts.repeat(rollout.val_kwargs.n, interleave=True), number)
        return add_scores(batch, self.reward, self.tokenizer)

    def on_episodes(self, step: int) -> tuple[Metrics, list[Row]]:
        """env.val_episodes whole episodes, from the reset seeds that count up from env.val_seed."""
        settings = self.config.env
        if self.environment is None or not settings.val_episodes:
            return {}, []
        seeds = range(settings.val_seed, settings.val_seed + settings.val_episodes)
        episodes = self.play([Episode(seed, self.environment.clone()) for seed in seeds])
        columns = {
            "reward": [episode.reward for episode in episodes],
            "acc": [float(episode.success) for episode in episodes],
        }
        sources = [self.environment.env_id] * len(episodes)
        turns = [len(episode.turns) for episode in episodes]
        metrics = process_validation_metrics(sources, [str(episode.seed) for episode in episodes], columns)
        return flatten_validation_metrics(metrics, num_turns=turns), [episode_row(one, step) for one in episodes]

    def play(self, episodes: list[Episode]) -> list[Episode]:
        """Plays all episodes side by side, one generation batch a turn, until each has ended."""
        for episode in episodes:
            episode.environment.reset(episode.seed)
        turn = 0
        while playing := [episode for episode in episodes if episode.end_reason is None]:
            for episode, answer in zip(
                playing, self.answer([one.environment.prompt for one in playing], turn), strict=True
            ):
                episode.play(answer)
            turn += 1
        return episodes

    def answer(self, prompts: Sequence[str], turn: int) -> list[str]:
        data = self.config.data
        encoded = [
            encode_prompt([{"role": "user", "content": text}], self.tokenizer, **data.apply_chat_template_kwargs)
            for text in prompts
        ]
        longest = max(map(len, encoded))
        if longest > data.max_prompt_length:
            raise ValueError(
                f"a prompt of {self.environment.env_id} has {longest} tokens, above data.max_prompt_length="
                f"{data.max_prompt_length}: raise it, or shorten the environment's text."
            )
        batch = DataProto.from_single_dict({"raw_prompt_ids": encoded})
        return list(reward_view(self.generate(batch, turn), self.tokenizer).responses)

    def generate(self, prompts: DataProto, number: int) -> DataProto:
        """Responses as validation samples them; `number` counts the calls of one validation.

        The draws do not depend on the step, so that steps are compared on equal terms.
        """
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams.from_config(rollout.val_kwargs, rollout.response_length)
        prompts.meta_info = {**prompts.meta_info, "validate": True}  # rewards may ask
        return self.rollout.generate_sequences(
            prompts, sampling, derive_seed(self.config.trainer.seed, "validation", number)
        )


def sample_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Row]:
    """A scored batch as readable rows: verl's keys (input, output, gts, score, step), and all that the reward said."""
    view = reward_view(batch, tokenizer)
    columns = {
        "input": view.prompts,
        "output": view.responses,
        "gts": view.ground_truths,
        "score": total_scores(batch),
        "end_reason": view.end_reason,
        **{name: view.get(name) for name in batch.meta_info["reward_extra_keys"]},
    }
    return [{"step": step, **{name: values[row] for name, values in columns.items()}} for row in range(len(batch))]


def episode_row(episode: Episode, step: int) -> Row:
    return {
        "step": step,
        "input": episode.turns[0]["prompt"],
        "output": " · ".join(turn["response"] for turn in episode.turns),
        "gts": None,
        "score": episode.reward,
        "end_reason": episode.end_reason,
        "turns": episode.turns,
    }


def printed(row: Row) -> Row:
    """What of a row is worth reading in a terminal; the dumped file has all of it."""
    left_out = ("step", "turns")
    return {name: value for name, value in row.items() if name not in left_out and value is not None}


def total_scores(batch: DataProto) -> list[float]:
    return batch.batch["token_level_scores"].sum(1).tolist()


def spread(rows: Sequence[Row], count: int) -> Iterable[Row]:
    """`count` rows, evenly spaced from best to worst score."""
    ordered = sorted(rows, key=lambda row: -row["score"])
    return [ordered[int(place)] for place in np.linspace(0, len(ordered) - 1, min(count, len(ordered)))]
