"""What people read of a run: where its files are, printed samples, curves."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from configs.schema import TrainerConfig
from data.files import read_metrics
from training.checkpoint import CONFIG_FILE, find_checkpoint
from training.record import METRICS_FILE

SAMPLE_CHARACTERS = 2000  # longer texts of a printed sample lose their middle


def print_samples(title: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Prints each sample's fields (prompt, response, score, ground truth ...) in a box; colours in texts are shown."""
    console = Console()
    for number, sample in enumerate(samples, start=1):
        fields = Table.grid(padding=(0, 2))
        fields.add_column(style="bold", no_wrap=True)
        fields.add_column(overflow="fold")
        for name, value in sample.items():
            # Not a plain string: [INST] in a text is no markup, and an escape sequence must not reach the terminal.
            fields.add_row(name, Text.from_ansi(_without_middle(str(value))))
        console.print(Panel(fields, title=Text(f"{title} · {number} of {len(samples)}"), title_align="left"))


def plot_metric(metrics_jsonl_path: str | Path, keys: Sequence[str], png_path: str | Path) -> None:
    """Draws the metrics called `keys` over the steps of a record, each with a smoothed line, into a PNG.

    Raises ValueError for a key that the record does not have.
    """
    curves = {key: read_curve(metrics_jsonl_path, key) for key in keys}
    plot_curves(curves, keys[0] if len(keys) == 1 else "value", png_path)


def read_curve(metrics_jsonl_path: str | Path, key: str) -> np.ndarray:
    """[points, 2]: step and value of one metric. Raises ValueError if the record does not have it."""
    entries = read_metrics(metrics_jsonl_path)
    points = [(entry["step"], entry["data"][key]) for entry in entries if entry["data"].get(key) is not None]
    if not points:
        known = sorted({name for entry in entries for name in entry["data"]})
        raise ValueError(f"{metrics_jsonl_path} has no numbers for {key!r}; plot one of {known}")
    return np.array(points, dtype=float)


def plot_curves(curves: Mapping[str, np.ndarray], ylabel: str, png_path: str | Path) -> None:
    """Draws [points, 2] arrays of step and value, each under its name with a smoothed line, into a PNG."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # half a second to import, and only needed here

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=ylabel)
    colours = colormaps["tab10" if len(curves) <= 10 else "tab20"].colors
    for (name, points), colour in zip(curves.items(), cycle(colours), strict=False):
        steps, values = points.T
        axes.plot(steps, values, ".-", color=colour, alpha=0.3, linewidth=1)
        axes.plot(steps, _smooth(values), color=colour, linewidth=2, label=name)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small" if len(curves) > 5 else None, ncols=1 + len(curves) // 10)
    figure.savefig(png_path, format="png")


def _without_middle(text: str) -> str:
    left_out = len(text) - SAMPLE_CHARACTERS
    if left_out <= 0:
        return text
    half = SAMPLE_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out} characters …\n{text[-half:]}"


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a tenth of the points; at the ends, over those of the window that exist."""
    reach = len(values) // 20
    return np.array([values[max(0, i - reach) : i + reach + 1].mean() for i in range(len(values))])


def nothing_left(step: int, total_steps: int, validation: dict[str, float]) -> str:
    """What a run says that was finished before it began: its last validation, and how to go on."""
    lines = [
        f"step {step} of {total_steps} is done, so nothing is left to do. To go on, raise trainer.total_training_steps "
        "(or total_epochs); to start afresh, set trainer.resume_mode=disable."
    ]
    lines += [f"  {name}: {value:.4g}" for name, value in validation.items() if name.startswith("val-core/")]
    return "\n".join(lines)


def files_to_come(trainer: TrainerConfig, contents: Sequence[str]) -> str:
    """What a run says at its start: where its files will be, and what will not be there."""
    folder = trainer.default_local_dir
    if trainer.val_only:
        return f"trainer.val_only=true: nothing is written to {folder}."
    written = f"files go to {folder}: {METRICS_FILE}, {CONFIG_FILE}"
    if trainer.save_freq <= 0:
        return (
            f"{written}. No checkpoint will be written, and the trained model is gone when the run ends: "
            "trainer.save_freq=N saves every N steps and after the last."
        )
    lacking = [part for part in ("model", "optimizer", "extra") if part not in contents]
    resume = f" (without {', '.join(lacking)} it cannot be resumed from)" if lacking else ""
    often = "step" if trainer.save_freq == 1 else f"{trainer.save_freq} steps and after the last"
    return f"{written}, and every {often} a checkpoint of {', '.join(contents)}{resume}."


def files_left(folder: Path) -> str:
    """What a run says at its end: which of its files are there, and where its model is."""
    there = [name for name in (METRICS_FILE, CONFIG_FILE, "tensorboard") if (folder / name).exists()]
    newest = find_checkpoint(folder, "auto", None)
    if newest is None:
        return f"{folder} has {', '.join(there)}, and no checkpoint."
    models = [newest / "actor" / "huggingface", newest / "huggingface"]  # where RL has it, and supervised training
    from_pretrained = [f" from_pretrained loads {model}." for model in models if any(model.glob("*.safetensors"))]
    return f"{folder} has {', '.join([*there, newest.name])}." + "".join(from_pretrained)
