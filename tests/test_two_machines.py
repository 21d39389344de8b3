"""Runs on two machines, by namespaces: as on one, and what is said of a dead cable."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from configs.errors import TEMPORARY
from tests.forked import Run
from tests.machines import ADDRESSES, Machines, refusal
from tests.runs import learning_metrics, short_run, state_files

HEALTH = {"period_ms": "1000", "timeout_ms": "3000", "failure_threshold": "3"}  # so that Ray gives a machine up in 15 s
DEADLINE = 60  # seconds, more than a start takes


@pytest.mark.slow
def test_two_machines_train_as_one_and_a_dead_cable_ends_the_run(tiny_model: Path, tmp_path: Path):
    """A folder that one machine alone sees is refused. Then five steps with two shards: two before the cable is pulled
    in an update, and the run goes on to the end."""
    if reason := refusal():
        pytest.skip(reason)
    more = ["trainer.executor=ray", "trainer.n_threads=1", "trainer.total_training_steps=5", "trainer.save_freq=1"]
    more += ["trainer.val_before_train=false", f"trainer.stall_timeout={DEADLINE}"]
    words = "main.py", "--config-name=frozenlake"
    one, two = tmp_path / "one", tmp_path / "two"
    here = short_run(tiny_model, one, *more, "trainer.n_workers_per_node=2")
    alone = Run(*words, *here, env={**os.environ, "RAY_ADDRESS": "local"})
    with Machines(tmp_path / "machines", **{f"RAY_health_check_{key}": value for key, value in HEALTH.items()}) as both:
        both.make_cluster()
        apart = tmp_path / "apart"
        apart.mkdir()
        both.start(2, "mount", "-t", "tmpfs", "none", apart).succeed()
        refused = both.start(1, sys.executable, *words, *short_run(tiny_model, apart, *more, "trainer.nnodes=2"))
        assert refused.wait() == 2 and f"default_local_dir: ['{ADDRESSES[1]}'] do not see {apart}" in refused.said()
        settings = short_run(tiny_model, two, *more, "trainer.nnodes=2", both.pull_in("actor.update_policy", two, 2))
        run = both.start(1, sys.executable, *words, *settings)
        run.until(lambda: not both.asked.exists())
        pulled = time.monotonic()
        run.until(lambda: "\nerror: " in run.said())
        assert time.monotonic() - pulled < DEADLINE + 10
        assert run.wait() == TEMPORARY and "Traceback" not in run.said()
        [line] = [line for line in run.said().splitlines() if line.startswith("error: ")]
        assert "actor.update_policy" in line and f" on {ADDRESSES[1]}" in line
        assert json.loads((two / "run.json").read_text())["starts"][-1]["ending"] == "failed"
        both.lay()
        both.join()
        both.start(1, sys.executable, *words, *settings).succeed()
    assert alone.wait(300).returncode == 0
    assert learning_metrics(one) == learning_metrics(two) and len(learning_metrics(one)) == 5
    assert any(metrics["actor/grad_norm"] > 0 for metrics in learning_metrics(one).values())
    assert state_files(one, 5) == state_files(two, 5)
