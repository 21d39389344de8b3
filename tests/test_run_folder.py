"""A run's folder: one run has it, it says what will be there and what is there, and all that it is to hold is tried."""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from threading import Timer

import pytest

import main
from configs.errors import ConfigError
from data.files import FolderLost, lock, sole_run
from tests.runs import ROOT, compose, files_of_at_most, learning_metrics, short_run, signalled, tree_of
from training.ray_trainer import RayPPOTrainer

TWO_STEPS = ("trainer.total_training_steps=2", "trainer.save_freq=1", "env.val_episodes=2")


def refusal(capsys: pytest.CaptureFixture, *overrides: str) -> str:
    """Returns what `python main.py overrides…` says as it refuses."""
    with pytest.raises(SystemExit) as stop:
        main.main(["--config-name", "frozenlake", *overrides])
    assert stop.value.code == 2
    return capsys.readouterr().err.rpartition("\nerror: ")[2]


def test_a_second_run_is_refused_before_it_touches_anything(tiny_model, tmp_path, capsys, monkeypatch):
    command = short_run(tiny_model, tmp_path, *TWO_STEPS)
    main.run(compose(*command))
    (tmp_path / ".writing_global_step_3").mkdir()  # what the first is writing
    with sole_run(tmp_path):
        before = tree_of(tmp_path)
        monkeypatch.setattr("main.build", lambda _: pytest.fail("it went on"))
        said = refusal(capsys, *command)
        monkeypatch.undo()
        with pytest.raises(ConfigError, match="belongs to another run"):
            main.run(compose(*command))
        after = tree_of(tmp_path)
    assert f"trainer.default_local_dir={tmp_path} belongs to another run" in said
    assert f"process {os.getpid()} on {socket.gethostname()}" in said and "name another folder" in said
    assert {**after, ".": 0} == {**before, ".": 0}  # the folder itself was probed for room
    main.run(compose(*command, "trainer.total_training_steps=3"))
    assert list(learning_metrics(tmp_path)) == [0, 1, 2, 3]


def test_validation_alone_reads_a_folder_that_another_run_has(tiny_model, tmp_path):
    command = short_run(tiny_model, tmp_path, *TWO_STEPS)
    main.run(compose(*command))
    (tmp_path / ".writing_global_step_3").mkdir()
    (tmp_path / "global_step_2").rename(tmp_path / ".replaced_global_step_2")  # between the two moves of a save
    with sole_run(tmp_path):
        before = tree_of(tmp_path)
        main.main(["--config-name", "frozenlake", *command, "trainer.val_only=true"])
        main.main(["--config-name", "frozenlake", *command, "trainer.val_only=true", "trainer.resume_mode=disable"])
        assert tree_of(tmp_path) == before


