"""Reads what runs have left in their folders. Whatever is missing or torn is named in words, and the rest is read."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from configs.paths import ROOT
from data.files import lock

METRICS, CONFIG, INFO, EVENTS, LOCK = "metrics.jsonl", "config.yaml", "run.json", "events.jsonl", "run.lock"
OF_ONE_RUN = ("experiment_name", "default_local_dir", "rollout_data_dir", "validation_data_dir")  # settings of trainer
SEEDS = ("trainer.seed", "data.seed")
LACKS = {  # what is not known where a file of a run is missing or broken
    METRICS: "there are no curves",
    CONFIG: "the settings are not known",
    INFO: "versions, machine and how the run ended are not known",
    EVENTS: "notices and warnings are not known",
}


class Curve(NamedTuple):
    """One metric of a run: its steps, and its values there; None was NaN or infinite."""

    steps: list[int]
    values: list[float | None]


class SampleFile(NamedTuple):
    """A file of rollouts: its `kind` is train or validation."""

    kind: str
    step: int
    path: Path


@dataclass
class RunRecord:
    """A run, as its folder tells it.

    Attributes:
        name: experiment_name, or else the folder's name; no two runs of a report have the same.
        info: run.json; {} if there is none. `start` is the last of its starts, or {}.
        state: running, done, stopped, failed, killed; or ended, where there is no run.json to say how.
        metrics: name -> Curve, in the order of the record.
        config: config.yaml as nested dicts, `settings` the same by dotted key.
        events: lines of events.jsonl.
        samples: files of rollouts, by kind and step.
        group: name that runs share which differ in their seed alone; no two groups have the same.
        missing: sentences: which parts are not there, or broken.
    """

    name: str
    folder: Path
    info: dict[str, Any] = field(default_factory=dict)
    state: str = "ended"
    metrics: dict[str, Curve] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[SampleFile] = field(default_factory=list)
    group: str = ""
    missing: list[str] = field(default_factory=list)

    @property
    def start(self) -> dict[str, Any]:
        return self.info["starts"][-1] if self.info else {}

    @property
    def settings(self) -> dict[str, Any]:
        return dict(flatten(self.config))

    @property
    def steps(self) -> list[int]:
        """All steps of the record, in order; 0 is the validation before training."""
        return sorted({step for curve in self.metrics.values() for step in curve.steps})


def read_runs(folders: Sequence[str | Path]) -> list[RunRecord]:
    """Reads the folder of each run; names and groups them. Raises ValueError for a folder that is no run."""
    runs = [read_run(Path(folder)) for folder in {os.path.realpath(folder): folder for folder in folders}.values()]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.folder)
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(json.dumps(without_seed(run), sort_keys=True, default=str), []).append(run)
    group_names = [group_name(members) for members in groups.values()]
    for number, (name, members) in enumerate(zip(group_names, groups.values(), strict=True), start=1):
        same = f" #{group_names[:number].count(name)}" if group_names.count(name) > 1 else ""
        for run in members:
            run.group = name + same
    return runs


def holds_run(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in (METRICS, INFO))


def read_run(folder: Path) -> RunRecord:
    """Reads one run's folder. Raises ValueError if it has neither metrics.jsonl nor run.json."""
    if not holds_run(folder):
        reason = f"has neither {METRICS} nor {INFO}" if os.access(folder, os.X_OK) else "may not be opened"
        absent = "is a file" if os.path.isfile(folder) else "is not there"
        raise ValueError(
            f"{folder} is no folder of a run: it {reason if folder.is_dir() else absent}. Name the folder that a run "
            "prints at its start (trainer.default_local_dir)."
        )
    run = RunRecord(folder.resolve().name, folder)
    run.info = read_info(run)
    run.config = read_config(run)
    run.name = str(run.config.get("trainer", {}).get("experiment_name") or run.name)
    run.metrics = columns({entry["step"]: entry["data"] for entry in read_lines(run, METRICS, is_entry)})
    run.events = read_lines(run, EVENTS, lambda event: isinstance(event.get("text"), str))
    run.samples = [*find_samples(run, "train"), *find_samples(run, "validation")]
    run.state = state_of(run)
    run.missing += sentences_on_gaps(run)
    return run


