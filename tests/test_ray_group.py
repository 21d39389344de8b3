"""A worker's place changes no number; what fails there is reported here; what is taken is given back."""

import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any
from unittest import mock

import pytest
import ray
import torch
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table, remove_placement_group

from configs import process
from configs.errors import ConfigError, MayPass
from configs.schema import Config
from data.seeding import derive_seed, forked_rng
from main import run
from tests.forked import python_command
from tests.on_workers import Echo, EchoWorker, InspectedWorker, weight_sum
from tests.runs import assert_two_at_once_do_not_meet, compose, learning_metrics, short_run
from training.model_shards import Shards
from workers import ray_group, resources
from workers.collectives import connect, open_store
from workers.deadlines import Beat, Wait
from workers.group import LocalGroup, distinct_groups
from workers.models import gpu_trouble
from workers.ray_group import (
    RayPending,
    RayWorkerGroup,
    WorkerError,
    WorkerLost,
    check_machine,
    remote_class,
    start_pools,
    worker_environment,
)
from workers.resources import Resources, joins_cluster, lacking, reserve, resources_line

# A file as a user writes one: greedy in training, and a random number drawn without a generator of its own.
MY_ROLLOUT = """
import torch

from workers.hf_rollout import HFRollout

class MyRollout(HFRollout):
    def generate_sequences(self, *args):
        data = super().generate_sequences(*args)
        data.batch["rollout_log_probs"] += torch.rand(1)
        data.non_tensor_batch["end_reason"][:] = "mine"
        return data
"""

# An estimator as in a textbook, and a loss as verl's users write them.
MY_ALGORITHM = """
import torch

from training.core_algos import register_adv_est, register_policy_loss


@register_adv_est("textbook_gae")
def textbook_gae(rewards, values, dones, gamma, gae_lambda):
    advantages, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
        alive = 1 - dones[:, t]
        running = rewards[:, t] + gamma * following * alive - values[:, t] + gamma * gae_lambda * alive * running
        advantages[:, t] = running
    return advantages, advantages + values


@register_policy_loss("plain_ratio")
def plain_ratio(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode, config=None, scale=1.0):
    ratio = (log_probs - old_log_probs).exp()
    tokens = config.global_batch_info["batch_num_tokens"]
    loss = -scale * (advantages * ratio * response_mask).sum() / tokens
    return loss, {"own/ratio": ((ratio * response_mask).sum() / response_mask.sum()).item(), "own/scale": scale}
"""

# Rows that carry an object of a class of the user's, which the worker has to be able to unpickle.
MY_DATASET = """
from dataclasses import dataclass
from custom.env_dataset import CustomEnvDataset

@dataclass
class Note:
    text: str

class MyDataset(CustomEnvDataset):
    def __getitem__(self, position):
        return super().__getitem__(position) | {"note": Note(f"row {position}")}
"""

MY_LOSS = """
from training.core_algos import get_policy_loss_fn, register_policy_loss

@register_policy_loss("fails_for_test")
def fails(old_log_probs, log_probs, advantages, response_mask, loss_agg_mode, config=None):
    factors = {}
    return log_probs.sum() * factors["missing"], {}
"""


