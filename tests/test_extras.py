"""Deletes each extra in a copy of the repository: the core must work without it, and name it where a setting asks.

`make extras` deletes all in turn; `make test` two a day, both from one copy. One copy has no extra at all: there the
core alone plays episodes, trains by PPO on two Ray workers, saves and resumes.
"""

import os
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from configs.extras import FOLDER, HEADS, PAIRS, SETTINGS, TABLE
from configs.paths import ROOT
from tests.pages import SECTION, WRITTEN_FILE
from tests.runs import learning_metrics, short_run

pytestmark = pytest.mark.slow
EXTRAS = sorted({path.parent.name for path in FOLDER.glob("*/*.py")})
A_DAY = 2
COPIED = (
    *("configs", "data", "training", "workers", "custom"),
    *("extras", "tests", "scripts", "benchmarks", "examples", "docs"),
)
GOLDEN = "tests/test_golden.py"
CORE_TESTS = {  # of each hook, those that take seconds
    "adapter": ["tests/test_engine.py", "tests/test_actor.py"],
    "engine": ["tests/test_rollout_contract.py"],
    "estimator": ["tests/test_core_algos.py", "tests/test_estimators.py", "tests/test_recipes.py"],
    "forward": ["tests/test_actor.py", "tests/test_critic.py"],
    "parallel": ["tests/test_engine.py", "tests/test_actor.py"],
    "policy_loss": ["tests/test_actor.py", "tests/test_policy_losses.py"],
    "reward": ["tests/test_reward.py"],
    "stage": ["tests/test_advantage.py"],
}


def without(folder: Path, *extras: str) -> Path:
    """A copy of the repository without these extras, and those that import them."""
    gone = {*extras}
    while importers := {importer for importer, imported in PAIRS if imported in gone} - gone:
        gone |= importers
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(file, folder)
    for name in gone:
        shutil.rmtree(folder / "extras" / name, ignore_errors=True)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`python arguments…` in the copy, on CPUs, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def pass_tests(folder: Path, *arguments: str) -> None:
    done = run(folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def kinds_of(extra: str) -> list[str]:
    """Lists the hooks by which the core reaches an extra."""
    return [kind for kind, names in TABLE.items() if any(f"extras.{extra}." in path for path in names.values())]


def today() -> list[str]:
    """Lists the extras that are deleted today."""
    first = date.today().toordinal() * A_DAY
    return [EXTRAS[(first + number) % len(EXTRAS)] for number in range(min(A_DAY, len(EXTRAS)))]


def test_every_extra_stands_under_one_of_nine_heads_in_the_table_and_on_the_tour():
    assert sorted(name for names in HEADS.values() for name in names) == sorted(EXTRAS) and len(HEADS) == 9
    rows = re.findall(
        r"^\| ([a-z ]+) \| (.*) \|$", (ROOT / "docs/tour.md").read_text().partition("| extras |")[2], re.M
    )
    assert {head: tuple(re.findall(r"`(\w+)`", row)) for head, row in rows} == HEADS


@pytest.mark.parametrize(
    "extras", [[one] for one in EXTRAS] if os.environ.get("EXTRAS") == "all" else [today()], ids="+".join
)
def test_the_core_does_without_extras(extras: list[str], tiny_model: Path, tmp_path: Path):
    copy = without(tmp_path / "copy", *extras)
    pass_tests(copy, "tests", "--collect-only")
    pass_tests(copy, GOLDEN, "-k", "sums")
    for name, start in [(extra, start) for extra in extras for start in SETTINGS.get(extra, ())]:
        key = f"trainer.{start}" if "." not in start else f"actor_rollout_ref.{start}"
        refused = run(copy, "main.py", "--config-name", "frozenlake", f"{key}=1")
        assert refused.returncode and f"{name} is not in this copy; extras/{name} was removed" in refused.stderr
    for key in ("algorithm.adv_estimator=gpg", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg"):
        if "algorithms" in extras:
            refused = run(copy, "main.py", "--config-name", "frozenlake", *short_run(tiny_model, tmp_path / "run"), key)
            assert refused.returncode and f"{key}: algorithms is not in this copy" in refused.stderr
    if "sweep" in extras:
        refused = run(copy, "main.py", "--multirun", "trainer.seed=0,1")
        assert refused.returncode and "--multirun: sweep is not in this copy" in refused.stderr
    if core := {file for name in extras for kind in kinds_of(name) for file in CORE_TESTS.get(kind, ())}:
        pass_tests(copy, *sorted(core))


def test_the_extra_of_the_page_is_two_files_and_three_lines_and_can_be_deleted(tiny_model: Path, tmp_path: Path):
    copy, page = without(tmp_path / "copy"), (ROOT / "CONTRIBUTING.md").read_text()
    files = dict(WRITTEN_FILE.findall(dict(SECTION.findall(page))["An extra"]))
    for name, text in files.items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
    for file, before, line in (
        ("configs/extras.py", '    "stage": {\n', '        "algorithm.token_price": "extras.brevity.stage:Brevity",\n'),
        ("configs/extras.py", "SETTINGS: dict[str, tuple[str, ...]] = {", '"brevity": ("algorithm.token_price",), '),
        ("configs/schema.py", "class AlgorithmConfig(", 'section("brevity"), '),
    ):
        text = (copy / file).read_text()
        assert text.count(before) == 1 and line.strip(" \n,)") in page
        after = text.index("\n", text.index(before)) + 1 if before.endswith("{") else text.index(before) + len(before)
        (copy / file).write_text(text[:after] + line + text[after:])
    settings = ["--config-name", "frozenlake", *short_run(tiny_model, tmp_path / "run"), "algorithm.token_price=0.5"]
    assert run(copy, "main.py", *settings).returncode == 0
    steps = learning_metrics(tmp_path / "run")
    assert steps[1]["brevity/price"] == 0.5 * steps[1]["response_length/mean"] > 0
    shutil.rmtree(copy / "extras/brevity")
    refused = run(copy, "main.py", *settings)
    assert refused.returncode and "brevity is not in this copy" in refused.stderr


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without any extra."""
    return without(tmp_path_factory.mktemp("bare") / "copy", *EXTRAS)


def test_the_core_alone_trains_as_ever(bare: Path):
    """The core alone gives the numbers that were recorded with all extras there and kernels=off."""
    pass_tests(bare, GOLDEN, "-k", "off and not pf_ppo and (sums or frozenlake or episodes or ppo)")


# Two runs and their Ray workers, as forks of a process of the copy.
FORKED = """
import json, os, sys
from tests.forked import python, python_command
forks = {"runtime_env": {"py_executable": python_command()}}
os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(forks)
for steps in ("2", "3"):
    done = python("main.py", *sys.argv[1:], f"trainer.total_training_steps={steps}")
    print(done.stdout, done.stderr)
    done.check_returncode()
"""


def test_the_core_alone_trains_on_ray_and_goes_on_from_its_checkpoint(bare: Path, tiny_model: Path, tmp_path: Path):
    settings = f"""
        --config-name frozenlake actor_rollout_ref.model.path={tiny_model} trainer.default_local_dir={tmp_path}/run
        algorithm.adv_estimator=gae trainer.n_workers_per_node=2 actor_rollout_ref.actor.strategy=replicas
        data.train_batch_size=4 actor_rollout_ref.rollout.n=2 env.train_size=10 env.val_episodes=2
        trainer.save_freq=1 trainer.test_freq=-1 trainer.logger=[console]
    """.split()
    done = run(bare, "-c", FORKED, *settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "resuming from" in done.stdout and (tmp_path / "run/global_step_3/actor/huggingface/config.json").is_file()
