"""A checkpoint is whole or not there, whatever happens while it is written: every file operation is made to fail."""

import errno
import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from configs.errors import WorkerError, WorkerLost
from data.protocol import DataProto
from data.seeding import rng_state, set_rng_state
from tests.runs import compose, tree_of
from training import checkpoint, tracking
from training.checkpoint import LATEST, Saver, config_drift, config_yaml, find_checkpoint, read_part, saved_steps
from training.run import Run

FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "test.half_written"}


def writer(content: str) -> Callable[[Path], None]:
    """Writes two files of `content`, with a moment at which each is half there."""

    def write(folder: Path) -> None:
        (folder / "actor").mkdir()
        for name in ("actor/model.pt", "trainer_state.pt"):
            with (folder / name).open("w") as file:
                file.write(content[:1])
                file.flush()
                sys.audit("test.half_written")
                file.write(content[1:])

    return write


def save_checkpoint(root: Path, step: int, content: str = "x", keep: int | None = None) -> None:
    Saver(root, writer(content), keep).save(step)


def content_of(folder: Path) -> str:
    [content] = {path.read_text() for path in folder.rglob("*.pt")}  # both files, of one save
    assert len(list(folder.rglob("*.pt"))) == 2
    return content


def in_child(action: Callable[[], None], number: int, fault: str) -> bool:
    """Runs `action` in a forked process whose `number`-th file operation is its last ("kill") or finds the disk full
    ("full"); False once it has fewer operations."""
    child = os.fork()
    if child == 0:
        operations = itertools.count(1)

        def hook(event: str, _: tuple) -> None:
            if event in FILE_OPERATIONS and next(operations) == number:
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, "No space left on device")

        sys.addaudithook(hook)
        try:
            action()
        except OSError:
            os._exit(errno.ENOSPC)
        os._exit(0 if next(operations) <= number else errno.ENOSPC)
    _, status = os.waitpid(child, 0)
    return status != 0


@pytest.mark.parametrize("fault", ["kill", "full"])
@pytest.mark.parametrize(
    ("there", "step", "keep", "kept"),
    [([], 1, None, [1]), ([1, 2], 3, 1, [3]), ([1, 2], 2, None, [1, 2])],
    ids=["first", "next", "an existing step again"],
)
def test_a_save_that_breaks_at_any_file_operation_loses_nothing(tmp_path, monkeypatch, there, step, keep, kept, fault):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and a kill of the process does not need it
    for number in itertools.count(1):
        root = tmp_path / str(number)
        root.mkdir()
        for old in there:
            save_checkpoint(root, old, f"old {old}")
        broken = in_child(lambda root=root: save_checkpoint(root, step, "new", keep), number, fault)
        before = tree_of(root)
        found = find_checkpoint(root, "auto", None)
        assert found or not there
        assert tree_of(root) == before, "looking for a checkpoint changed something"
        content = found and content_of(found)
        if found:
            assert content in ({f"old {there[-1]}", "new"} if there else {"new"})
        checkpoint.clear_leftovers(root)
        found = find_checkpoint(root, "auto", None)
        assert (found and content_of(found)) == content
        assert all(content_of(root / f"global_step_{whole}") for whole in saved_steps(root))
        assert not list(root.glob(".*_global_step_*"))  # what the break left behind is gone
        save_checkpoint(root, step, "new", keep)
        assert saved_steps(root) == kept
        assert content_of(find_checkpoint(root, "auto", None)) == "new"
        if not broken:
            break
    assert number > 10


