"""Commands and imports of verl's, typed in the root of the repository, are ours unless verl is installed."""

import os
from pathlib import Path

import pytest

from configs.errors import is_users
from configs.paths import ROOT
from tests.forked import python
from tests.runs import learning_metrics, short_run

PROGRAMS = [  # (of verl.trainer, arguments, the command of ours)
    ("main_ppo", ["--config-name", "frozenlake", "algorithm.adv_estimator=grpo"], ["main.py"]),
    ("main_eval", ["data.path=rows.parquet"], ["-m", "extras.evaluation.main_eval"]),
    ("main_generation", ["model.path=m"], ["-m", "extras.evaluation.main_generation"]),
    ("main_generation_server", ["data.train_files=x"], ["-m", "extras.evaluation.main_generation"]),
    ("main_generation_server", ["server.port=8001"], ["-m", "extras.server"]),
    ("fsdp_sft_trainer", ["model.partial_pretrain=m"], ["-m", "extras.sft"]),
    ("sft_trainer", ["model.path=m"], ["-m", "extras.sft"]),
    ("sft_trainer_ray", ["model.path=m"], ["-m", "extras.sft"]),
]
SCRIPT = """
import torch
from verl import DataProto
from verl.protocol import DataProto as Same

def compute_reward(data):
    return torch.tensor([float(truth in text) for text, truth in zip(data.responses, data.ground_truths)])

data = DataProto.from_single_dict({"responses": ["answer: 42", "none"], "ground_truths": ["42"] * 2})
print(compute_reward(data).tolist(), Same is DataProto)
"""
LOADED = "from configs.import_utils import load_module; print(load_module({!r}).verl.kind)"
WITHOUT_EXTRA = "from pathlib import Path; from configs import extras; extras.FOLDER = Path('/nowhere'); import verl"


@pytest.mark.parametrize(("program", "arguments", "command"), PROGRAMS)
def test_a_program_of_verls_is_a_command_of_ours_and_says_so(program, arguments, command):
    ours = python(*command, "--cfg", "job", *arguments)
    verls = python("-m", f"verl.trainer.{program}", "--cfg", "job", *arguments)
    assert verls.returncode == 0 and verls.stdout == ours.stdout != ""
    said = f"notice: python -m verl.trainer.{program} is python {' '.join(command)} here.\n"
    assert verls.stderr.startswith(said)


def test_a_run_that_is_started_as_verls_trains(tiny_model, tmp_path):
    run = short_run(tiny_model, tmp_path / "run", "trainer.total_training_steps=1")
    done = python("-m", "verl.trainer.main_ppo", "--config-name", "frozenlake", *run)
    assert done.returncode == 0, done.stderr
    assert "actor/pg_loss" in learning_metrics(tmp_path / "run")[1]


@pytest.fixture
def with_path(tmp_path):
    """Runs Python in the root, with tmp_path behind it on sys.path."""
    return lambda *words: python(*words, env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})


def test_a_users_script_imports_verl(with_path, tmp_path):
    (tmp_path / "test_reward.py").write_text(SCRIPT)
    for words in (("-c", SCRIPT), (tmp_path / "test_reward.py",)):
        assert with_path(*words).stdout == "[1.0, 0.0] True\n"


def test_an_installed_verl_goes_first_wherever_it_is_on_the_path(with_path, tmp_path):
    (tmp_path / "verl/trainer").mkdir(parents=True)
    (tmp_path / "verl/trainer/main_ppo.py").write_text("print('real')")
    (tmp_path / "verl/__init__.py").write_text("kind = 'real'")
    (tmp_path / "reward.py").write_text("import verl")
    assert Path(ROOT, "verl.py").is_file() and not is_users(str(ROOT / "verl.py"))  # beside which a user's file may lie
    for words in (
        ("-c", "import verl; print(verl.kind)"),
        ("-m", "verl.trainer.main_ppo"),
        ("-c", LOADED.format(str(tmp_path / "reward.py"))),
        ("-c", f"{WITHOUT_EXTRA}; print(verl.kind)"),
    ):
        assert with_path(*words).stdout == "real\n"


def test_what_is_not_here_is_refused_by_name():
    assert "Did you mean verl.trainer.main_ppo?" in python("-m", "verl.trainer.main_pppo").stderr
    assert "extras/verl was removed" in python("-c", WITHOUT_EXTRA).stderr