def read_file(run: RunRecord, name: str) -> bytes | None:
    """Reads a file of a run; None if it is missing or cannot be read, which `run.missing` then says."""
    try:
        return (run.folder / name).read_bytes()
    except FileNotFoundError:
        if name in (INFO, CONFIG):  # a run without notices has no events.jsonl
            run.missing.append(f"There is no {name}: {LACKS[name]}.")
    except OSError as error:
        run.missing.append(f"{name} cannot be read ({error.strerror}): {LACKS[name]}.")
    return None


def parse(content: bytes) -> Any:
    """Parses JSON; returns None if it is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(content)
    return None


def read_info(run: RunRecord) -> dict[str, Any]:
    """Reads run.json; {} if it is missing or broken, which `run.missing` then says."""
    if (content := read_file(run, INFO)) is None:
        return {}
    info = parse(content)
    starts = info.get("starts") if isinstance(info, dict) else None
    if isinstance(starts, list) and starts and all(isinstance(start, dict) for start in starts):
        return info
    run.missing.append(f"{INFO} is broken: {LACKS[INFO]}.")
    return {}


def read_config(run: RunRecord) -> dict[str, Any]:
    """Reads config.yaml and its text; {} if it is missing or broken, which `run.missing` then says."""
    if (content := read_file(run, CONFIG)) is None:
        return {}
    run.config_text = content.decode(errors="backslashreplace")
    with suppress(yaml.YAMLError, ValueError):
        config = yaml.load(run.config_text, yaml.CSafeLoader)  # six times as fast as safe_load
        if isinstance(config, dict) and isinstance(config.get("trainer", {}), dict):
            return config
    run.missing.append(f"{CONFIG} is broken: {LACKS[CONFIG]}.")
    return {}


def read_lines(run: RunRecord, name: str, is_wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Reads the JSON objects of a file, a line each, that are wanted; `run.missing` says how many lines are not."""
    lines = [line for line in (read_file(run, name) or b"").split(b"\n") if line.strip()]
    entries = [entry for entry in map(parse, lines) if isinstance(entry, dict) and is_wanted(entry)]
    if left_out := len(lines) - len(entries):
        run.missing.append(f"{name}: {left_out} of {len(lines)} lines cannot be read (torn by a kill?): left out.")
    return entries


def is_entry(entry: Mapping[str, Any]) -> bool:
    """Says whether it is a line of metrics.jsonl."""
    return isinstance(entry.get("step"), int) and isinstance(entry.get("data"), dict)


def columns(entries: Mapping[int, Mapping[str, Any]]) -> dict[str, Curve]:
    """Turns lines of metrics, by step, into a curve for each metric; a step that was done again counts once."""
    curves: dict[str, Curve] = {}
    for step, data in sorted(entries.items()):
        for name, value in data.items():
            curve = curves.setdefault(name, Curve([], []))
            curve.steps.append(step)
            curve.values.append(float(value) if isinstance(value, int | float) and math.isfinite(value) else None)
    return curves


def find_samples(run: RunRecord, kind: str) -> list[SampleFile]:
    """Finds a run's files of rollouts of a `kind`, by step; a dump of all rollouts is preferred to one of a few.

    In a folder outside the run's own, files from before its first start are of another run.
    """
    setting = {"train": "rollout_data_dir", "validation": "validation_data_dir"}[kind]
    own_folder, began = run.folder / "samples" / kind, 0.0
    dump = run.config.get("trainer", {}).get(setting)
    with suppress(LookupError, TypeError, ValueError):
        began = datetime.fromisoformat(run.info["starts"][0]["started"]).timestamp()
    files: dict[int, SampleFile] = {}
    for folder in (own_folder, *((ROOT / str(dump), Path(str(dump))) if dump else ())):
        if not folder.is_dir():
            continue
        for path in folder.glob("*.jsonl"):
            if path.stem.isdecimal() and (folder == own_folder or path.stat().st_mtime >= began):
                files[int(path.stem)] = SampleFile(kind, int(path.stem), path)
    return [files[step] for step in sorted(files)]


