"""TensorBoard's files, and what services are told, by the trackers of accelerate."""

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from accelerate import tracking
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.errors import ConfigError
from configs.schema import Config, TrainerConfig
from extras.loggers.trackers import Wandb
from tests.runs import compose
from tests.test_tracking import start
from training.tracking import check_observers

KEY = "actor_rollout_ref.rollout.engine_kwargs.openai.api_key"


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_package_is_reported_before_anything_is_loaded(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # importing it now raises ModuleNotFoundError
    with pytest.raises(ConfigError, match=rf"trainer\.logger has '{name}': .*`pip install {name}`"):
        check_observers(Config(trainer=TrainerConfig(logger=["console", name])))


def tensorboard_scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_shows_what_was_logged(tmp_path):
    with start(tmp_path, "tensorboard") as track:
        track.log(1, {"critic/score/mean": 0.5, "val-core/maze/reward/mean@1": 0.25})
        track.log(2, {"critic/score/mean": 0.75})
        assert tensorboard_scalars(tmp_path, "critic/score/mean") == [(1, 0.5), (2, 0.75)]  # before it is closed
    assert tensorboard_scalars(tmp_path, "val-core/maze/reward/mean@1") == [(1, 0.25)]


@pytest.mark.parametrize(("resume_step", "kept"), [(2, [(0, 0.0), (1, 1.0), (2, 2.0)]), (0, [])])
def test_tensorboard_hides_what_the_resumed_run_repeats(tmp_path, resume_step, kept):
    with start(tmp_path, "tensorboard") as track:
        for step in range(5):
            track.log(step, {"x": float(step)})
    with start(tmp_path, "tensorboard", resume_step=resume_step) as track:
        track.log(3, {"x": 30.0})
    assert tensorboard_scalars(tmp_path, "x") == [*kept, (3, 30.0)]


class Service:
    """Stands in for a tracker of accelerate, and for the run that it has."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.made, self.told = (arguments, named), []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self.told.append((name, *arguments, named)) or self

    @property
    def tracker(self) -> Any:
        return self

    def get_metric_history(self, *_: Any) -> list[Namespace]:
        return [Namespace(step=4), Namespace(step=3)]

    info = tracker
    id = run_id = "its-id"


@pytest.mark.parametrize("kind", ["WandB", "MLflow", "Trackio", "SwanLab"])
def test_services_get_the_run_its_config_and_its_metrics(tmp_path, monkeypatch, kind):
    name, package = kind.lower(), Service()
    monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(tracking, f"{kind}Tracker", Service)
    with pytest.raises(KeyError), start(tmp_path, name) as track:
        [observer] = track.observers.observers
        track.log(3, {"x@1": 1.5})
        raise KeyError
    service = observer.tracker
    (project, *_), named = service.made
    assert project == "project" and "experiment" in named.values()
    told = named["config"] if name != "mlflow" else package.told[0][1]
    assert told["trainer"]["project_name"] == "project"
    if name == "mlflow":
        assert service.told.pop(1)[1]["trainer.project_name"] == "project"
    assert service.told[1][:3] == ("log", {"x_at_1" if name == "mlflow" else "x@1": 1.5}, 3)
    endings = {"wandb": ("finish", {"exit_code": 1}), "mlflow": ("end_run", "FAILED", {})}
    endings["swanlab"] = ("finish", {"state": "crashed", "error": "KeyError"})
    assert [*service.told, *package.told][-1] == endings.get(name, ("finish", {}))
    with start(tmp_path, name, resume_step=3) as track:
        service = track.observers.observers[0].tracker
        track.log(4, {"x": 1.0})
        track.log(5, {"x": 2.0})
    steps = [told[2] for told in service.told if told[0] == "log"]
    assert steps == ([5] if name == "mlflow" else [4, 5]), "MLflow would have a step twice"
    known = {"wandb": ("id", "its-id"), "mlflow": ("run_id", "its-id"), "trackio": ("resume", "allow")}
    assert name not in known or known[name] in service.made[1].items()


def test_no_service_is_told_a_key(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Service())
    monkeypatch.setattr(tracking, "WandBTracker", Service)
    monkeypatch.setattr(sys, "argv", ["main.py", f"{KEY}=sk-1"])
    observer = Wandb(Namespace(config=compose(f"{KEY}=sk-1"), folder=tmp_path))
    observer.started(0)
    assert "'api_key': '***'" in str(observer.tracker.made) and sys.argv == ["main.py", f"{KEY}=***"]
    assert "sk-1" not in str(observer.tracker.made)


def test_a_service_that_does_not_start_is_said_in_one_line(tmp_path, monkeypatch):
    def refuse(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("no account\nand more")

    monkeypatch.setitem(sys.modules, "wandb", Service())
    monkeypatch.setattr(tracking, "WandBTracker", refuse)
    with pytest.raises(ConfigError, match=r"^trainer.logger has 'wandb', .* start: RuntimeError: no account\.$"):
        start(tmp_path, "wandb")