def test_validation_alone_reads_no_other_rows_and_makes_no_folder(tiny_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2", "data_source": "sums"}\n' * 2)
    (tmp_path / "score.py").write_text("def compute_score(prompt, response):\n    return 0.5\n")
    command = [
        f"actor_rollout_ref.model.path={tiny_model}", f"data.val_files={tmp_path}/rows.jsonl", "trainer.val_only=true",
        f"reward.custom_reward_function.path={tmp_path}/score.py", "data.max_response_length=2",
        f"trainer.default_local_dir={tmp_path}/run",
    ]  # fmt: skip
    assert main.run(compose(*command, name="ppo_trainer"))["val-core/sums/reward/mean@1"] == 0.5
    assert not (tmp_path / "run").exists()


def test_a_killed_run_gives_its_folder_back(tmp_path):
    program = f"""
import signal
from data.files import sole_run
with sole_run({str(tmp_path)!r}):
    print("held", flush=True)
    signal.pause()
"""
    holder = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {holder.pid} on "), sole_run(tmp_path):
        pytest.fail("two runs have one folder")
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with sole_run(tmp_path):
        assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_who_looks_whether_a_run_goes_on_keeps_no_run_from_its_start(tmp_path):
    with sole_run(tmp_path), (tmp_path / "run.lock").open("rb") as file:
        assert not lock(file, shared=True)
    with (tmp_path / "run.lock").open("rb") as one, (tmp_path / "run.lock").open("rb") as other:
        assert lock(one, shared=True) and lock(other, shared=True), "nor does it take another that looks for the run"
        Timer(0.1, fcntl.flock, (one, fcntl.LOCK_UN)).start()
        Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with sole_run(tmp_path):
            pass


def test_a_file_system_without_locks_is_said_and_not_the_end(tmp_path, monkeypatch, capsys):
    def flock(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", flock)
    with sole_run(tmp_path):
        assert "is on a file system without locks (Operation not supported)" in capsys.readouterr().err


def test_a_full_disk_is_known_at_the_start(tiny_model, tmp_path, capsys):
    with files_of_at_most(0), pytest.raises(SystemExit):
        main.main(["--config-name", "frozenlake", *short_run(tiny_model, tmp_path)])
    assert "cannot be written to (File too large): name another folder" in capsys.readouterr().err
    with files_of_at_most(1000):  # the probe fits, config.yaml does not
        said = refusal(capsys, *short_run(tiny_model, tmp_path / "run"))
    problem = f"trainer.default_local_dir={tmp_path}/run: the disk is full (File too large)"
    assert said == f"error: {problem}: make room there, or name another folder.\n"


def test_settings_that_are_refused_leave_no_folder(tiny_model, tmp_path, capsys):
    folder = tmp_path / "new/run"
    assert "reward.in_process=false" in refusal(
        capsys, *short_run(tiny_model, folder, "reward.in_process=true", "reward.max_rpm=60")
    )
    assert not folder.parent.exists()


def test_another_model_does_not_take_over_the_weights_in_a_folder(tiny_model, tmp_path, capsys):
    main.run(compose(*short_run(tiny_model, tmp_path / "run", *TWO_STEPS)))
    other = shutil.copytree(tiny_model, tmp_path / "other")
    before = tree_of(tmp_path / "run")
    said = refusal(capsys, *short_run(other, tmp_path / "run", *TWO_STEPS))
    assert f"actor_rollout_ref.model.path={other}: " in said and str(tiny_model) in said
    assert {**tree_of(tmp_path / "run"), ".": 0, "run.lock": 0} == {**before, ".": 0, "run.lock": 0}
    named = "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/run/global_step_2"
    fork = short_run(other, tmp_path / "fork", *TWO_STEPS, *named, "trainer.total_training_steps=3")
    assert "actor_rollout_ref.model.lora_rank=2: " in refusal(capsys, *fork, "actor_rollout_ref.model.lora_rank=2")
    main.run(compose(*fork))
    assert list(learning_metrics(tmp_path / "fork")) == [2, 3]


def test_a_model_is_known_by_its_place_however_it_is_named(tiny_model, tmp_path, capsys, monkeypatch):
    for folder in ("here", "there"):
        shutil.copytree(tiny_model, tmp_path / folder / "model")
    monkeypatch.chdir(tmp_path / "here")
    main.run(compose(*short_run("model", tmp_path / "run", *TWO_STEPS)))
    monkeypatch.chdir(tmp_path / "there")
    said = refusal(capsys, *short_run("model", tmp_path / "run", *TWO_STEPS))
    assert f"{tmp_path}/there/model: " in said and f"of another model, {tmp_path}/here/model" in said
    whole = short_run(tmp_path / "here/model", tmp_path / "run", *TWO_STEPS, "trainer.total_training_steps=3")
    main.run(compose(*whole))
    assert "changed since: actor_rollout_ref.model.path" not in capsys.readouterr().out
    assert list(learning_metrics(tmp_path / "run")) == [0, 1, 2, 3]


@pytest.mark.parametrize("comes", [False, True])
def test_a_run_whose_folder_is_deleted_ends_and_leaves_alone_what_came_there(tiny_model, tmp_path, monkeypatch, comes):
    def step(self, step=RayPPOTrainer.step):
        if self.global_step == 2:
            shutil.rmtree(tmp_path / "run")
            if comes:
                stack.enter_context(sole_run(f"{tmp_path}/other/../run"))
        return step(self)

    (tmp_path / "other").mkdir()
    monkeypatch.setattr(RayPPOTrainer, "step", step)
    with ExitStack() as stack, pytest.raises(FolderLost, match=rf"default_local_dir={tmp_path}/run was deleted or"):
        main.run(compose(*short_run(tiny_model, tmp_path / "run", *TWO_STEPS)))
    assert [path.name for path in tmp_path.rglob("*")] == ["other", *["run", "run.lock"] * comes]


def test_a_run_may_save_after_its_last_step_alone(tiny_model, tmp_path, capsys):
    main.main(["--config-name", "frozenlake", *short_run(tiny_model, tmp_path, *TWO_STEPS, "trainer.save_freq=last")])
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_2"]
    assert "and after the last step a checkpoint of " in capsys.readouterr().out
    assert "save_freq='often' must be a whole number, or last." in refusal(capsys, "trainer.save_freq=often")
    assert "save_freq=None: it cannot be null" in refusal(capsys, "trainer.save_freq=null")


def test_what_cannot_be_resumed_from_is_said_and_refused(tiny_model, tmp_path, monkeypatch, capsys):
    contents = "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"
    command = short_run(tiny_model, tmp_path, *TWO_STEPS, contents)
    monkeypatch.setattr(RayPPOTrainer, "step", signalled(RayPPOTrainer.step, 1, signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        main.run(compose(*command))
    lacking = "saved without model, optimizer, extra"
    assert f"step 1 of 2, which is {lacking}: it cannot be resumed from.\n" in capsys.readouterr().out
    assert f"global_step_1 was {lacking}" in refusal(capsys, *command)


OBJECTS = """
from data.sampler import SequentialSampler
from pathlib import Path

class Remembering(SequentialSampler):
    def state_dict(self):
        return {"folder": Path("a")}

    def load_state_dict(self, state):
        assert state == self.state_dict()
"""


def test_objects_in_a_checkpoint_are_read_by_who_trusts_it(tiny_model, tmp_path, capsys):
    (tmp_path / "objects.py").write_text(OBJECTS)
    keys = [f"data.sampler.class_path={tmp_path}/objects.py", "data.sampler.class_name=Remembering"]
    command = short_run(tiny_model, tmp_path / "run", *TWO_STEPS, *keys)
    main.run(compose(*command, "trainer.trust_checkpoint=true"))
    with pytest.raises(ValueError, match=r"data.pt holds Python objects \(pathlib.*trainer.trust_checkpoint=true"):
        main.run(compose(*command, "trainer.total_training_steps=3"))
    main.run(compose(*command, "trainer.total_training_steps=3", "trainer.trust_checkpoint=true"))
    assert list(learning_metrics(tmp_path / "run")) == [0, 1, 2, 3]
