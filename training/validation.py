"""Measuring the policy: answers to held-out prompts, and whole episodes in the real environment."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.schema import Config, EnvConfig
from data.files import dispensable, dump_jsonl
from data.protocol import DataProto
from data.sampler import PromptLoader
from data.seeding import derive_seed
from training.metric_utils import flatten_validation_metrics, process_validation_metrics
from training.reports import message_fields, print_samples, transcript
from training.reward import RewardManager, add_scores, reward_view
from training.roles import Rollout, SamplingParams

Metrics = dict[str, float]
Row = dict[str, Any]


@runtime_checkable
class ActionReader(Protocol):
    """Reads the action out of an answer: a reward manager of an environment, or the environment itself."""

    def extract_action(self, text: str) -> Any | None:
        """The action; None if `text` names none that is legal."""


class Environment(ActionReader, Protocol):
    """What an episode needs of an environment (custom/env_wrapper.py: TextEnv)."""

    env_id: str
    state: Any  # where the running episode is

    def reset(self, seed: int) -> str:
        """Starts an episode."""

    def act(self, action: Any | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays an action: observation, reward, terminated, truncated, info with `success` (None: unknown)."""

    def clone(self) -> "Environment":
        """An independent environment with the same settings."""


@runtime_checkable
class StateDataset(Protocol):
    """Shows states to the policy (custom/env_dataset.py: CustomEnvDataset)."""

    def encode_state(self, state: Any) -> list[int] | None:
        """Token ids of the prompt that shows `state`; None if it is too long to be shown."""

    def check_sizes(self, states: Iterable[Any], what: str) -> None:
        """Raises ValueError for prompts that are too long and may not be cut."""


@dataclass(frozen=True)
class Game:
    """What validation episodes are played with: what the policy is shown, and what its answers mean, as in training."""

    environment: Environment
    dataset: StateDataset
    reader: ActionReader


@dataclass
class Episode:
    """One episode: what was said, what it earned, and why it ended."""

    seed: int
    environment: Environment
    turns: list[Row] = field(default_factory=list)
    reward: float = 0.0
    success: bool | None = None  # None: nobody says
    end_reason: str | None = None

    def play(self, prompt: str, answer: str, action: Any | None) -> None:
        _, reward, _, _, info = self.environment.act(action)
        self.turns.append({"prompt": prompt, "response": answer, "reward": reward})
        self.reward += reward
        self.success, self.end_reason = info["success"], info["end_reason"]


