"""Responses that could not be scored: how many are too many, and what becomes of the others."""

import logging
from collections import Counter

import numpy as np

from configs.schema import ScoringConfig
from data.protocol import DataProto, object_array
from training.reward_results import Failures

logger = logging.getLogger(__name__)
OUTCOMES = ("timeout", "error")  # of a response that could not be scored; else: ok
COLUMN = "reward_outcome"


def check_failures(failures: Failures, rows: int, config: ScoringConfig, name: str) -> None:
    """Warns of responses that the reward called `name` could not score, or ends the run where they are too many.

    Raises:
        RuntimeError: more than reward.max_failed_fraction of `rows`; has the most frequent cause, with file and line.
    """
    if not failures:
        return
    [(said, times)] = Counter(failure.said for failure in failures.values()).most_common(1)
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(map(outcome_of, failures.values())).items())
    example = next(failure for failure in failures.values() if failure.said == said)
    verb = "raised" if example.trace else "failed:"
    what = f"the reward {name} {verb} {said}"
    if len(failures) <= config.max_failed_fraction * rows:
        becomes = "left out" if config.on_failure == "mask" else f"scored {config.failure_score:g}"
        logger.warning("%d of %d responses could not be scored (%s), and are %s: %s, most often (%d times)",
                       len(failures), rows, counts, becomes, what, times)  # fmt: skip
        return
    error = RuntimeError(
        f"{what}. {len(failures)} of {rows} responses could not be scored ({counts}), more than "
        f"reward.max_failed_fraction={config.max_failed_fraction:g} allows. Try it alone: "
        "reward(DataProto.from_single_dict({'responses': [...], 'ground_truths': [...]})); with reward.in_process=true "
        "breakpoints work in it."
    )
    if example.trace:
        error.add_note(f"in the process of the reward function:\n{example.trace}")
    raise error


def outcome_of(failure: object) -> str:
    return failure.outcome


def mark(batch: DataProto, failures: Failures, config: ScoringConfig) -> None:
    """Column reward_outcome, [B]: ok, timeout or error; and unless they have a score, nothing is learnt of the latter.

    Such a row has no token of the policy any more, and, where there is that column, the end_reason reward_timeout or
    reward_error.
    """
    outcomes = [failures[row].outcome if row in failures else "ok" for row in range(len(batch))]
    batch.non_tensor_batch[COLUMN] = object_array(outcomes)
    if not failures or config.on_failure == "score":
        return
    rows = sorted(failures)
    batch.batch["response_mask"][rows] = 0
    if "end_reason" in batch:
        reasons = np.array(batch.end_reason, dtype=object)
        reasons[rows] = [f"reward_{failures[row].outcome}" for row in rows]
        batch.non_tensor_batch["end_reason"] = reasons


def outcome_metrics(batch: DataProto) -> dict[str, float]:
    """reward/timeout and reward/error: how many responses could not be scored."""
    if COLUMN not in batch:
        return {}
    counts = Counter(batch.non_tensor_batch[COLUMN])
    return {f"reward/{outcome}": float(counts[outcome]) for outcome in OUTCOMES}
