"""Keeps for each row of the data how often its answers succeed: the baseline of the estimator spo."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from data.padding import collate, prompt_width
from data.protocol import DataProto
from data.types import Metrics, Sample, Stage
from training.episode_rows import EpisodeRows
from training.losses import masked_mean
from training.metric_utils import timer

START = (0.5, 0.5)  # counted successes and failures of a row that was never answered
HALF = 0.06  # nats a token by which the policy has moved, after which the counters count half
MOST = 0.96  # is always forgotten a little: verl-recipe's, as is HALF
Answer = dict[str, bytes]  # of one row: what `pack` makes of it


class SuccessTracker(Stage):
    """Adds the column tracked_values [B], the share of successes that a row's counters expected before this step, and
    counts this step's.

    Before that the counters (a, b) of Beta(a, b) forget: they are multiplied by ρ = 2^(-D / HALF), between
    rho.clip_lower and MOST, where D is by how much the policy has moved since it last answered the row: the mean of
    |Δ log-prob| over the tokens of that answer, which is kept for this. With rho.type=constant ρ is rho.value.

    State: counters and answers, by dataset_position.
    """

    at = "prepared"

    @classmethod
    def reads(cls, config: Any) -> set[str]:
        return {"old_log_probs"} if config.trainer.spo.rho.type == "kl" else set()

    @classmethod
    def makes(cls, config: Any) -> set[str]:
        return {"tracked_values"}

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        episodes = EpisodeRows(batch)
        ends, scores = batch.select_idxs(episodes.last_row), episodes.scores().double()
        positions, complete = [*map(int, ends.dataset_position)], episodes.is_complete()
        check_scores(scores[complete])
        counters = self.state.setdefault("counters", {})
        values = [successes / (successes + failures) for successes, failures in self.counts(positions)]
        batch.batch["tracked_values"] = torch.tensor(values)[episodes.episode_of_row]
        answered = [number for number, is_complete in enumerate(complete.tolist()) if is_complete]
        numbers = {positions[number]: number for number in answered}  # the last of each row's answers
        kept, metrics = self.kept_shares(ends.select_idxs([*numbers.values()]), [*numbers], timing)
        for (position, share), (successes, failures) in zip(kept.items(), self.counts([*kept]), strict=True):
            counters[position] = (share * successes, share * failures)
        for number in answered:
            (successes, failures), score = counters[positions[number]], scores[number].item()
            counters[positions[number]] = (successes + score, failures + 1 - score)
        return {"spo/value": sum(values) / max(1, len(values)), **metrics}

    def counts(self, positions: Sequence[int]) -> list[tuple[float, float]]:
        return [self.state["counters"].get(position, START) for position in positions]

    def kept_shares(
        self, ends: DataProto, positions: Sequence[int], timing: dict[str, float]
    ) -> tuple[dict[int, float], Metrics]:
        """Returns ρ of the rows at `positions`, to which `ends` are answers of this step, which are kept for later."""
        rho = self.config.trainer.spo.rho
        if rho.type == "constant" or not positions:
            return dict.fromkeys(positions, rho.value), {"spo/rho": rho.value}
        answers = self.state.setdefault("answers", {})
        known = [position for position in positions if position in answers]
        with timer("spo", timing):
            moved = dict.fromkeys(positions, 0.0) | self.distances(known, ends)
            correction = self.config.algorithm.get("rollout_correction")
            if correction and correction.bypass_mode:  # then they are the engine's, whose rounding is no movement
                ends.batch["old_log_probs"] = self.log_probs(ends)
        answers |= {position: pack(ends, row) for row, position in enumerate(positions)}
        kept = {position: min(max(2 ** -(d / HALF), rho.clip_lower), MOST) for position, d in moved.items()}
        mean_moved, mean_kept = (sum(numbers.values()) / len(numbers) for numbers in (moved, kept))
        return kept, {"spo/moved": mean_moved, "spo/rho": mean_kept, "spo/known": len(known) / len(positions)}

    def distances(self, positions: Sequence[int], ends: DataProto) -> dict[int, float]:
        """Measures by how much the policy has moved on the kept answers of rows, in nats a token."""
        if not positions:
            return {}
        past = unpack([self.state["answers"][position] for position in positions], ends)
        gaps = (self.log_probs(past) - past.batch["rollout_log_probs"]).abs()
        return dict(zip(positions, masked_mean(gaps, past.batch["response_mask"], axis=-1).tolist(), strict=True))

    def log_probs(self, answers: DataProto) -> torch.Tensor:
        """Computes the policy's log-probs of the tokens of answers, as it is now."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        return self.trainer.actor.compute(answers, ["old_log_probs"], temperature).batch["old_log_probs"]


def check_scores(scores: torch.Tensor) -> None:
    """Raises ValueError for a score that is no share of a success."""
    if ((scores < 0) | (scores > 1)).any():
        raise ValueError(
            f"algorithm.adv_estimator=spo counts successes, and a score is {scores[(scores < 0) | (scores > 1)][0]:g}: "
            "let the reward return numbers from 0 to 1, or choose another estimator."
        )


def pack(ends: DataProto, row: int) -> Answer:
    """Returns one row's prompt and answer as a checkpoint can hold thousands of them."""
    split, real = prompt_width(ends), ends.batch["attention_mask"][row].bool()
    ids, tokens = ends.batch["input_ids"][row], real[split:]
    columns = {
        "prompt_ids": ids[:split][real[:split]].int(),
        "token_ids": ids[split:][tokens].int(),
        "policy_mask": ends.batch["response_mask"][row][tokens].to(torch.int8),
        "log_probs": ends.batch["old_log_probs"][row][tokens].float(),
    }
    return {name: column.numpy().tobytes() for name, column in columns.items()}


def unpack(answers: Sequence[Answer], like: DataProto) -> DataProto:
    """Lays out packed answers as a batch, at least as wide as `like`; rollout_log_probs are the packed log-probs."""
    kinds = {"prompt_ids": np.int32, "token_ids": np.int32, "policy_mask": np.int8, "log_probs": np.float32}
    rows = [{name: np.frombuffer(answer[name], kind).tolist() for name, kind in kinds.items()} for answer in answers]
    zeros = [[0] * len(row["token_ids"]) for row in rows]
    samples = [
        Sample(**row, weight_versions=zero, rewards=zero, turns=zero) for row, zero in zip(rows, zeros, strict=True)
    ]
    widths = [max(map(len, (row[name] for row in rows))) for name in ("prompt_ids", "token_ids")]
    like_widths = prompt_width(like), like.batch["responses"].shape[1]
    return collate(samples, *map(max, zip(widths, like_widths, strict=True)), pad_token_id=0)
