"""The end of a run whose updates are not finite, step after step."""

from collections.abc import Mapping
from pathlib import Path

from data.files import dispensable
from data.protocol import DataProto

MAX_FILES = 3  # each holds a whole mini-batch


class SkippedUpdates:
    """Counts the steps in a row in which an update was refused, as its loss or gradient was not finite.

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

    def check(self, metrics: Mapping[str, float]) -> None:
        """Counts a step by its metrics named …/skipped_updates. Raises RuntimeError at the limit."""
        skipped = any(value > 0 for name, value in metrics.items() if name.endswith("/skipped_updates"))
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self.limit:
            raise RuntimeError(
                f"the loss or gradient was not finite in {self.in_a_row} steps in a row{self.setting}. The weights are "
                f"as before them. {self.remedy}"
            )
