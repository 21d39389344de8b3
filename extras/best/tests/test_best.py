"""The best checkpoint stays, and a run ends early, by what its validations have measured, resumed or not."""

import math
from pathlib import Path

import pytest

import main
from configs.errors import ConfigError
from extras.best.best import Scores
from tests.runs import compose, learning_metrics, short_run
from training.ray_trainer import RayPPOTrainer

SUMS, OTHERS = "val-core/sums/acc/mean@1", "val-core/others/acc/mean@1"


@pytest.fixture
def run(tiny_model, tmp_path, monkeypatch):
    """Runs so many steps, each with a validation that measures the next of `values`, from step 0 on."""

    def running(steps: int, values: list[float], *more: str) -> Path:
        def measure(self):
            return {SUMS: values[self.global_step], OTHERS: 0.0, "val-aux/x": 1.0}, []

        monkeypatch.setattr(RayPPOTrainer, "measure", measure)
        own = ["trainer.test_freq=1", f"trainer.total_training_steps={steps}", *more]
        main.main(["--config-name", "frozenlake", *short_run(tiny_model, tmp_path, *own)])
        return tmp_path

    return running


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step_*"))


def test_the_best_checkpoint_stays_beside_the_newest_and_is_known_after_a_resume(run):
    values = [0.9, 0.2, 0.5, 0.3, 0.4, 0.5, 0.6]
    settings = ["trainer.save_best=headline", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1"]
    for steps, newest, best in ((3, 3, 2), (5, 5, 2), (6, 6, 6)):
        folder = run(steps, values, *settings)
        assert checkpoints(folder) == sorted({f"global_step_{newest}", f"global_step_{best}"})
        assert (folder / "best").resolve() == folder / f"global_step_{best}"


def test_only_validations_that_are_the_best_so_far_are_saved(run, capsys):
    folder = run(4, [0.9, 0.2, 0.1, 0.3, 0.3], f"trainer.save_best={SUMS}")
    assert checkpoints(folder) == ["global_step_1", "global_step_3"]
    said = capsys.readouterr().out
    assert f"and after each validation with the best {SUMS} so far a checkpoint of" in said
    assert "They are older than the run's end: step 4 is lost" in said
    assert said.splitlines()[-1] == f"best: {folder}/global_step_3 (trainer.save_best={SUMS}: 0.3000)."


def test_a_run_without_progress_ends_early_and_again_when_it_is_resumed(run, capsys):
    values, last = [0.5, 0.4, 0.6, 0.6, 0.1, 0.2, 0.7], "trainer.save_freq=last"
    patience = ["trainer.early_stop.metric=headline", last, "trainer.early_stop.patience"]
    for _ in range(2):
        folder = run(6, values, *patience[:2], f"{patience[2]}=2")
        line = "ended early: headline 0.3000 at step 2 was the best, and 2 validations since were no better."
        assert line in capsys.readouterr().out
        assert checkpoints(folder) == ["global_step_4"] and list(learning_metrics(folder)) == [0, 1, 2, 3, 4]
    run(6, values, *patience[:2], f"{patience[2]}=4")
    assert list(learning_metrics(folder)) == [*range(7)] and "ended early" not in capsys.readouterr().out


@pytest.mark.parametrize("obstacle", ["folder", "no links"])
def test_a_run_that_cannot_link_its_best_checkpoint_keeps_it_and_ends_early(run, capsys, monkeypatch, obstacle):
    """A folder is in the link's place, as after `cp -rL`, or the file system has no links."""
    settings = ["trainer.save_best=headline", "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1"]
    stop = ["trainer.early_stop.metric=headline", "trainer.early_stop.patience=2"]
    folder = run(2, values := [0.5, 0.4, 0.6, 0.7, 0.1, 0.2, 0.3], *settings)
    (folder / "best").unlink()
    if obstacle == "folder":
        (folder / "best").mkdir()
        (folder / "best/mine").touch()
    else:
        monkeypatch.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links here")))
    run(6, values, *settings, *stop)
    output, error = capsys.readouterr()
    assert "ended early: headline 0.3500 at step 3 was the best" in output
    assert checkpoints(folder) == ["global_step_3", "global_step_5"]
    assert error.count(f"{folder}/best cannot name the best checkpoint, global_step_3 now") == 1
    assert (folder / "best/mine").exists() == (obstacle == "folder") and not (folder / ".best").is_symlink()


def test_a_run_ends_once_it_has_reached_its_target(run, capsys):
    target = ["trainer.early_stop.target=0.25", "trainer.early_stop.mode=min"]
    folder = run(4, [0.5, 0.3, 0.2, 0.1, 0.1], f"trainer.early_stop.metric={SUMS}", *target)
    assert f"{SUMS} 0.2000 at step 2 has reached trainer.early_stop.target=0.25.\n" in capsys.readouterr().out
    assert list(learning_metrics(folder)) == [0, 1, 2]


def test_a_metric_that_is_not_measured_is_refused_by_those_there_are(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run(1, [0.0, 0.0], "trainer.save_best=val-core/sum")
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert f"trainer.save_best=val-core/sum is not measured: choose headline, {SUMS}, {OTHERS}.\n" in error


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["early_stop.patience=2"], "early_stop.metric=null needs patience or target beside it, and they need it"),
        (["early_stop.metric=headline"], "early_stop.metric=headline needs patience or target beside it"),
        (["save_best=headline", "test_freq=-1"], "test_freq=-1: save_best and early_stop"),
        (["early_stop.metric=x", "early_stop.target=1", "early_stop.mode=most"], "mode='most' must be one of max, min"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(*(f"trainer.{override}" for override in overrides))


@pytest.mark.parametrize(("mode", "best"), [(None, 2), ("max", 0)])
def test_of_a_loss_the_least_is_best_unless_said_and_what_is_no_number_is_worst(mode, best):
    scores = Scores("", "headline", mode)
    for step, loss in enumerate([3.0, math.nan, 1.0, 1.0, None]):
        scores.take(step, {"val/loss": loss, "train/loss": 0.0})
    scores.take(5, {"train/loss": 0.0})
    assert scores.best(scores) == best and len(scores) == 5 and scores.in_words(2) == "1.0000"
