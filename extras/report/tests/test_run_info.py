"""run.json and events.jsonl: on what a run ran, how each start ended, and what was said."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from argparse import Namespace
from datetime import datetime
from pathlib import Path

import pytest
import torch

import main
from configs.errors import latest, notice
from extras.report import observer
from extras.report.observer import EventFile, Report, RunFile, git_state, machine
from extras.report.runs import read_run
from extras.report.summary import findings, stages
from tests.forked import python
from tests.runs import compose, files_of_at_most, short_run

AS_A = "-c user.name=a -c user.email=a@b"
CONFIG = compose("actor_rollout_ref.model.path=unused")


def run_in(folder: Path, global_step: int = 0) -> Namespace:
    return Namespace(folder=folder, config=CONFIG, total_steps=9, global_step=global_step)


def endings(folder: Path) -> list[tuple[str | None, str | None, int]]:
    """Lists how each start of a run ended, why, and after which step."""
    starts = json.loads((folder / "run.json").read_text())["starts"]
    return [(start["ending"], start["reason"], start["step"]) for start in starts]


def test_the_last_lines_of_a_run_have_what_its_page_will_say_of_the_whole_run(tmp_path, capsys):
    run, scores = run_in(tmp_path), {"critic/score/min": 0.0, "critic/score/max": 1.0, "val-core/sums/acc/mean@1": 0.0}
    run.tokenizer = None
    report = Report(run)
    report.samples = None
    report.started(0)
    entries = [{"step": step, "data": scores | {"critic/score/mean": step / 4}} for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    report.ended(None)
    [line, _] = capsys.readouterr().out.splitlines()
    [finding] = findings(read_run(tmp_path))
    assert line == f"looks wrong: {finding.text} {finding.remedy}" and "in 4 validations up to step 3" in line


def test_a_start_is_described_with_its_end_and_its_stages_sum_up_to_its_time(tiny_model, tmp_path, capsys):
    main.run(compose(*short_run(tiny_model, tmp_path, "trainer.total_training_steps=3", "env.val_episodes=0")))
    record, output = json.loads((tmp_path / "run.json").read_text()), capsys.readouterr().out
    [start] = record["starts"]
    assert (record["kind"], start["ending"], start["reason"], start["step"]) == ("ppo", "done", None, 3)
    assert start["command"] == sys.orig_argv and start["versions"]["torch"] == torch.__version__
    assert (start["seed"], start["threads"], start["total_steps"]) == (0, torch.get_num_threads(), 3)
    assert start["batch_arithmetic"][0] in output and start["machine"]["host"] == socket.gethostname()
    assert datetime.fromisoformat(start["started"]) < datetime.fromisoformat(start["ended"])
    assert output.endswith(f"python -m extras.report {tmp_path} makes a page of this run, to open in a browser.\n")
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    *named, other = stages(read_run(tmp_path))["seconds"]
    assert sum(map(sum, [*named, other])) == pytest.approx(last["data"]["training/seconds"], abs=0.01)
    assert min(other) >= 0, "timers overlap"


KEYED = """
import os

def compute_score(prompt, response, api_key, more, url, named, password):
    assert {api_key, more["hf_token"], url[10:-5], named, password} == {os.environ["PLANTED"]}
    return float(len(response))
