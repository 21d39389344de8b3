"""Says in lines what becomes of a run's folder, and sums its validations up."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.process import in_notebook
from configs.schema import TrainerConfig
from configs.settings import LAST
from training.checkpoint import CONFIG_FILE, find_checkpoint, missing_parts
from training.metric_utils import CORE_VARIABLES
from training.tracking import METRICS_FILE, short_number


def files_to_come(trainer: TrainerConfig, contents: Sequence[str]) -> str:
    """Says at a run's start where its files will be, and that its model will not be saved."""
    if trainer.val_only:
        return f"trainer.val_only=true: nothing is written to {trainer.default_local_dir}."
    written = f"files go to {trainer.default_local_dir}: {METRICS_FILE}, {CONFIG_FILE}"
    every, times = trainer.save_freq, [*trainer.also_saved]
    if every == LAST or every > 0:
        regular = {LAST: "after the last step", 1: "every step"}
        times.insert(0, regular.get(every, f"every {every} steps and after the last"))
    if not times:
        return (
            f"{written}. No checkpoint will be written, and the trained model is gone when the run ends: "
            "trainer.save_freq=last saves it after the last step, trainer.save_freq=N every N steps as well."
        )
    resume = f" (without {lacking} it cannot be resumed from)" if (lacking := missing_parts(contents)) else ""
    return f"{written}, and {' and '.join(times)} a checkpoint of {', '.join(contents)}{resume}."


def nothing_left(step: int, total_steps: int, validation: dict[str, float]) -> str:
    """Says of a run that was finished before it began what its last validation was, and how it goes on."""
    lines = [
        f"step {step} of {total_steps} is done, so nothing is left to do. To go on, raise trainer.total_training_steps "
        "(or total_epochs); to start afresh, set trainer.resume_mode=disable."
    ]
    lines += [f"  {name}: {short_number(value)}" for name, value in validation.items() if name.startswith("val-core/")]
    return "\n".join(lines)


def steps_lost(saved: int, step: int) -> str:
    """Says which steps are lost if a run whose step `saved` is its newest checkpoint ends after `step`."""
    return f"step {step} is lost" if step == saved + 1 else f"steps {saved + 1} to {step} are lost"


def ended_early(run: Any, signal: str) -> str:
    """Says of a run that a `signal` has ended how it goes on, or what is lost."""
    step, total_steps, saved = run.global_step, run.total_steps, run.saver.newest
    text = f"stopped by {signal} after step {step} of {total_steps}"
    if saved < step:
        return f"{text}, which could not be saved: {steps_lost(saved, step)}."
    if lacking := missing_parts(run.contents):
        return f"{text}, which is saved without {lacking}: it cannot be resumed from."
    command = "train()" if in_notebook() else "the same command"
    command += " with trainer.resume_mode=auto" * (run.config.trainer.resume_mode != "auto")
    return f"{text}, which is saved: {command} goes on from it." if step < total_steps else f"{text}."


def files_left(folder: Path, saved: int, step: int) -> str:
    """Says at a run's end, after `step`, where its model is, and what it has learnt since `saved`, the newest one."""
    newest = find_checkpoint(folder, "auto", None)
    if newest is None:
        return f"{folder} has {METRICS_FILE}, {CONFIG_FILE}, and no checkpoint."
    models = [newest / "actor" / "huggingface", newest / "huggingface"]  # of RL, and of supervised training
    from_pretrained = [f" from_pretrained loads {model}." for model in models if any(model.glob("*.safetensors"))]
    unsaved = f" They are older than the run's end: {steps_lost(saved, step)}." if saved < step else ""
    return f"{folder} has {METRICS_FILE}, {CONFIG_FILE}, {newest.name}." + "".join(from_pretrained) + unsaved


def validation_summary(step: int, metrics: Mapping[str, float]) -> str:
    """Summarises a validation, a line for each data source: the means of acc, reward and return, where it has them.

    `acc` is the share of right answers or successful episodes, `reward` of an answer, `return` of an episode.
    """
    means_of: dict[str, list[str]] = {}
    variables = "|".join(CORE_VARIABLES)
    names = re.compile(rf"val-\w+/(?P<source>.+?)(?P<player>/random_player)?/(?P<variable>{variables})/mean@\d+")
    for name, value in metrics.items():
        if match := names.fullmatch(name):
            whose = "a random player's " if match["player"] else ""
            means_of.setdefault(match["source"], []).append(f"{whose}{match['variable']} {value:.4g}")
    return "\n".join(f"validation at step {step}: {source}: {', '.join(means)}" for source, means in means_of.items())