def full_run(tiny_model: Path, folder: Path, *more: str) -> Config:
    """Composes 5 steps with every role (actor, rollout, reference and critic) and 2 updates a step."""
    return compose(
        *short_run(tiny_model, folder),
        "trainer.total_training_steps=5",
        "trainer.test_freq=5",
        "trainer.n_threads=1",
        "algorithm.adv_estimator=gae",
        "data.max_response_length=3",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.shuffle=true",
        *more,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("restored_registries")
def test_ray_and_this_process_give_the_same_numbers(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Metrics and weights agree bit by bit with an engine, a dataset, an estimator and a loss of the user's; the Ray
    that `run` started ends with it."""
    forks = {"runtime_env": {"py_executable": python_command()}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(forks))  # its workers have their imports done
    for name, text in {"rollout": MY_ROLLOUT, "dataset": MY_DATASET, "algorithm": MY_ALGORITHM}.items():
        (tmp_path / f"my_{name}.py").write_text(text)
    options = [
        f"actor_rollout_ref.rollout.name={tmp_path}/my_rollout.py",
        f"data.custom_cls.path={tmp_path}/my_dataset.py",
        "data.custom_cls.name=MyDataset",
        f"actor_rollout_ref.model.external_lib={tmp_path}/my_algorithm.py",
        "algorithm.adv_estimator=textbook_gae",
        "actor_rollout_ref.actor.policy_loss.loss_mode=plain_ratio",
        "actor_rollout_ref.actor.policy_loss.kwargs={scale: 2.0}",
        *("trainer.save_freq=3", "trainer.total_training_steps=3", "trainer.test_freq=3"),
    ]
    for executor in ("local", "ray"):
        assert not ray.is_initialized()
        run(full_run(tiny_model, tmp_path / executor, f"trainer.executor={executor}", *options))
    assert not ray.is_initialized()
    local, remote = (learning_metrics(tmp_path / executor) for executor in ("local", "ray"))
    assert local == remote
    assert sorted(local) == [0, 1, 2, 3]
    assert local[3]["actor/grad_norm"] != local[1]["actor/grad_norm"]
    assert local[3]["own/scale"] == 2.0 and local[3]["own/ratio"] != 1.0
    assert "critic/vf_loss" in local[3], "the estimator asks for values, so there is a critic"
    for role in ("actor", "critic"):
        one, other = (
            Shards(tmp_path / executor / "global_step_3" / role / "model").read_all() for executor in ("local", "ray")
        )
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each run has a Ray, two workers, a store and gloo of its own, and learns what it learns alone."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"py_executable": python_command()}}))

    short = ["trainer.n_workers_per_node=2", "actor_rollout_ref.actor.strategy=replicas", "trainer.n_threads=1"]
    short += ["trainer.total_training_steps=2", "env.val_episodes=0"]
    assert_two_at_once_do_not_meet(
        tmp_path, lambda folder, seed: short_run(tiny_model, folder, *short, f"trainer.seed={seed}")
    )


@pytest.mark.slow
def test_two_workers_learn_what_one_learns(cluster: None, tiny_model: Path, reward_model: Path, tmp_path: Path):
    """All metrics agree to rounding, with three mini-batches a step, the last of them smaller, and a reward model
    beside the environment. Both workers hold the same weights to the last bit, and one goes on from the checkpoint that
    both write while they train."""
    options = ["data.train_batch_size=5", "trainer.save_freq=3", "actor_rollout_ref.actor.optim.lr=1e-3"]
    options += ["reward_model.enable=true", f"reward_model.model.path={reward_model}"]
    options += ["reward.reward_model.function_weight=1"]
    folders = {name: tmp_path / name for name in ("one", "two", "resumed")}
    run(full_run(tiny_model, folders["one"], *options))
    background = "actor_rollout_ref.actor.checkpoint.async_save=true"
    two = full_run(tiny_model, folders["two"], *options, background, "trainer.n_workers_per_node=2")
    run(two)
    saved = folders["two"] / "global_step_3"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"]
    run(full_run(tiny_model, folders["resumed"], *options, *resume))
    one, other, resumed = (learning_metrics(folder) for folder in folders.values())
    assert sorted(one) == sorted(other) == [0, 1, 2, 3, 4, 5]
    assert sorted(resumed) == [3, 4, 5]
    for step in range(1, 6):
        assert other[step] == pytest.approx(one[step], rel=2e-3, abs=1e-5), step
        assert resumed.get(step, one[step]) == pytest.approx(one[step], rel=2e-3, abs=1e-5), step

    group = RayWorkerGroup(Resources.from_config(two.trainer), InspectedWorker, two, 5, ["actor"])
    try:
        group.submit("actor", "load", [(saved / "actor",)] * 2).result()
        saved_sum = weight_sum(Shards(saved / "actor/model").read_all())
        assert group.submit("inspector", "weight_sum", [()] * 2).result() == [saved_sum] * 2
    finally:
        group.close()


@pytest.mark.slow
def test_a_worker_that_fails_is_named_though_another_waits_for_it(cluster: None):
    group = RayWorkerGroup(Resources(workers=2, threads=1, gpus=0), EchoWorker, seed=7)
    try:
        first = group.submit("echo", "hear", [("a",), ("b",)])
        second = group.submit("echo", "hear", [("c",), ("d",)])  # before the first is asked for its results
        assert second.result() == [["a", "c"], ["b", "d"]] and first.result() == [["a"], ["b"]]
        with pytest.raises(AssertionError, match="1 shares for 2 workers: each gets one, if need be without rows"):
            group.submit("echo", "hear", [("alone",)])
        assert group.submit("echo", "gathered_ranks", [()] * 2).result() == [[0, 1], [0, 1]]
        drawn = []
        for rank in range(2):
            with forked_rng(derive_seed(7, "process", rank)):
                drawn.append(Echo().draw())
        assert group.submit("echo", "draw", [()] * 2).result() == drawn and not {*drawn[0]} & {*drawn[1]}
        with pytest.raises(WorkerLost, match=r"(?s)worker rank 1 failed.*only the second"):  # which may pass
            group.submit("echo", "fail_on_the_second", [()] * 2).result()
        # The first, in the midst of a message, fails at once; that the second is gone is noticed later, and is why.
        with pytest.raises(WorkerError, match=r"worker rank 1 \(pid \d+.*\) died in .* Its log is there, under [^ ]*$"):
            group.submit("echo", "die_on_the_second", [()] * 2).result()
    finally:
        group.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_stopped_is_named_and_a_slow_verb_has_more_time(cluster, workers, capfd, monkeypatch):
    monkeypatch.setattr("workers.deadlines.NOTICE_SECONDS", 0.2)
    monkeypatch.setattr("workers.deadlines.longest", {})
    made = RayWorkerGroup(Resources(workers, threads=1, gpus=0), EchoWorker)
    capfd.readouterr()
    try:
        pid = made.processes[-1][0]
        os.kill(pid, signal.SIGSTOP)
        Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
        made.submit("echo", "hear", [("a",)] * workers).result()
        made.submit("echo", "hear", [("a",)] * workers).result()
        made.submit("echo", "sleep", [(0.3,)] * workers).result()
        made.submit("echo", "sleep", [(0.5,)] * workers).result()
    finally:
        made.close()
    told = re.findall("notice: (.*)", capfd.readouterr().err)
    stopped = [f"echo.hear has not come back for {{}} s from rank {workers - 1} (pid {pid}, stopped)."]
    assert [re.sub(r"for \d+", "for {}", line) for line in told[:3]] == 3 * stopped, told
    assert len(told) == 4 and told[3].startswith("echo.sleep"), "0.5 s is less than twice what it took before"


@pytest.mark.slow
def test_a_worker_that_gets_no_further_ends_the_run_and_one_that_is_slow_does_not(cluster: None, monkeypatch):
    """A sleeping worker's stack names the line; of two groups that wait for each other, the stopped one is named first,
    and as such."""
    monkeypatch.setattr("workers.deadlines.UNSURE_SECONDS", 3.0)
    ends = [RayWorkerGroup(Resources(1, threads=1, gpus=0), EchoWorker, stall_timeout=6.0) for _ in range(2)]
    try:
        assert ends[0].submit("echo", "sleep_in_pieces", [(8.0, 8)]).result() == ["done"]
        limit = "echo.sleep gets no further for trainer.stall_timeout=6 s, by rank 0"
        stuck = rf"(?s){limit} \(pid \d+, sleeping; without progress .*time\.sleep\(seconds\)"
        waits = ends[0].submit("echo", "sleep", [(30.0,)])
        with pytest.raises(WorkerError, match=stuck) as failure:
            waits.result()
        assert isinstance(failure.value, MayPass) and "in sleep\n" in str(failure.value), "which may be started again"
        os.kill(pid := ends[1].processes[0][0], signal.SIGSTOP)
        silent = ends[1].submit("echo", "draw", [()])
        words = rf"by rank 0 in echo.draw \(pid {pid}, stopped; .*\), rank 0 in echo.sleep \(.* without progress"
        with pytest.raises(WorkerError, match=words):
            RayPending(waits.calls + silent.calls, waits.wait.beside(silent.wait)).result()
    finally:
        for end in ends:
            end.close()


def test_what_others_wait_for_may_be_slow_but_not_silent():
    heard = {0: [Beat(number, 7, "f") for number in range(9)], 1: [Beat(number, number, "") for number in range(9)]}
    wait = Wait("actor.update", [(os.getpid(), "elsewhere")] * 3, lambda rank: heard.get(rank, [None] * 9).pop(), 20.0)
    for rank in heard:
        heard[rank].reverse()
    wait.late = [0, 1]
    for _ in range(7):
        wait._look(5.0)
    wait.check()  # the second gets on
    assert re.search(
        r"rank 0 \(pid \d+ on elsewhere; without progress for 30 s\), rank 1 \([^;]*\)\.\n.*\nf$", str(wait)
    )
    wait.late = [0]
    with pytest.raises(WorkerError, match=r"actor.update gets no further for trainer.stall_timeout=20 s, by rank 0"):
        wait.check()
    wait.late = [1, 2]
    wait._look(25.0)
    with pytest.raises(WorkerError, match=r"rank 2 .*says nothing for 25 s: stopped, swapped out, or"):
        wait.check()
    wait.late = [0, 2]
    assert "is here" not in str(wait), "the first may wait for the silent one"
    wait.processes = wait.processes[:2]
    assert "rank 2 (has not started yet" in str(wait), "a process that still imports is no machine that is gone"


def test_a_worker_in_this_process_that_hangs_is_named_too(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("workers.deadlines.NOTICE_SECONDS", 0.1)
    monkeypatch.setattr("workers.deadlines.UNSURE_SECONDS", 0.1)
    monkeypatch.setattr("workers.deadlines.longest", {})
    LocalGroup(1, EchoWorker).submit("echo", "sleep", [(1.5,)])
    printed = capsys.readouterr().err
    assert re.search(rf"echo.sleep has .* from rank 0 \(pid {os.getpid()}, \w+\)", printed)
    assert re.search(
        r"(?s)without progress for \d s\)\.\nRank 0 is here:\n.*MainThread:.*, in sleep\n *time.sleep", printed
    )


def test_the_store_of_one_machine_is_not_heard_of_elsewhere():
    store, others = open_store("127.0.0.1", 2), ray.util.get_node_ip_address()
    assert connect("127.0.0.1", store.port, 2).host == "127.0.0.1"
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2" if others.startswith("127.") else others, store.port), 5)


@pytest.mark.parametrize(
    ("variable", "written", "message"),
    [
        ("127.0.0.1:1", None, "RAY_ADDRESS: no Ray cluster answers at 127.0.0.1:1 .*refused"),
        ("nonsense", None, "RAY_ADDRESS: no Ray cluster answers at nonsense"),
        (None, "127.0.0.1:1", rf"ray_current_cluster, of user {os.getuid()}: no Ray cluster"),
        ("local", "127.0.0.1:1", None),
        (None, None, None),
    ],
)
def test_only_the_cluster_that_is_named_is_joined(variable, written, message, tmp_path: Path, monkeypatch):
    """A run joins the Ray cluster that is named, and no other that runs on this machine."""
    (tmp_path / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    if written:
        (tmp_path / "ray/ray_current_cluster").write_text(written)
    if message is None:
        assert not joins_cluster() and not ray.is_initialized()
    else:
        with pytest.raises(ConfigError, match=message):
            joins_cluster()


@pytest.mark.parametrize("answer", [b"HTTP/1.0 505 no", b""])
def test_a_server_that_is_no_ray_is_named_before_ray_waits_for_it(answer: bytes, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        port = server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(100)
                connection.sendall(answer)

        pool.submit(serve)
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at 127.0.0.1:{port} .*another kind"):
            joins_cluster()


def test_torchrun_is_told_that_the_run_starts_its_workers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_machine(compose())  # as an operator of pods sets it
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match=r"torchrun starts 2 of this command.*n_workers_per_node=2"):
        check_machine(compose())


@pytest.mark.slow
def test_a_ray_worker_is_closed_and_what_that_raises_is_a_warning(cluster: None, tmp_path: Path, caplog: Any):
    RayWorkerGroup(Resources(workers=1, threads=1, gpus=0), EchoWorker, tmp_path).close()
    assert (tmp_path / "closed").exists() and "a worker could not be closed" in caplog.text


def test_what_fails_in_a_ray_worker_ends_with_the_users_line(cluster: None, tiny_model: Path, tmp_path: Path):
    """A failed group gives its CPUs back: each one here asks for both of the cluster's two."""
    file = tmp_path / "my_loss.py"
    file.write_text(MY_LOSS)
    options = ["trainer.executor=ray", "trainer.n_threads=2", f"actor_rollout_ref.model.external_lib={file}"]
    config = full_run(tiny_model, tmp_path, *options, "actor_rollout_ref.actor.policy_loss.loss_mode=fails_for_test")
    with pytest.raises(WorkerError, match="worker rank 0 failed") as failure:
        run(config)
    last_lines = str(failure.value).splitlines()[-5:]
    assert f'  File "{file}", line 7, in fails' in last_lines
    assert last_lines[-1] == "KeyError: 'missing'"
    assert "\x1b" not in str(failure.value)
    assert not isinstance(failure.value, MayPass), "another start would not mend the user's code"

    # A second group needs what the first had; it fails while it is built.
    missing = full_run(
        tiny_model, tmp_path, "trainer.executor=ray", "trainer.n_threads=2", "critic.model.path=/nowhere"
    )
    with pytest.raises(WorkerError, match=r"critic\.model\.path=/nowhere"):
        start_pools(missing, total_steps=5, roles=["actor", "rollout", "critic"])

    # What the second had is free again: this waits for it, and then gives up.
    remove_placement_group(reserve(Resources(workers=1, threads=2, gpus=0)))
    assert ray.is_initialized(), "it was the caller who started Ray"


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        ([{"CPU": 9.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}], []),
        ([{"CPU": 8.0, "GPU": 4.0}], []),  # room for both: neighbours are together all the same
        ([{"CPU": 3.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0}], ["CPU"]),
        ([{"CPU": 4.0, "GPU": 3.0}, {"CPU": 4.0, "GPU": 1.0}], ["GPU"]),  # enough in all, but not where it has to be
        ([{"CPU": 8.0}], ["GPU"]),
    ],
)
def test_each_machine_has_to_hold_its_workers(present: list[dict[str, float]], missing: list[str]):
    assert lacking([Resources(workers=4, threads=2, gpus=1, nodes=2)], present, on_ray=True) == missing


