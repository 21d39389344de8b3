"""People outside get a wheel that trains from a folder of their own, and tests of every push and pull request."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging import requirements

from scripts import matrix
from tests.runs import ROOT

FOLDERS = ("configs", "custom", "data", "examples", "extras", "scripts", "training", "workers")
SHADOW = "raise ImportError('a file of the user stands in for one of ours')\n"
MY_ROWS = """
from pathlib import Path
from custom.env_dataset import CustomEnvDataset

class MyRows(CustomEnvDataset):
    def __init__(self, *given, **named):
        Path("was_made").touch()
        super().__init__(*given, **named)
"""
RUN = (
    *("--config-name", "frozenlake", "data.custom_cls.path=my_rows.py"),
    *("data.custom_cls.name=MyRows",),
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "env.train_size=10", "env.val_episodes=2"),
    *("env.max_turns=3", "trainer.total_training_steps=1"),
)


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)


def run_pip(*arguments: str | Path) -> None:
    done = run(sys.executable, "-m", "pip", *arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("hatchling", "hatch_requirements_txt"):
        pytest.importorskip(package, reason="not in this environment: make setup")
    folder = tmp_path_factory.mktemp("wheel")
    run_pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of a fresh virtual environment with the wheel."""
    return environment_with(tmp_path_factory.mktemp("venv"), wheel)


def environment_with(folder: Path, *installed: str | Path) -> Path:
    """The bin/ of a virtual environment in `folder`, which finds all other packages in this one's."""
    assert run(sys.executable, "-m", "venv", "--without-pip", folder).returncode == 0
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    flags = "--no-deps", "--no-index", "--no-build-isolation"
    run_pip("--python", folder / "bin/python", "install", *flags, *installed)
    return folder / "bin"


@pytest.fixture(scope="module")
def model(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    words = ("-m", "custom.tiny_model", "tiny", "--hidden-size", "32", "--layers", "1")
    made = run(commands / "python", *words, cwd=folder)
    assert made.returncode == 0, made.stderr
    return folder / "tiny"


def test_the_wheel_has_every_file_of_the_product_and_no_test(wheel):
    paths = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()]
    product = {str(path.relative_to(ROOT)) for path in paths if path.suffix not in (".pyc", ".ipynb")}
    product = {name for name in product if "/tests/" not in name}
    names = {name.removeprefix("nano_verl/") for name in ZipFile(wheel).namelist()}
    assert {"extras/report/page.html", "extras/verl/keys.toml"} < product <= names and "main.py" in names
    assert "verl.py" not in names  # an installed verl is not stood in for
    assert not [name for name in names if "tests" in Path(name).parts or name.endswith(".pyc")]
    assert {"nano_verl.pth", "__init__.py", "data/__init__.py", "workers/__init__.py"} < names


def test_the_wheel_leaves_what_works_and_every_range_has_its_tested_version(wheel):
    with ZipFile(wheel) as file:
        [metadata] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        lines = re.findall("^Requires-Dist: (.*)", file.read(metadata).decode(), re.MULTILINE)
    required = [requirements.Requirement(line) for line in lines]
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, inside, outside in (
        ("torch", ("2.11.0", "2.13.0+cpu", "2.14.1"), ("2.10.0", "2.15.0")),
        ("transformers", ("5.17.0", "5.23.0"), ("5.16.0", "5.24.0")),
        ("numpy", ("2.3.5", "2.5.5"), ("2.6.0",)),
    ):
        [versions] = {one.specifier for one in required if one.name == name and one.marker is None}
        assert all(map(versions.contains, inside)) and not any(map(versions.contains, outside)), name
    exact = {"vllm"}  # its own versions are built for one torch
    untested = [one.name for one in required if one.name not in exact and not one.specifier.contains(tested[one.name])]
    assert not untested and len(required) > 30


@pytest.mark.parametrize(
    ("fails", "cells", "status"),
    [
        ("", "3.12.1, 2.11.0, 5.17.0 | 5 | 2 | 2", 1),
        ("pip", "pip failed | - | - | -", 1),
        ("venv", "no python3.12 here | - | - | -", 0),
    ],
)
def test_the_matrix_says_of_each_set_what_passed(fails, cells, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "SHOWS", "print('3.12.1 2.11.0 5.17.0')")

    def succeeds(*command):
        if "venv" in command:
            (command[-1] / "bin").mkdir(parents=True)
            (command[-1] / "bin/python").symlink_to(sys.executable)
        if "pytest" in command:
            counts = '<testsuite tests="9" failures="1" errors="1" skipped="2"/>'
            command[command.index("--junitxml") + 1].write_text(f"<testsuites>{counts}</testsuites>")
        return fails not in command

    monkeypatch.setattr(matrix, "succeeds", succeeds)
    assert matrix.main(["oldest"]) == status
    assert f"| oldest | {cells} | 0 |" in capsys.readouterr().out


def test_the_command_helps_and_refuses_in_one_line_where_files_of_the_user_have_our_names(commands, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("data/__init__.py", "configs.py", "main.py"):
        (tmp_path / name).write_text(SHADOW)
    helped = run(commands / "nano-verl", "--help", cwd=tmp_path)
    assert helped.returncode == 0 and "usage: nano-verl" in helped.stdout and "python -m extras.report" in helped.stdout
    refused = run(commands / "nano-verl", "trainer.sede=1", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.startswith("error: unknown key 'trainer.sede'"), refused.stderr
    assert refused.stderr.count("\n") == 1


def test_an_editable_install_has_extras_and_leaves_the_repository_what_is_imported(wheel, tmp_path):
    bin_folder, empty = environment_with(tmp_path / "venv", "--editable", f"{ROOT}[test,vllm]"), tmp_path / "empty"
    empty.mkdir()
    refused = run(bin_folder / "nano-verl", "trainer.sede=1", cwd=empty)
    assert refused.returncode == 2 and refused.stderr.startswith("error: unknown key 'trainer.sede'"), refused.stderr
    shows = (
        "import configs.loader, importlib.metadata as all; print(configs.loader.__file__, all.requires('nano-verl'))"
    )
    shown = run(bin_folder / "python", "-c", shows, cwd=empty)
    assert shown.stdout.startswith(f"{ROOT}/configs/loader.py "), shown.stderr
    assert all(f'"{name}' in shown.stdout and f"extra == '{extra}'" in shown.stdout
               for name, extra in {"pytest": "test", "vllm": "vllm"}.items())  # fmt: skip


@pytest.mark.slow
def test_a_run_from_an_empty_folder_takes_the_users_files_and_writes_there(commands, model, tmp_path):
    (tmp_path / "my_rows.py").write_text(MY_ROWS)
    given = "trainer.executor=ray", f"actor_rollout_ref.model.path={model}"  # where workers have to find them, too
    done = run(commands / "nano-verl", *RUN, *given, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "outputs/frozenlake/global_step_1/actor/huggingface/config.json").is_file()
    assert (tmp_path / "was_made").exists(), "the user's class was not asked for rows"
    shown = run(commands / "python", "-m", "extras.report", "outputs/frozenlake", cwd=tmp_path)
    assert shown.returncode == 0 and (tmp_path / "outputs/frozenlake/report.html").is_file(), shown.stderr