def test_a_link_is_no_place_to_write_a_checkpoint_and_goes(tmp_path):
    for name in (".writing_global_step_1", ".deleted_global_step_1"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    save_checkpoint(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST]


def test_a_last_save_that_fails_is_an_error_and_one_before_it_is_not(tmp_path):
    def write(folder: Path) -> None:
        if disk_is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        writer("new")(folder)

    saver, disk_is_full = Saver(tmp_path, write), True
    saver.save(1)
    with pytest.raises(RuntimeError, match=r"The newest checkpoint in .* is none"):
        saver.check(1)
    for step, disk_is_full in enumerate([False, True, False], start=1):
        assert ("training/failed_saves" in saver.save(step)) == disk_is_full
    saver.check(3)
    disk_is_full = True
    saver.save(4)
    with pytest.raises(RuntimeError, match=r"step 4, the last, could not be saved .*No space.* is global_step_3"):
        saver.check(4)


class Slow:
    """A model that is written in the background, for as long as it is asked three times."""

    left = 0

    def all(self, method: str, *args: object) -> list:
        return [getattr(self, method)(*args)]

    def save(self, folder: Path, contents: list[str], background: bool) -> None:
        folder.mkdir(exist_ok=True)
        self.left = 3

    def is_saved(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_worker_that_is_lost_in_a_save_ends_the_run_where_one_that_cannot_write_does_not(tmp_path: Path):
    """A lost worker would be waited for again at the next save; a full disk is only counted."""
    assert Saver(tmp_path, Mock(side_effect=WorkerError("rank 0: a full disk"))).save(1) == {"training/failed_saves": 1}
    with pytest.raises(WorkerLost, match="rank 1"):
        Saver(tmp_path, Mock(side_effect=WorkerLost("rank 1"))).save(1)


@pytest.mark.parametrize(("error", "saved"), [(RuntimeError("a reward"), [1]), (WorkerError("rank 1"), [])])
def test_a_step_that_raises_leaves_the_checkpoint_whole_that_is_being_written(tmp_path, error, saved, monkeypatch):
    """The run waits for the checkpoint, unless a worker failed: others may be waiting for that worker."""

    class Failing(Run):
        def step(self) -> tuple[DataProto, dict[str, float]]:
            if self.global_step == 2:
                raise error
            return DataProto(), {}

    monkeypatch.setattr(tracking, "observers_of", lambda config: [])
    config = compose(f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=1", "trainer.logger=[]")
    loader, models = Mock(state_dict=dict), {".": Slow()}
    parts = {"tokenizer": Mock(), "train_loader": loader, "total_steps": 3, "models": models, "contents": ["model"]}
    with pytest.raises(type(error)):
        Failing(config, **parts, in_background=True, can_validate=False).fit()
    assert saved_steps(tmp_path) == saved


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    flushed, named = set(), []
    rename, fsync = Path.rename, os.fsync

    def note_flush(descriptor: int) -> None:
        flushed.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def note_name(folder: Path, target: Path) -> None:
        assert {folder, *folder.rglob("*")} <= flushed
        named.append(target.name)
        rename(folder, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(Path, "rename", note_name)
    save_checkpoint(tmp_path, 1)
    assert named == ["global_step_1"]


def test_a_full_disk_gets_its_space_back_at_once(tmp_path):
    save_checkpoint(tmp_path, 1, "old")

    def write(folder: Path) -> None:
        writer("new")(folder)
        (folder / "data.pt").symlink_to("/dev/full")
        torch.save({"x": torch.zeros(1000)}, folder / "data.pt")

    assert Saver(tmp_path, write, 1).save(2)  # torch says RuntimeError; WRITE_ERRORS covers it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", LATEST]
    assert content_of(find_checkpoint(tmp_path, "auto", None)) == "old"


@pytest.mark.parametrize(("keep", "kept"), [(1, [3, 8]), (2, [2, 3, 8]), (None, [1, 2, 3, 8])])
def test_the_newest_are_kept_and_checkpoints_ahead_of_a_run_that_went_back(tmp_path, keep, kept):
    for step in (1, 2, 8):
        save_checkpoint(tmp_path, step)
    save_checkpoint(tmp_path, 3, keep=keep)  # knows of the others from the disk alone, as after a resume
    assert saved_steps(tmp_path) == kept
    assert find_checkpoint(tmp_path, "auto", None) == tmp_path / "global_step_3"


def test_which_checkpoint_is_resumed(tmp_path):
    assert find_checkpoint(tmp_path, "auto", None) is None
    for step in (9, 10):
        save_checkpoint(tmp_path, step)
    assert find_checkpoint(tmp_path, "auto", None) == tmp_path / "global_step_10"
    assert find_checkpoint(tmp_path, "disable", None) is None
    assert find_checkpoint(tmp_path, "resume_path", str(tmp_path / "global_step_9")) == tmp_path / "global_step_9"


def test_a_checkpoint_that_is_not_there_is_an_error_with_a_remedy(tmp_path):
    save_checkpoint(tmp_path, 2)
    for named in (tmp_path / "global_step_7", tmp_path, tmp_path / LATEST):
        with pytest.raises(ValueError, match=r"trainer.resume_from_path=.* has steps \[2\]"):
            find_checkpoint(tmp_path / "another", "resume_path", str(named))
    (tmp_path / LATEST).write_text("7")
    with pytest.raises(ValueError, match=rf"{LATEST} names global_step_7.* \[2\]"):
        find_checkpoint(tmp_path, "auto", None)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_file_that_is_cut_anywhere_is_named_with_the_remedy(tmp_path, trusted):
    path = tmp_path / "data.pt"
    torch.save({"moments": torch.arange(30.0), "epoch": 3}, path)
    whole, restored = path.read_bytes(), []
    for size in {*range(0, len(whole), 29), len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"file {path} cannot be loaded \(.+\)\. .*resume_mode=disable"):
            read_part(path, restored.append, trusted)
    path.unlink()
    with pytest.raises(ValueError, match=rf"file {path} cannot be loaded \(FileNotFoundError"):
        read_part(path, restored.append, trusted)
    assert restored == []


def test_a_state_that_does_not_fit_the_run_is_named_with_the_remedy(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(torch.nn.Linear(2, 3).state_dict(), path)
    with pytest.raises(
        ValueError, match=rf"file {path} cannot be loaded \(RuntimeError: .*Linear.*resume_mode=disable"
    ):
        read_part(path, torch.nn.Linear(3, 3).load_state_dict)


def test_files_of_the_workers_may_not_run_code(tmp_path):
    path, read = tmp_path / "model.pt", []
    torch.save({"x": Path("a")}, path)
    with pytest.raises(ValueError, match=r"model.pt holds Python objects \(pathlib.*trainer.trust_checkpoint=true"):
        read_part(path, read.append)
    read_part(path, read.append, trusted=True)
    state = {"rates": np.array([0.5, 1.0]), "mean": np.float64(2.0), "seen": {1, 2}, "ids": np.arange(3)}  # is no code
    torch.save(state, path)
    read_part(path, read.append)
    assert repr(read) == repr([{"x": Path("a")}, state])


def test_the_global_generators_go_on_where_they_were(tmp_path):
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    draw()  # leaves a second gaussian in store in both random and numpy
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = draw()
    draw()
    read_part(tmp_path / "rng.pt", set_rng_state)  # plain types: no pickled code
    assert draw() == expected


def test_config_drift_is_told_key_by_key(tmp_path):
    path = tmp_path / "config.yaml"
    config = compose("trainer.default_local_dir=out", "env.kwargs.size=4", "env.kwargs.is_slippery=false")
    path.write_text(config_yaml(config))
    assert config_drift(path, config) == []
    changed = compose(
        *("trainer.default_local_dir=out", "trainer.executor=ray", "trainer.logger=[]", "~env.kwargs"),
        *("env.kwargs.is_slippery=true", "env.kwargs.random_maps=true", "actor_rollout_ref.actor.optim.lr=3e-7"),
    )
    drift = config_drift(path, changed)
    assert "trainer.executor: null → ray" in drift
    assert 'trainer.logger: ["console", "tensorboard"] → []' in drift
    assert "env.kwargs.is_slippery: false → true" in drift
    assert "env.kwargs.size: 4 → not set" in drift
    assert f"actor_rollout_ref.actor.optim.lr: {config.actor_rollout_ref.actor.optim.lr} → 3e-07" in drift
    assert not any(line.startswith(("env.kwargs.random_maps", "data.")) for line in drift)


def test_a_config_that_cannot_be_read_is_named_with_the_remedy(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("trainer: {seed")
    with pytest.raises(ValueError, match=rf"file {path} cannot be loaded \(ParserError.*resume_mode=disable"):
        config_drift(path, compose())