def test_pools_are_added_up():
    both = Resources(workers=2, threads=1, gpus=1), Resources(workers=2, threads=3, gpus=0)
    machines = [{"CPU": 6.0}, {"CPU": 2.0, "GPU": 2.0}]
    assert not lacking(both, machines, on_ray=True)
    assert lacking([*both, both[1]], machines, on_ray=True) == ["CPU"]
    assert not lacking([*both, both[1]], machines, on_ray=False), "who does not reserve cores may share them"


def test_a_run_that_was_started_again_waits_for_a_machine(monkeypatch: pytest.MonkeyPatch, capsys):
    cluster, waits = [{"CPU": 2.0}], iter([False, True, True])
    placement = mock.Mock(wait=lambda _: cluster.append({"CPU": 2.0}) or next(waits))
    monkeypatch.setattr(resources, "joins_cluster", lambda: True)
    monkeypatch.setattr(resources, "machines", lambda: cluster)
    monkeypatch.setattr(ray.util, "placement_group", lambda *_, **__: placement)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: mock.Mock(gcs_address="10.0.0.1:6379"))
    asked = Resources(workers=6, threads=1, gpus=0, nodes=3, threads_from="a test")
    line = (
        r"asked: 6 workers × \(1 thread \(a test\), no GPU\) on 3 machines, Ray actors · there: Ray at 10.0.0.1:6379, "
    )
    with pytest.raises(ConfigError, match=line + r"1 machine × \(✗ 2 CPU, 0 GPU\), free: 1 CPU, 0 GPU; .*nnodes"):
        reserve(asked)
    assert reserve(replace(asked, patience=120.0)) is placement
    [told] = capsys.readouterr().err.splitlines()
    cluster[:] = [{"CPU": 4.0}]  # and the one that joins below
    assert reserve(Resources(3, threads=1, gpus=0, nodes=3)) is placement
    assert "workers of 3 machines run on 2: no more have joined Ray" in capsys.readouterr().err
    assert re.search(line + r"2 machines × \(✗ 2 CPU, 0 GPU\).*: not there, or not free, for 60 s", told)