class Validator:
    """Validates on the rows of `loader`, on episodes of `game`, or on both, whichever is given."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        rollout: Rollout,
        reward: RewardManager,
        loader: PromptLoader | None,
        game: Game | None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.rollout = rollout
        self.reward = reward
        self.loader = loader
        self.game = game

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
            shown = [*spread(samples, settings.log_val_generations)]
            for kind, rows in by_kind(shown).items():
                print_samples(f"validation {kind} at step {step}", [printed(row) for row in rows])
        return metrics

    def on_rows(self, step: int) -> tuple[Metrics, list[Row]]:
        """val_kwargs.n answers to each row of the validation set."""
        if self.loader is None:
            return {}, []
        batch = DataProto.concat([self.answered(number, rows) for number, rows in enumerate(self.loader)])
        columns = {name: batch.non_tensor_batch[name] for name in batch.meta_info["reward_extra_keys"]}
        columns["reward"] = total_scores(batch)
        metrics = process_validation_metrics(batch.data_source, batch.uid, columns)
        rows = sample_rows(batch, self.tokenizer, step)
        chats = batch.non_tensor_batch.get("raw_prompt", [None] * len(rows))
        for row, messages in zip(rows, chats, strict=True):
            row |= {"raw_prompt": messages} if isinstance(messages, list) else {}
        return flatten_validation_metrics(metrics), rows

    def answered(self, number: int, rows: dict[str, Any]) -> DataProto:
        """The number-th batch of the validation set with its scored answers."""
        rollout = self.config.actor_rollout_ref.rollout
        prompts = DataProto.from_single_dict(rows)
        uids = [f"val-{number}-{place}" for place in range(len(prompts))]
        prompts = prompts.union(DataProto.from_single_dict({"uid": uids}))
        batch = self.generate(prompts.repeat(rollout.val_kwargs.n, interleave=True), number)
        return add_scores(batch, self.reward, self.tokenizer)

    def on_episodes(self, step: int) -> tuple[Metrics, list[Row]]:
        """env.val_episodes whole episodes, from the reset seeds that count up from env.val_seed.

        `return` is the sum of an episode's rewards, `acc` whether it was a success. Where nobody says what a success is
        there is no `acc`; where anyone does, an episode of which nothing was said is none.
        """
        if self.game is None:
            return {}, []
        episodes = self.play([Episode(seed, self.game.environment.clone()) for seed in episode_seeds(self.config.env)])
        columns = {"return": [episode.reward for episode in episodes]}
        if any(episode.success is not None for episode in episodes):
            columns = {"acc": [float(episode.success or False) for episode in episodes], **columns}
        sources = [self.game.environment.env_id] * len(episodes)
        turns = [len(episode.turns) for episode in episodes]
        metrics = process_validation_metrics(sources, [str(episode.seed) for episode in episodes], columns)
        return flatten_validation_metrics(metrics, num_turns=turns), [episode_row(one, step) for one in episodes]

    def play(self, episodes: list[Episode]) -> list[Episode]:
        """Plays all episodes side by side, one generation batch a turn, until each has ended.

        One whose prompt is too long to be shown ends there, for context_full.
        """
        for episode in episodes:
            episode.environment.reset(episode.seed)
        turn = 0
        while running := [episode for episode in episodes if episode.end_reason is None]:
            self.play_turn(running, turn)
            turn += 1
        return episodes

    def play_turn(self, episodes: list[Episode], turn: int) -> None:
        """One answer in each of `episodes`."""
        shown = []
        for episode in episodes:
            prompt_ids = self.game.dataset.encode_state(episode.environment.state)
            if prompt_ids is None:
                episode.end_reason = "context_full"
            else:
                shown.append((episode, prompt_ids))
        if not shown:
            return
        batch = self.generate(DataProto.from_single_dict({"raw_prompt_ids": [ids for _, ids in shown]}), turn)
        view = reward_view(batch, self.tokenizer)
        for (episode, _), prompt, answer in zip(shown, view.prompts, view.responses, strict=True):
            episode.play(prompt, answer, self.game.reader.extract_action(answer))

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


def episode_seeds(config: EnvConfig) -> range:
    """The reset seeds of the validation episodes."""
    return range(config.val_seed, config.val_seed + config.val_episodes)


def episode_row(episode: Episode, step: int) -> Row:
    """An episode as one readable row; its score is its return."""
    return {
        "step": step,
        "input": episode.turns[0]["prompt"] if episode.turns else "",
        "output": " · ".join(turn["response"] for turn in episode.turns),
        "gts": None,
        "score": episode.reward,
        "success": episode.success,
        "end_reason": episode.end_reason,
        "turns": episode.turns,
    }


def by_kind(samples: Sequence[Row]) -> dict[str, list[Row]]:
    """Samples of the validation set and of whole episodes apart, under what they are called in print."""
    kinds = {
        "rows": [row for row in samples if "turns" not in row],
        "episodes": [row for row in samples if "turns" in row],
    }
    return {kind: rows for kind, rows in kinds.items() if rows}


def printed(row: Row) -> Row:
    """What of a row is worth reading in a terminal, an episode's score as its return; the dumped file has it all."""
    left_out = ("step", "turns", "raw_prompt")
    shown = {name: value for name, value in row.items() if name not in left_out and value is not None}
    if "turns" in row:
        shown["output"] = transcript([turn["response"] for turn in row["turns"]])
        shown = {"return" if name == "score" else name: value for name, value in shown.items()}
    if "raw_prompt" in row:  # chat messages, each under its role
        del shown["input"]
        shown = message_fields(row["raw_prompt"]) | shown
    return shown


def total_scores(batch: DataProto) -> list[float]:
    return batch.batch["token_level_scores"].sum(1).tolist()


def spread(rows: Sequence[Row], count: int) -> Iterable[Row]:
    """`count` rows, evenly spaced from best to worst score."""
    ordered = sorted(rows, key=lambda row: -row["score"])
    return [ordered[int(place)] for place in np.linspace(0, len(ordered) - 1, min(count, len(ordered)))]
