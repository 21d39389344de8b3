"""The files of examples/launch are what their programs read, and do what docs/cluster.md says of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import Config
from tests.runs import ROOT, short_run

LAUNCH = ROOT / "examples/launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
SKYPILOT = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
KUBERAY = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
CLUSTER = KUBERAY["spec"]["rayClusterSpec"]
# Stands for the programs of a cluster: writes down how it was called, and the variables of Ray that it would find.
RECORDER = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
seen = {{key: value for key, value in os.environ.items() if key.startswith("RAY_")}}
with open("{calls}", "a") as file:
    print(json.dumps([name, sys.argv[1:], seen]), file=file)
"""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that is searched first, from a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("RAY_", "SLURM_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def stub(folder: Path, name: str, text: str = "") -> None:
    """Puts a program in the folder: of bash's lines, or one that records its calls in calls.jsonl."""
    recorder = RECORDER.format(python=sys.executable, calls=folder / "calls.jsonl")
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}" if text else recorder)
    (folder / name).chmod(0o755)


def calls_of(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def overrides_of(command: str, **variables: str) -> list[str]:
    """The arguments of `python main.py` in a text of shell."""
    for name, value in variables.items():
        command = command.replace(f"${name}", value)
    words = command.replace("\\\n", " ").replace('"', "").split()
    return words[words.index("main.py") + 1 :]


def composed(arguments: list[str]) -> Config:
    """Returns the settings that a command's arguments make; raises for what the command refuses."""
    name = arguments[arguments.index("--config-name") + 1]
    overrides = [argument for argument in arguments if "=" in argument]
    return load_config(Arguments(name, CONFIG_DIR, overrides, print_config=False), Config)


def program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return found or pytest.skip(f"{name} is not installed: make setup")


@pytest.mark.parametrize(
    "script", [*SCRIPTS, SKYPILOT["setup"], SKYPILOT["run"]], ids=lambda it: getattr(it, "name", "")
)
def test_bash_and_shellcheck_find_nothing(script: Path | str):
    text = script.read_text() if isinstance(script, Path) else script
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    # 1091: .venv/bin/activate is not read; 2086: skypilot.yaml's `$start` is meant to be several words
    command = [program("shellcheck"), "--shell=bash", "--exclude=SC1091,SC2086", "-"]
    checked = subprocess.run(command, input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stdout


def test_kuberays_job_is_of_the_machines_that_its_command_asks_for():
    assert (KUBERAY["apiVersion"], KUBERAY["kind"]) == ("ray.io/v1", "RayJob")
    assert f"\nray=={CLUSTER['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    assert CLUSTER["authOptions"] == {"mode": "token"}
    [others] = CLUSTER["workerGroupSpecs"]
    assert others["replicas"] == others["minReplicas"] == others["maxReplicas"]
    trainer = composed(overrides_of(KUBERAY["spec"]["entrypoint"])).trainer
    assert trainer.nnodes == 1 + others["replicas"] and trainer.save_freq > 0
    for group in (CLUSTER["headGroupSpec"], others):
        [container], volumes = (group["template"]["spec"][name] for name in ("containers", "volumes"))
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in volumes} and "/dev/shm" in mounts.values()
        assert trainer.default_local_dir.startswith(mounts["shared"])
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(trainer.n_gpus_per_node)
        assert {6379, 8265} <= {port["containerPort"] for port in container["ports"]}
        assert f"WORKDIR {container['workingDir']}\n" in (LAUNCH / "Dockerfile").read_text()


def test_skypilots_task_is_of_the_machines_that_its_command_asks_for(stubs: Path, monkeypatch: pytest.MonkeyPatch):
    [mount] = SKYPILOT["volumes"]
    given = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", **SKYPILOT["envs"]}
    trainer = composed(overrides_of(SKYPILOT["run"], **given)).trainer
    assert trainer.nnodes == SKYPILOT["num_nodes"] and trainer.save_freq > 0
    assert SKYPILOT["resources"]["accelerators"].endswith(f":{trainer.n_gpus_per_node}")
    assert trainer.default_local_dir.startswith(mount)
    assert "RAY_AUTH_TOKEN" in SKYPILOT["secrets"] and SKYPILOT["envs"]["RAY_AUTH_MODE"] == "token"
    for name in ("ray", "python"):
        stub(stubs, name)
    (stubs.parent / ".venv/bin").mkdir(parents=True)
    (stubs.parent / ".venv/bin/activate").touch()
    for rank in ("1", "0"):
        given |= {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        subprocess.run(["bash", "-c", SKYPILOT["run"]], env={**os.environ, **given}, check=True)
    calls = calls_of(stubs)
    ray = [arguments for name, arguments, _ in calls if name == "ray"]
    assert "--address=10.0.0.1:6379" in ray[0] and all("--block" in arguments for arguments in ray)
    python = [(arguments[:2], seen["RAY_ADDRESS"]) for name, arguments, seen in calls if name == "python"]
    assert {address for _, address in python} == {"10.0.0.1:6379"}
    assert [start for start, _ in python] == [["-m", "extras.cluster"], ["main.py", "--config-name"]]


def test_slurms_machines_make_a_ray_of_the_jobs_own(stubs: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"JOB_ID": "123", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]", "GPUS_ON_NODE": "8"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    stub(stubs, "ray")
    stub(stubs, "mkdir", "exit")
    stub(stubs, "scontrol", "echo n1; echo n2")
    stub(stubs, "srun", 'SLURM_NODEID=0 "${@:4}" && SLURM_NODEID=1 "${@:4}" && touch "$0.done"')
    wait = f'until [ -e "{stubs}/srun.done" ]; do sleep 0.1; done; '
    (stubs / "record").write_text(RECORDER.format(python=sys.executable, calls=stubs / "calls.jsonl"))
    stub(stubs, "python", f'[ "$1" != -c ] || {{ echo 0123; exit; }}; {wait}exec {sys.executable} {stubs}/record "$@"')
    subprocess.run(["bash", LAUNCH / "slurm.sbatch", "trainer.seed=3"], check=True)
    head, other, check, run = calls_of(stubs)
    address = {"ADDRESS": "n1:20123", "AUTH_TOKEN": "0123", "AUTH_MODE": "token", "TMPDIR": "/tmp/ray-123"}
    address = {f"RAY_{name}": value for name, value in address.items()}
    assert all(seen == address for *_, seen in (head, other, check, run))
    assert head[1] == ["start", "--head", "--port=20123", "--block"]
    assert other[1] == ["start", "--address=n1:20123", "--block"]
    assert check[1] == ["-m", "extras.cluster", "--nodes", "2", "--folder", "outputs"]
    assert run[1][:3] == ["main.py", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"] and run[1][-1] == "trainer.seed=3"


def test_before_slurms_time_is_over_the_run_is_saved_and_the_job_queued_again(stubs, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    stub(stubs, "scontrol")
    stub(stubs, "python", f'exec {sys.executable} {ROOT}/"$@"')
    run, long = tmp_path / "run", ["trainer.total_training_steps=100000", "trainer.save_freq=100000"]
    settings = ["--config-name", "frozenlake", *short_run(tiny_model, run, *long)]
    with subprocess.Popen(["bash", LAUNCH / "slurm.sbatch", *settings]) as script:
        while not ((run / "metrics.jsonl").exists() and '"step": 2' in (run / "metrics.jsonl").read_text()):
            assert script.poll() is None
            time.sleep(0.2)
        script.send_signal(signal.SIGUSR1)
        assert script.wait() > 0
    [(_, arguments, _)] = calls_of(stubs)
    assert arguments == ["requeue", "123"]
    saved = int((run / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= 2 and (run / f"global_step_{saved}").is_dir()


def test_machines_join_by_hand_with_a_token(stubs: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(LAUNCH, stubs.parent / "examples/launch")
    monkeypatch.setenv("HOME", str(stubs.parent))
    stub(stubs, "ray")
    script = stubs.parent / "examples/launch/ray.sh"
    for arguments in (["head"], ["join", "10.0.0.1"]):
        subprocess.run(["bash", script, *arguments], check=True)
    commands = ["get-auth-token --generate", "start --head --port=6379", "start --address=10.0.0.1:6379"]
    assert [" ".join(arguments) for _, arguments, _ in calls_of(stubs)] == commands
    assert all(seen == {"RAY_AUTH_MODE": "token"} for *_, seen in calls_of(stubs))
    assert subprocess.run(["bash", script, "join"], stderr=subprocess.DEVNULL).returncode
    assert subprocess.run(["bash", script], stderr=subprocess.DEVNULL).returncode == 2


def test_the_page_names_every_file():
    page = (ROOT / "docs/cluster.md").read_text()
    assert all(f"examples/launch/{file.name}" in page for file in LAUNCH.iterdir() if file.suffix != ".dockerignore")