"""


def test_a_key_is_in_no_file_of_a_run(tiny_model, tmp_path):
    """The key comes in six forms, one of them only in the command; settings that name a variable go on naming it."""
    (tmp_path / "score.py").write_text(KEYED)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2", "data_source": "sums"}\n' * 2)
    key, reward, run = "sk-PLANTED", "reward.custom_reward_function", tmp_path / "run"
    given = [
        f"{reward}.reward_kwargs.api_key={key}",
        f"+{reward}.reward_kwargs.more={{hf_token: {key}, x: 1}}",
        f"{reward}.reward_kwargs.url='http://me:{key}@host'",
        f"{reward}.reward_kwargs.named=${{oc.env:PLANTED}}",
        f"{reward}.reward_kwargs.password=${{oc.env:PLANTED}}",
        f"actor_rollout_ref.rollout.engine_kwargs.openai.api_key={key}",
        "actor_rollout_ref.rollout.engine_kwargs.openai.api_key=another",
    ]
    more = [f"data.train_files={tmp_path}/rows.jsonl", f"{reward}.path={tmp_path}/score.py", "trainer.save_freq=1"]
    command = [f"actor_rollout_ref.model.path={tiny_model}", f"trainer.default_local_dir={run}", *more, *given]
    sizes = ["data.train_batch_size=2", "data.max_response_length=2", "trainer.total_training_steps=1"]
    logged = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.logger=[]"]
    done = python("main.py", *command, *sizes, *logged, env=os.environ | {"PLANTED": key})
    assert done.returncode == 0, done.stderr
    assert python("-m", "extras.report", run).returncode == 0
    assert not [path for path in run.rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    for config in (run / "config.yaml", run / "global_step_1/config.yaml"):
        assert config.read_text().count("${oc.env:PLANTED}") == 2
    [start] = json.loads((run / "run.json").read_text())["starts"]
    assert f"+{reward}.reward_kwargs.more={{hf_token: ***, x: 1}}" in start["command"]


def test_a_killed_start_has_its_last_step_and_no_end_and_a_fresh_one_sets_it_aside(tmp_path, monkeypatch):
    for step in (0, 3):
        RunFile(run_in(tmp_path), step)  # and no end
    assert endings(tmp_path) == [(None, None, 0), (None, None, 3)]
    start = RunFile(run_in(tmp_path), 0)
    with files_of_at_most(10):
        start.end(None)
    assert endings(tmp_path) == [(None, None, 0)]  # the disk is full, which ends no run
    assert len(json.loads((tmp_path / "run.json.bak-1").read_text())["starts"]) == 2
    start.stepped(1)  # within INFO_SECONDS of the last
    assert endings(tmp_path) == [(None, None, 0)]
    monkeypatch.setattr(observer, "INFO_SECONDS", 0)
    start.stepped(2)
    assert endings(tmp_path) == [(None, None, 2)]


def test_an_end_names_the_line_of_the_user_or_the_signal(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("\n{}['lost']")
    start = RunFile(run_in(tmp_path), 0)
    with pytest.raises(KeyError) as raised:
        exec(compile(file.read_text(), file, "exec"))
    start.end(raised.value)
    assert endings(tmp_path) == [("failed", f"KeyError: 'lost' ({file}:2)", 0)]
    start.done = 2
    for error, name in ((KeyboardInterrupt(), "Ctrl-C"), (KeyboardInterrupt(signal.SIGTERM), "SIGTERM")):
        start.end(error)
        assert endings(tmp_path) == [("stopped", name, 2)]


def test_notices_and_warnings_are_left_with_their_time_and_step(tmp_path, capsys):
    latest.clear()
    notice("from before the run")
    for resumed_from in (0, 3):
        run = run_in(tmp_path, resumed_from)
        file = EventFile(run, resumed_from)
        run.global_step += 1
        logging.getLogger("training.x").error("</script> \u2028")
        with files_of_at_most(10):
            notice("while the disk is full")
        logging.getLogger("workers.x").warning("a %s", "warning")
        logging.getLogger("workers.x").info("nothing")
        file.close()
        notice("between two starts")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().split("\n")[:-1]]
    assert [(line["step"], line["level"], line["logger"], line["text"]) for line in lines] == [
        (None, "notice", "notice", "from before the run"),
        (1, "error", "training.x", "</script> \u2028"),
        (1, "warning", "workers.x", "a warning"),
        (3, "notice", "notice", "between two starts"),
        (4, "error", "training.x", "</script> \u2028"),
        (4, "warning", "workers.x", "a warning"),
    ]
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    assert capsys.readouterr().err.count("notice: ") == 5


def test_a_commit_is_known_where_there_is_git(tmp_path, monkeypatch):
    assert git_state(tmp_path) == {"commit": None, "dirty": False}
    (tmp_path / "file").touch()
    for name, dirty in (("init -q", False), (f"{AS_A} commit -q --allow-empty -m one", False), ("add file", True)):
        subprocess.run(["git", *name.split()], cwd=tmp_path, check=True)
        assert git_state(tmp_path)["dirty"] == dirty
    assert len(git_state(tmp_path)["commit"]) == 40
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) == {"commit": None, "dirty": False}


def test_a_machine_is_what_its_kernel_and_its_driver_say(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\nmodel name\t: X\n")
    for bus, model in (("0000:4f:00.0", "NVIDIA H100 80GB HBM3"), ("0000:0a:00.0", "NVIDIA A100-SXM4-40GB")):
        file = tmp_path / "driver/nvidia/gpus" / bus / "information"
        file.parent.mkdir(parents=True)
        file.write_text(f"Model: \t\t {model} \nIRQ:   \t\t 123\nGPU UUID: \t GPU-0\nModel Year: 3\n")
    (tmp_path / "driver/nvidia/gpus/lost/information").mkdir(parents=True)
    found = machine(tmp_path)
    assert (found["cpu"], found["gpus"]) == ("AMD EPYC", ["NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"])
    assert found["cores"] >= 1 and 0 < found["memory_gb"] == round(found["memory_gb"], 1)
    assert machine(tmp_path / "none")["gpus"] == []