def test_a_folder_that_one_machine_alone_sees_is_refused_by_its_address(tmp_path: Path, monkeypatch):
    hosts = [{"NodeID": f"id{number}", "NodeManagerAddress": f"10.0.0.{number}"} for number in (1, 2)]
    bundles = {"bundles_to_node_id": {0: "id1", 1: "id2"}}
    monkeypatch.setattr(ray, "nodes", lambda: hosts)
    monkeypatch.setattr(ray.util, "placement_group_table", lambda placement: bundles)
    monkeypatch.setattr(ray, "remote", lambda **_: mock.Mock())
    monkeypatch.setattr(ray_group, "bundle_of", mock.Mock())
    RayWorkerGroup._check_is_shared(mock.Mock(_wait=lambda *_: [True, True]), tmp_path, "a placement")
    with pytest.raises(ConfigError, match=rf"default_local_dir: \['10.0.0.2'\] do not see {tmp_path}: name a shared"):
        RayWorkerGroup._check_is_shared(mock.Mock(_wait=lambda *_: [True, False]), tmp_path, "a placement")
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_neighbours_in_rank_are_on_one_machine():
    """Two machines of four cores, either of which would hold all four workers, get two each, in order."""
    machines = Cluster(head_node_args={"num_cpus": 4}, initialize_head=True)
    machines.add_node(num_cpus=4)
    ray.init(address=machines.address)
    try:
        asked = Resources(workers=4, threads=1, gpus=0, nodes=2)
        placement = reserve(asked)
        nodes = placement_group_table(placement)["bundles_to_node_id"]
        classes = [remote_class(asked, placement, rank) for rank in range(4)]
        bundles = [made._default_options["scheduling_strategy"].placement_group_bundle_index for made in classes]
        assert bundles == [0, 0, 1, 1] and len(set(nodes.values())) == 2
    finally:
        ray.shutdown()
        machines.shutdown()