def state_of(run: RunRecord) -> str:
    """Returns how a run ended, or that it is still running: then a process holds its lock."""
    state = "killed" if run.start else "ended"
    try:
        with (run.folder / LOCK).open("rb") as file:
            if not lock(file, shared=True):
                return "running"
    except FileNotFoundError:
        pass
    except OSError:  # of another user: it may go on
        state = "ended"
    return str(run.start.get("ending") or state)


def sentences_on_gaps(run: RunRecord) -> list[str]:
    """Names the parts of a report that the run has no data for, besides broken files."""
    gaps = []
    if not run.metrics:
        is_told = any(sentence.startswith(METRICS) for sentence in run.missing)
        gaps += [] if is_told else ["There are no metrics yet: no step has ended."]
    elif not any(name.startswith(("val-", "val/")) for name in run.metrics):
        gaps.append("There was no validation.")
    if run.metrics and not run.samples and "model.path" not in run.settings:  # supervised training draws none
        gaps.append("There are no samples: trainer.sample_groups=2 keeps some, trainer.rollout_data_dir all.")
    holes = [name for name, curve in run.metrics.items() if None in curve.values]
    if holes:
        gaps.append(f"Not a number at some step (left out of the curves): {', '.join(holes)}.")
    return gaps


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yields a nested config by dotted keys; an empty dictionary is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def without_seed(run: RunRecord) -> dict[str, Any]:
    """Returns the settings that make two runs the same experiment: all but seeds and the paths of the run's files."""
    run_keys = {*SEEDS, *(f"trainer.{name}" for name in OF_ONE_RUN)}
    folder = str(run.config.get("trainer", {}).get("default_local_dir") or run.folder)
    settings = {key: value for key, value in run.settings.items() if key not in run_keys}
    # A run alone knows its own start, such as <folder>/warm_start, and one without a config is like no other.
    return {key: str(value).replace(folder, "…") for key, value in settings.items()} or {"folder": str(run.folder)}


def group_name(runs: Sequence[RunRecord]) -> str:
    """Names a group of runs, or of seeds, by the words that their names have in common, but "seed"; a run alone by its
    own name."""
    first = runs[0].name
    if len(runs) == 1:
        return first
    words = zip(*(re.findall(r"[-_, /]*[^-_, /]+", run.name) for run in runs), strict=False)
    common = [word for word, *rest in words if {*rest} == {word} and word.strip("-_, /").lower() != "seed"]
    shared = "".join(common).lstrip("-_, /") or first.rstrip("-_., /=0123456789") or first
    seeds = {str([run.settings.get(key) for key in SEEDS]) for run in runs}
    return f"{shared} ({len(runs)} {'seeds' if len(seeds) == len(runs) else 'runs'})"


def differences(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Lists the settings and versions in which runs differ: {"key", "values": a text for each run, None if unknown}."""
    settings = [{key: spell(value) for key, value in (run.settings | versions(run)).items()} for run in runs]
    keys = dict.fromkeys(key for texts in settings for key in texts)
    table = [{"key": key, "values": [texts.get(key) for texts in settings]} for key in keys]
    return [row for row in table if any(value != row["values"][0] for value in row["values"])]


def settings_compared(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Lists the settings that runs compare, as `differences` does: seeds, and those that all have with other values."""
    known = [without_seed(run) for run in runs if run.settings]
    keys = {key for texts in known for key in texts if len({other.get(key, texts[key]) for other in known}) > 1}
    return [row for row in differences(runs) if row["key"] in {*keys, *SEEDS}]


def versions(run: RunRecord) -> dict[str, Any]:
    """Returns the commit and the packages of a run's last start."""
    packages = {f"version of {name}": version for name, version in run.start.get("versions", {}).items()}
    return packages | ({"commit": run.start["commit"]} if run.start.get("commit") else {})


def spell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
