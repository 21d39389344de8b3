"""Shows a run in a notebook: its progress in the cell, its metrics, its report and its curves."""

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.progress import Progress

from configs.import_utils import find
from data.files import read_metrics
from training.tracking import METRICS_FILE


class CellProgress(Progress):
    """A progress bar in the cell of a notebook, as one line that changes: rich's own needs ipywidgets."""

    line: Any = None

    def start(self) -> None:
        """Shows nothing: the first `refresh` with a description does."""

    def refresh(self) -> None:
        from IPython.display import DisplayHandle  # a package of the kernel

        [task] = self.tasks
        if not task.description:
            return
        bar = f'<progress value="{task.completed}" max="{task.total}"></progress>'
        data = {"text/plain": task.description, "text/html": f"{bar} <code>{escape(task.description)}</code>"}
        if self.line is None:
            self.line = DisplayHandle()
            self.line.display(data, raw=True)
        else:
            self.line.update(data, raw=True)


class Page(type(Path())):
    """The path of a page, which a notebook shows."""

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.read_text())}" width="100%" height="600"></iframe>'


class Picture(type(Path())):
    """The path of a picture, which a notebook shows."""

    def _repr_png_(self) -> bytes:
        return self.read_bytes()


@dataclass(frozen=True)
class Result:
    """Reads what a run has left in its folder; `validation` are the metrics of its last validation."""

    folder: Path
    validation: dict[str, float]

    @property
    def metrics(self) -> Any:
        """The metrics as a pandas.DataFrame, a row for each step."""
        import pandas as pd  # takes a second, and only needed here

        lines = read_metrics(self.folder / METRICS_FILE)
        return pd.DataFrame([line["data"] for line in lines], pd.Index([line["step"] for line in lines], name="step"))

    def report(self) -> Page:
        """Writes the report of the run."""
        return Page(find("optional", "write_report")([self.folder]))

    def curves(self, *names: str) -> Picture:
        """Draws metrics over the steps, each by its name; without names, the mean reward."""
        picture = Picture(self.folder / "curves.png")
        find("optional", "plot_metric")(self.folder / METRICS_FILE, names or ["critic/score/mean"], picture)
        return picture
