"""The record of a run: metrics.jsonl, one line a step, and the source of truth."""

import logging
from collections.abc import Mapping
from pathlib import Path

from data.files import append, json_line, read_metrics, rewrite

METRICS_FILE = "metrics.jsonl"

logger = logging.getLogger(__name__)


class Record:
    """metrics.jsonl: `{"step": N, "data": {name: number}}`, NaN and infinities as null, on disk when `log` returns.

    What a full disk does not take waits in memory, and every later `log` tries again.

    Args:
        folder: of the run.
        resume_step: the last step that is kept; 0: none, a fresh start.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.path = folder / METRICS_FILE
        last_kept = resume_step or -1  # a fresh start repeats step 0 as well
        kept = [entry for entry in read_metrics(self.path) if entry["step"] <= last_kept]
        rewrite(self.path, b"".join(map(json_line, kept)))
        self.last_step = kept[-1]["step"] if kept else -1
        self.waiting: list[bytes] = []  # lines that are not on disk

    def log(self, step: int, data: Mapping[str, float]) -> None:
        assert step > self.last_step, (
            f"step {step} was logged after step {self.last_step}: the record has each step once, in ascending order; "
            "gather all metrics of a step and log them together"
        )
        self.last_step = step
        self.waiting.append(json_line({"step": step, "data": data}))
        try:
            self.write()
        except OSError as error:
            if len(self.waiting) == 1:
                logger.warning("metrics wait in memory from step %d on, until they can be written: %s", step, error)

    def write(self) -> None:
        """Puts the lines that wait on disk, in their order; raises OSError at the first that it does not take."""
        while self.waiting:
            append(self.path, self.waiting[0])
            del self.waiting[0]

    def close(self) -> None:
        """Writes what still waits; raises OSError if that is lost."""
        try:
            self.write()
        except OSError as error:
            raise OSError(f"{self.path} lacks its last {len(self.waiting)} steps: {error}") from error
