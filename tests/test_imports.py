"""The names that users' files and commands rely on, and every command of the docs: each is still there.

Files move; these stay. A name that has to go is taken out here in the commit that says so in docs/differences.md.
"""

import importlib
import os
import re
import subprocess
import sys

import pytest

from configs.paths import ROOT
from tests.forked import python

NAMES = {
    "configs.errors": ["ConfigError"], "configs.import_utils": ["load_extern_object", "load_module"],
    "configs.loader": ["load_config"], "configs.schema": ["Config"], "custom.env_dataset": ["CustomEnvDataset"],
    "custom.env_wrapper": ["ENVIRONMENTS", "EnvState", "TextEnv"], "custom.reward_manager": ["CustomRewardManager"],
    "custom.tiny_model": ["build_model", "build_tokenizer", "save_tiny_model"], "data.padding": ["Sample", "collate"],
    "data.protocol": ["DataProto"], "data.rl_dataset": ["RLHFDataset", "collate_fn"], "data.rows": ["read_rows"],
    "data.sampler": ["AbstractSampler"], "data.tool_parsers": ["ToolParser"],
    "data.tools": ["BaseTool", "ToolResponse", "function_tool"], "data.types": ["Observer"],
    "extras.datagen.dataset": ["DynamicGenDataset"], "extras.evaluation.main_eval": ["main"],
    "extras.evaluation.main_generation": ["main"], "extras.interactions.base": ["BaseInteraction"],
    "extras.report.__main__": ["main"], "extras.rollout_correction.settings": ["RolloutCorrectionConfig"],
    "extras.rules.default": ["default_compute_score"], "extras.sandbox.run": ["run_python"],
    "extras.server.__main__": ["main"], "extras.sft.dataset": ["SFTDataset"], "extras.sft.settings": ["SFTConfig"],
    "extras.sft.trainer": ["run"], "extras.verl.managers": ["register"],
    "extras.verl.numerics": ["get_seqlen_balanced_partitions"],
    "training.core_algos": ["agg_loss", "compute_grpo_outcome_advantage", "compute_policy_loss_vanilla",
        "compute_kl_penalty", "compute_ppo_loss", "estimate_advantages", "register_adv_est", "register_policy_loss"],
    "training.metric_utils": ["compute_step_metrics", "reduce_metrics"], "training.preparation": ["prepare"],
    "training.ray_trainer": ["RayPPOTrainer"],
    "training.reward": ["compute_reward", "compute_reward_async"],
    "workers.dp_actor": ["DataParallelPPOActor"], "workers.dp_critic": ["DataParallelPPOCritic"],
    "workers.rollout": ["Completion", "Request", "Rollout"],
    "workers.vllm_rollout_spmd": ["VLLMRolloutSPMD", "vLLMRollout"],
}  # fmt: skip
BY_PATH = (
    "extras.curriculum.curriculum", "extras.interactions.gsm8k", "extras.interactions.scripted",
    "extras.pf_ppo.stage", "extras.rollout_correction.correction", "extras.sandbox.tool", "extras.tools.calculator",
    "extras.tools.gsm8k", "extras.tools.search", "extras.verl.compat",
)  # fmt: skip
COMMAND = re.compile(r"python -m ([a-z_][\w.]*)")


@pytest.mark.parametrize("module", [*NAMES, *BY_PATH])
def test_a_name_that_users_import_is_there(module):
    found = vars(importlib.import_module(module))
    assert not [name for name in NAMES.get(module, ()) if name not in found]


def commands() -> set[str]:
    """The modules of every `python -m` in the pages and the Makefile that are of this repository."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    named = {
        name.rstrip(".") for page in pages for name in COMMAND.findall(page.read_text().replace("$(RUN)", "python"))
    }
    return {name for name in named if (ROOT / name.split(".")[0]).is_dir()}


def users_commands() -> list[str]:
    """Returns those of ours, main.py too: an example may need a package of its own, and says so first."""
    return sorted(name for name in {"main", *commands()} if not {"tests", "examples"} & {*name.split(".")})


def test_every_command_says_in_one_line_that_a_python_has_no_packages():
    for name in users_commands():
        done = subprocess.run([sys.executable, "-S", "-m", name], cwd=ROOT, capture_output=True, text=True)
        one_line = re.fullmatch(r"error: .* has none of the packages .*`make setup` makes \.venv\.\n", done.stderr)
        assert one_line, f"{name}: {done.stderr}"


def test_every_command_of_the_pages_says_what_it_takes_and_does_nothing(tmp_path):
    assert len(users_commands()) > 15
    for name in users_commands():
        done = python("-m", name, "--help", env={**os.environ, "TMPDIR": str(tmp_path)})
        assert done.returncode == (name == "extras.verl.compat"), name  # which has no options of its own
        assert "usage: " in done.stdout + done.stderr and "Traceback" not in done.stderr, name
    assert not [*tmp_path.iterdir()] and not (ROOT / "--help").exists()
