"""Watches over a run: each is asked after every step, and warns, or ends the run, when something has gone wrong.

`fit` asks each of its watches by `check(metrics, batch)`. Failed episodes are counted earlier, where a batch is fresh,
so that nothing is learnt from a batch of which too many failed.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from data.files import dispensable
from data.protocol import DataProto
from data.types import ENVIRONMENT_FAILURES, FAILED_END_REASONS
from extras.report.transcripts import print_records, sample_rows, spread
from training.advantage import MEAN_MISMATCH
from training.episode_rows import EpisodeRows

SHOWN = 2  # responses that are printed of a step that taught nothing
STRAY = 0.05  # of the rows, or of the range of scores: so few are taken for stray samples, and not for a signal
MAX_FILES = 3  # of refused mini-batches, each of which holds a whole one

logger = logging.getLogger(__name__)


class Watch(Protocol):
    """Looks at every step of a run, and warns of what goes wrong, or ends the run by raising RuntimeError."""

    def check(self, metrics: Mapping[str, float], batch: DataProto | None) -> None:
        """Looks at a step: its metrics, and the batch that it learnt from (None: supervised training)."""


class SkippedUpdates:
    """Stops the run after N consecutive steps with a non-finite loss or gradient.

    Args:
        limit: so many in a row end the run.
        setting: the key of `limit`, for the message; None if it has none.
        remedy: what the user may look at.
        folder: where the first refused mini-batches are kept for study; None: nowhere.
    """

    def __init__(self, limit: int, setting: str | None, remedy: str, folder: Path | None = None) -> None:
        self.limit = limit
        self.setting = f" ({setting}={limit})" if setting else ""
        self.remedy = (
            remedy if folder is None else f"The first batches are in {folder}/refused_update_step_*.pkl. {remedy}"
        )
        self.folder = folder
        self.in_a_row = 0

    def keep(self, mini_batch: DataProto, step: int) -> None:
        """Writes a mini-batch whose update was refused, unless the folder has enough of them."""
        path = self.folder / f"refused_update_step_{step}.pkl"
        if len([*self.folder.glob("refused_update_step_*.pkl")]) < MAX_FILES:
            with dispensable(str(path)):
                mini_batch.save_to_disk(path)

    def check(self, metrics: Mapping[str, float], batch: DataProto | None) -> None:
        """Counts a step by its metrics named …/skipped_updates. Raises RuntimeError at the limit."""
        skipped = any(value > 0 for name, value in metrics.items() if name.endswith("/skipped_updates"))
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self.limit:
            raise RuntimeError(
                f"the loss or gradient was not finite in {self.in_a_row} steps in a row{self.setting}. The weights are "
                f"as before them. {self.remedy}"
            )


class MismatchAlarm:
    """Warns once when the mean |Δ log-prob| of a step is above `limit`, and again after a step that was not.

    Steps that measure nothing (a critic's warm-up, an engine without log-probs) change nothing; None: never.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self.raised = False

    def check(self, metrics: Mapping[str, float], batch: DataProto | None) -> None:
        """Looks at a step's metrics."""
        if self.limit is None or MEAN_MISMATCH not in metrics:
            return
        too_far = not metrics[MEAN_MISMATCH] <= self.limit  # NaN is too far as well
        if too_far and not self.raised:
            logger.warning(
                "%s is %.3g nats a token, above trainer.max_rollout_mismatch=%g: the engine samples from other "
                "probabilities than the policy has. Often: top_p or top_k below, which only the engine applies; an "
                "engine of lower precision; weights that it did not take up. "
                "algorithm.rollout_correction.rollout_is=token weighs what remains; null is silent.",
                MEAN_MISMATCH, metrics[MEAN_MISMATCH], self.limit,
            )  # fmt: skip
        self.raised = too_far


class NoSignal:
    """Warns when at most STRAY of the rows of the last `limit` steps had anything to teach; 0: never.

    A row teaches if it has an advantage other than 0; of a step whose scores are all equal none does. The warning names
    the likeliest cause, and the best and the worst response of the last step are printed, decoded by `tokenizer`. A run
    that learns slowly has many such stretches: it warns of the 1st, the 10th, the 100th and the 1000th.
    """

    def __init__(self, limit: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self.limit = limit
        self.tokenizer = tokenizer
        self.taught: deque[float] = deque(maxlen=limit)  # shares of rows
        self.is_silent, self.times = False, 0

    def check(self, metrics: Mapping[str, float], batch: DataProto) -> None:
        """Counts a step, by its metrics and the batch that it learnt from."""
        self.taught.append(0.0 if teaches_nothing(metrics) else share_that_teaches(batch))
        silent = len(self.taught) == self.limit > 0 and sum(self.taught) <= STRAY * self.limit
        begins, self.is_silent = silent and not self.is_silent, silent
        self.times += begins
        if begins and self.times in (1, 10, 100, 1000):
            again = f", for the {self.times}th time" if self.times > 1 else ""
            cause = likeliest_cause(metrics)
            logger.warning("%d steps in a row taught nothing%s (trainer.no_signal_steps): %s", self.limit, again, cause)
            shown = spread(EpisodeRows(batch).scores().tolist(), SHOWN)
            rows = sample_rows(batch, self.tokenizer, int(metrics["training/global_step"]), shown)
            print_records("of a step that taught nothing", rows, brief=True)


def share_that_teaches(batch: DataProto) -> float:
    """Computes the share of rows with an advantage other than 0 on a token of the policy."""
    return ((batch.advantages != 0) & batch.response_mask.bool()).any(1).float().mean().item()


def teaches_nothing(metrics: Mapping[str, float]) -> bool:
    """Whether all scores of a step are equal, all advantages 0, or there is none of either."""
    if "critic/advantages/max" not in metrics:
        return True
    scores_tie = metrics["critic/score/max"] == metrics["critic/score/min"]
    return scores_tie or metrics["critic/advantages/max"] == metrics["critic/advantages/min"] == 0


def likeliest_cause(metrics: Mapping[str, float]) -> str:
    """Explains why a step taught nothing, and what to do about it: the first of the known causes that fits."""
    late, broken = (int(metrics.get(f"reward/{outcome}", 0)) for outcome in ("timeout", "error"))
    if late or broken:
        return (
            f"{late} responses were not scored in time, and {broken} made the reward raise "
            "(reward/timeout, reward/error; the warnings name the line). Mend the function, which `python -m "
            "training.reward` tries, or raise reward.timeout."
        )
    if "critic/score/max" not in metrics:
        return "every rollout failed (response/aborted_ratio is 1). Look at end_reason/… in metrics.jsonl."
    cut = f"{metrics['response_length/clip_ratio']:.0%} of the responses reach data.max_response_length"
    readable, source = readable_answers(metrics)
    if readable < 0.1:
        return (
            f"{readable:.0%} of the responses could be read as an action ({source}; {cut}). "
            "Look at some with trainer.rollout_data_dir=…; make text_to_action more lenient, give responses more room, "
            "or start from a model that knows the format."
        )
    if room := lack_of_room(metrics):
        return room
    least, best, mean = (metrics[f"critic/score/{name}"] for name in ("min", "max", "mean"))
    if STRAY * (best - least) < mean - least < (1 - STRAY) * (best - least):
        return (
            "the samples of a prompt always score alike, so they tell nothing about each other. Raise "
            "actor_rollout_ref.rollout.n or the temperature, or use a reward that tells answers apart; if the policy "
            "has settled on some answers, actor_rollout_ref.actor.entropy_coeff=0.2 has it try the others."
        )
    score, all_of = best if 2 * mean > least + best else least, "nearly every" if best > least else "every"
    long = metrics["response_length/max"] > 1 and metrics["response_length/clip_ratio"] > 0.5
    if long and "reward/valid_action/mean" not in metrics:
        return f"{all_of} response scores {score:g}, and {cut} and may be cut before they answer: raise it."
    return (
        f"{all_of} response scores {score:g}. The reward is the same for all answers, it is too rare to be found by "
        "chance, or the task is mastered. docs/environments.md (The training prompts) shows what to do about a "
        "reward that comes at the end alone."
    )


def lack_of_room(metrics: Mapping[str, float]) -> str:
    """Says that most episodes of several turns ended for want of room, and which settings give more; else ""."""
    if "episode/tokens/policy/mean" not in metrics:
        return ""
    ends = {reason: metrics.get(f"end_reason/{reason}", 0.0) for reason in ("context_full", "max_tokens")}
    if sum(ends.values()) <= 0.5:
        return ""
    shares = " and ".join(f"{share:.0%} with end_reason {reason}" for reason, share in ends.items() if share)
    return (
        f"most episodes end for want of room, {shares}. Raise data.max_response_length, which holds a whole transcript "
        "(with env.history=turns data.max_prompt_length, which holds each prompt), or have the environment or tools "
        "say less."
    )


def readable_answers(metrics: Mapping[str, float]) -> tuple[float, str]:
    """Returns the share of answers that were an action (1: unknown), and the names of its metrics."""
    if metrics.get("num_turns/mean") and "invalid_actions/mean" in metrics:
        invalid = metrics["invalid_actions/mean"] / metrics["num_turns/mean"]  # of parallel calls there may be more
        return max(0.0, 1 - invalid), "invalid_actions/mean, num_turns/mean"
    return metrics.get("reward/valid_action/mean", 1.0), "reward/valid_action/mean"


def check_failures(batch: DataProto, limit: float) -> None:
    """Warns of episodes of `batch` that failed, or ends the run where they are more than `limit`
    (env.max_failed_fraction).

    Groups that failed whole are fine: nothing is learnt from them.

    Raises:
        RuntimeError: too many; says how many of each kind, and the most frequent cause with file and line.
    """
    ends = batch.select_idxs(EpisodeRows(batch).last_row)
    causes = [cause for cause, end in zip(ends.failure, ends.end_reason, strict=True) if end in ENVIRONMENT_FAILURES]
    if not causes:
        return
    kinds = Counter(end for end in ends.end_reason if end in ENVIRONMENT_FAILURES)
    counts = ", ".join(f"{count} by {kind}" for kind, count in kinds.most_common())
    [(place, times)] = Counter(map(place_of, causes)).most_common(1)
    example = next(cause for cause in causes if place_of(cause) == place)
    failed, most = (
        f"{len(causes)} of {len(ends)} episodes failed ({counts})",
        f"Most frequent, {times} times: {example}",
    )
    if len(causes) <= limit * len(ends):
        logger.warning("%s, and are left out. %s", failed, most)
        return
    raise RuntimeError(
        f"{failed}, more than env.max_failed_fraction={limit:g} allows. {most}. Mend what raises or hangs there, or "
        "let it take longer (env.timeout); what fails now and then is left out of all statistics, and "
        "env.max_failed_fraction says how much of it a run may bear."
    )


def valid_episodes(batch: DataProto) -> DataProto:
    """The last row of each episode that did not fail: those that metrics are computed from."""
    last_rows = EpisodeRows(batch).last_row.tolist()
    return batch.select_idxs([row for row in last_rows if batch.end_reason[row] not in FAILED_END_REASONS])


def place_of(cause: str) -> str:
    """Extracts file:line from a cause that ends in "(at file:line)", else all of it."""
    return cause.rpartition(" (at ")[2]