def test_a_worker_sees_its_own_gpu_alone_where_ray_is_told_to_show_all(monkeypatch: pytest.MonkeyPatch):
    """Users of verl have Ray show all GPUs; a worker computes on the first one that it sees."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for name, value in worker_environment(1).items():
        monkeypatch.setenv(name, value)
    NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


@pytest.mark.slow
def test_a_running_cluster_is_asked_for_gpus_that_are_not_here(cluster: None):
    assert "there: Ray at " in resources_line([Resources(workers=1, threads=1, gpus=0)], on_ray=True)
    with pytest.raises(ConfigError, match=r"asked: 64 workers .* there: Ray at .* × \(✗ 2 CPU, ✗ 0 GPU\)"):
        resources_line([Resources(workers=64, threads=1, gpus=1)], on_ray=True)
    with pytest.raises(ConfigError, match=r"there: 1 machine × \(\d+ CPU, ✗ \d+ GPU\)"):
        resources_line([Resources(workers=64, threads=1, gpus=1)], on_ray=False)


@pytest.mark.parametrize(
    ("files", "cuda", "visible", "said"),
    [
        (["nvidia0", "nvidiactl"], None, None, r"nvidia0\), but torch \S+ is a build without CUDA"),
        (["nvidia-smi"], None, None, r"driver is here \(\S+nvidia-smi\), but torch \S+ is a build without CUDA"),  # WSL
        (["nvidia-smi"], "13.0", None, None),  # where jobs are submitted, say
        (["mps"], None, None, r"A Mac's GPU \(mps\) is not used"),
        (["mps"], None, "", None),
        (["nvidia0"], "13.0", "0", r"cannot use it: The NVIDIA driver .* too old .* needs a driver for CUDA 13\.0"),
        (["nvidia0"], "13.0", "", None),  # hidden on purpose
        (["nvidiactl"], "13.0", None, None),  # a driver without a device
    ],
)
def test_a_gpu_that_torch_cannot_use_is_named(files, cuda, visible, said, tmp_path: Path, monkeypatch, capsys):
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nMore.")

    for name in files:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for target, name, value in (
        (torch.version, "cuda", cuda), (torch.cuda, "is_available", lambda: False), (torch.cuda, "init", init),
        (torch.backends.mps, "is_available", lambda: "mps" in files),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpu_trouble(tmp_path)
    assert (found is None) if said is None else re.search(said, found)
    for module in (ray_group, resources):
        monkeypatch.setattr(module, "gpu_trouble", lambda: found)
    check_machine(compose())
    shown = capsys.readouterr().err
    assert shown == "" if said is None else "This run uses the CPU; trainer.n_gpus_per_node=0 says" in shown
    check_machine(compose("trainer.n_gpus_per_node=0"))
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match=r"asked: 2 workers .*, 1 GPU.* ✗ 0 GPU") as refused:
        resources_line([Resources(workers=2, threads=1, gpus=1)], on_ray=False)
    assert said is None or found in str(refused.value)


def test_an_amd_gpu_is_used_and_said_to_be_untried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_machine(compose())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    check_machine(compose("trainer.n_gpus_per_node=0"))
    assert capsys.readouterr().err == ""
    check_machine(compose())
    assert "The GPU is AMD's (ROCm), on which nothing was tried" in capsys.readouterr().err


def test_the_driver_of_a_ray_run_leaves_cuda_alone(monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path):
    """No part of main.py makes a context before its workers start: that would take some of the first worker's GPU."""

    def refuse(*_: Any) -> None:
        raise AssertionError("CUDA is initialised in the driver")

    class Started(Exception):
        """Ends the run where its workers would start."""

    def start(*_: Any, **__: Any) -> None:
        raise Started

    for name in ("_lazy_init", "init", "get_device_properties", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(ray_group, "RayWorkerGroup", start)
    with pytest.raises(Started):
        run(full_run(tiny_model, tmp_path, "trainer.executor=ray", "trainer.n_gpus_per_node=1"))


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        (("build", "a traceback", ConfigError("it does not fit")), ConfigError, "^it does not fit$"),
        (
            ("update", "Timed out waiting 600000ms for recv", RuntimeError()),
            WorkerError,
            r"(?s)rank 0 failed:.*actor_rollout_ref\.nccl_timeout .* rank 1, rank 2",
        ),
    ],
)
def test_a_workers_refusal_is_its_own_line_and_a_wait_in_vain_names_the_ranks(failure, error, said, monkeypatch):
    monkeypatch.setattr(ray, "wait", lambda calls, **_: (calls[:1], calls[1:]))
    monkeypatch.setattr(ray, "get", mock.Mock(side_effect=ray.exceptions.RayTaskError(*failure)))
    with pytest.raises(error, match=said):
        RayPending(["one", "other", "third"], Wait("update", [], lambda _: None)).result()


