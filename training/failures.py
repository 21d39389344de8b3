"""Episodes that failed: how many are too many, and what a run says of them."""

from collections import Counter

from data.padding import ENVIRONMENT_FAILURES, FAILED_END_REASONS
from data.protocol import DataProto
from training.episodes import Episodes


def check_failures(batch: DataProto, limit: float) -> None:
    """Ends the run where more than `limit` (env.max_failed_fraction) of the episodes of `batch` failed.

    Rows that are no episodes do not count. Groups that failed whole are fine: nothing is learnt from them.

    Raises:
        RuntimeError: too many; says how many of each kind, and the most frequent cause with file and line.
    """
    if "episode" not in batch:
        return
    ends = batch.select_idxs(Episodes(batch).last_row)
    causes = [cause for cause, end in zip(ends.failure, ends.end_reason, strict=True) if end in ENVIRONMENT_FAILURES]
    if len(causes) <= limit * len(ends):
        return
    kinds = Counter(end for end in ends.end_reason if end in ENVIRONMENT_FAILURES)
    counts = ", ".join(f"{count} by {kind}" for kind, count in kinds.most_common())
    [(place, times)] = Counter(map(place_of, causes)).most_common(1)
    example = next(cause for cause in causes if place_of(cause) == place)
    raise RuntimeError(
        f"{len(causes)} of {len(ends)} episodes failed ({counts}), more than env.max_failed_fraction={limit:g} allows. "
        f"Most frequent, {times} times: {example}. Mend what raises or hangs there, or let it take longer "
        "(env.timeout); what fails now and then is left out of all statistics, and env.max_failed_fraction says how "
        "much of it a run may bear."
    )


def valid_episodes(batch: DataProto) -> DataProto:
    """The last row of each episode that did not fail: those that metrics are computed from."""
    last_rows = Episodes(batch).last_row.tolist()
    return batch.select_idxs([row for row in last_rows if batch.end_reason[row] not in FAILED_END_REASONS])


def place_of(cause: str) -> str:
    """Where a cause arose, if it ends in "(at file:line)": messages that differ then count as one; else all of it."""
    return cause.rpartition(" (at ")[2]