def test_an_error_in_this_process_is_the_users_own(tiny_model: Path, tmp_path: Path):
    group = LocalGroup(1, EchoWorker)
    assert group.submit("echo", "hear", [("a",)]).result() == [["a"]]
    with pytest.raises(KeyError, match="missing"):
        group.submit("echo", "fail", [()])


def test_the_worker_leaves_the_callers_random_numbers_alone(tiny_model: Path, tmp_path: Path):
    """A user's dataset or reward draws the same random numbers in this process and behind Ray."""
    torch.manual_seed(0)
    expected_draw = torch.rand(3)
    torch.manual_seed(0)
    pools = start_pools(full_run(tiny_model, tmp_path), total_steps=5, roles=["actor", "rollout", "ref", "critic"])
    assert [*pools] == ["actor", "rollout", "ref", "critic"] and len(distinct_groups(pools)) == 1
    [group] = distinct_groups(pools)
    assert group.worker.roles.keys() == pools.keys()
    assert torch.equal(torch.rand(3), expected_draw)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["trainer.n_gpus_per_node=0"], Resources(1, 8, 0)),
        (["trainer.n_gpus_per_node=0", "trainer.n_workers_per_node=3"], Resources(3, 2, 0)),  # they share the cores
        (["trainer.n_gpus_per_node=4", "trainer.nnodes=2"], Resources(8, 2, 1, 2)),
        (["trainer.n_gpus_per_node=4", "trainer.n_workers_per_node=2", "trainer.n_threads=5"], Resources(4, 5, 1)),
    ],
)
def test_workers_threads_and_gpus(monkeypatch: pytest.MonkeyPatch, settings: list[str], wanted: Resources):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(process, "available_cores", lambda: (8, "the machine's cores"))
    assert Resources.from_config(compose(*settings).trainer) == wanted
