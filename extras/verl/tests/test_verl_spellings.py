"""Spellings of verl's guides, and of its older versions, are read as today's keys and say so; pages name keys alone."""

import re
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from configs.errors import ConfigError
from configs.loader import Arguments, known_keys, load_config
from configs.schema import Config
from extras.evaluation.settings import EvaluationConfig, GenerationConfig
from extras.server.settings import ServerConfig
from extras.sft.settings import SFTConfig
from extras.verl.keys import CHATML, COMMON, ONLY_VALUE, READ, judge, pairs
from tests.runs import ROOT, compose
from training.plan import check_algorithm

OF_ALL_WORKERS = pairs(READ["of_all_workers"])
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs/from_documents.md")  # which shows what is refused, too


def load(folder: Path, name: str, *overrides: str) -> Config:
    return load_config(Arguments(name, folder, list(overrides), print_config=False), Config)


def settings_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


SPELLINGS = [
    ("algorithm.policy_loss_fn=gspo", "actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"),
    ("reward_model.custom_reward_function.name=score", "reward.custom_reward_function.name", "score"),
    ("+custom_reward_function.reward_kwargs.alpha=2", "reward.custom_reward_function.reward_kwargs", {"alpha": 2}),
    ("actor_rollout_ref.rollout.max_response_length=9", "actor_rollout_ref.rollout.response_length", 9),
    ("data.chat_template=chatml", "actor_rollout_ref.model.custom_chat_template", CHATML),
    ("actor_rollout_ref.rollout.name=naive", "actor_rollout_ref.rollout.name", "hf"),
    ("trainer.max_critic_ckpt_to_keep=2", "trainer.max_ckpt_to_keep", 2),
    ("actor_rollout_ref.actor.policy_loss.tau_neg=1.5", "actor_rollout_ref.actor.tau_neg", 1.5),
    ("actor_rollout_ref.model.torch_dtype=bfloat16", "actor_rollout_ref.actor.fsdp_config.dtype", "bfloat16"),
    ("trainer.test_freq=False", "trainer.test_freq", -1),
    ("critic.optim.warmup_style=cosine", "critic.optim.lr_scheduler_type", "cosine"),
]


@pytest.mark.parametrize(("override", "key", "value"), SPELLINGS)
def test_an_old_spelling_acts_as_todays_and_says_so_in_one_line(override, key, value, capsys, tmp_path):
    config = compose(override, name="ppo_trainer")
    notices = [line for line in capsys.readouterr().err.splitlines() if "nothing reads" not in line]  # without a path
    old = override.lstrip("+").partition("=")[0]
    assert settings_at(config, key) == value
    assert len(notices) == 1 and notices[0].startswith(f"notice: {old}")
    in_yaml = OmegaConf.from_dotlist([override.lstrip("+")])
    OmegaConf.save(in_yaml, tmp_path / "mine.yaml")
    assert load(tmp_path, "mine") == config


def test_a_setting_of_the_users_estimator_is_given_to_it_and_stands_in_its_config():
    algorithm = compose("+algorithm.my_alpha=2", name="ppo_trainer").algorithm
    assert algorithm.adv_estimator_kwargs == {"my_alpha": 2} and algorithm.my_alpha == algorithm.get("my_alpha") == 2
    with pytest.raises(ConfigError, match=r"grpo takes no argument \['lamm'\]"):
        check_algorithm(compose("+algorithm.lamm=2"))


def test_spellings_that_are_only_accepted_are_no_keys_of_ours_and_renamed_ones_lead_to_one():
    config = asdict(compose(name="ppo_trainer"))
    for new in COMMON.renamed.values():
        settings_at(config, new)
    for old in {**COMMON.renamed, **ONLY_VALUE}:
        with pytest.raises(KeyError):
            settings_at(config, old)


@pytest.mark.parametrize("key", ["reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"])
def test_an_old_spelling_of_a_key_without_effect_has_none(key, capsys):
    assert compose(f"{key}.log=true") == compose()
    [notice] = capsys.readouterr().err.splitlines()
    assert notice == f"notice: {key}.log=True has no effect: {judge(OVERLONG_LOG, True, Config).why}."


@pytest.mark.parametrize("old", OF_ALL_WORKERS)
def test_a_batch_size_over_all_workers_is_divided_by_their_number(old, capsys):
    """Settings may come in any order; no worker is left without a sequence."""
    new = OF_ALL_WORKERS[old]
    eight = ["trainer.nnodes=2", "trainer.n_gpus_per_node=4", "reward.reward_model.enable=true"]
    assert settings_at(compose(f"{old}=32", *eight), new) == settings_at(compose(*eight, f"{old}=32"), new) == 4
    said = capsys.readouterr().err.splitlines()
    assert said == [f"notice: {old} is now {new}=32 divided by the number of workers."] * 2
    assert settings_at(compose(f"{old}=32", "trainer.n_workers_per_node=3"), new) == 10
    assert settings_at(compose(f"{old}=3", *eight), new) == 1
    assert settings_at(compose(f"{old}=32", f"{new}=7", *eight), new) == 7


def test_the_later_of_an_old_and_a_new_spelling_wins(tmp_path):
    (tmp_path / "mine.yaml").write_text("custom_reward_function: {path: old.py}\n")
    config = load(tmp_path, "mine", "reward.custom_reward_function.path=new.py")
    assert config.reward.custom_reward_function.path == "new.py"
    both = ["actor_rollout_ref.actor.optim.clip_grad=1.5", "actor_rollout_ref.actor.grad_clip=0.5"]
    assert compose(*both).actor_rollout_ref.actor.optim.clip_grad == 0.5
    assert compose(*reversed(both)).actor_rollout_ref.actor.optim.clip_grad == 1.5


def test_an_old_key_left_at_its_null_default_does_not_erase_the_new_one(tmp_path, capsys):
    actor = "{ppo_micro_batch_size_per_gpu: 4, ppo_micro_batch_size: null}"
    (tmp_path / "mine.yaml").write_text(f"actor_rollout_ref: {{actor: {actor}}}\n")
    assert load(tmp_path, "mine").actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert capsys.readouterr().err == ""


OVERLONG_LOG = "reward.reward_kwargs.overlong_buffer_cfg.log"


def test_verls_spellings_of_a_reward_model_are_read():
    said = "enable=True micro_batch_size_per_gpu=4 max_length=99 model.fsdp_config.dtype=float32 strategy=fsdp"
    new = compose(*(f"reward.reward_model.{pair}" for pair in ["enable=True", "model_path=a"])).reward.reward_model
    old = compose("reward_model.model.path=a", *(f"reward_model.{pair}" for pair in said.split())).reward.reward_model
    assert new.enable and old.enable and new.model.path == old.model.path == "a"
    assert (old.micro_batch_size_per_gpu, old.max_length, old.fsdp_config.dtype) == (4, 99, "float32")


MANAGER_KEYS = ["reward.reward_manager.name", "reward_manager.name", "reward_model.reward_manager"]


@pytest.mark.parametrize("key", MANAGER_KEYS)
@pytest.mark.parametrize("name", ["naive", "batch", "dapo", "gdpo", "prime", "remote", "rate_limited", "limited"])
def test_managers_of_verl_are_accepted_with_what_is_done_here(key, name, capsys):
    assert compose(f"{key}={name}") == compose()
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"notice: {key}={name} has no effect: ")


def test_managers_of_a_file_and_limits_by_the_minute_are_read_in_every_spelling_of_verl():
    assert compose("reward.reward_manager.source=register", "reward.reward_manager.module.path=null") == compose()
    chosen = {compose("reward_manager.source=importlib", f"{key}=mine.py", "reward_manager.name=Mine").reward
              .reward_manager.path for key in ("reward_manager.module.path", "reward.reward_manager.module.path",
                                               "reward_model.reward_loop_module_path")}  # fmt: skip
    assert chosen == {"mine.py"}
    limits = compose("reward_model.max_rpm=30", "reward_model.max_tpm=500", "reward_model.num_workers=3").reward
    assert (limits.max_rpm, limits.max_tpm, limits.num_workers) == (30, 500, 3)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_exists(page: Path):
    text = re.sub(r"^```(?:python|text|mermaid)\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    entries = (Config, SFTConfig, GenerationConfig, EvaluationConfig, ServerConfig)
    schemas = [OmegaConf.structured(schema) for schema in entries]
    sections = {*chain(*schemas), *(key.partition(".")[0] for key in COMMON.renamed)}
    own = rf"(?:{'|'.join(sections)})(?:\.[a-z_]\w*)+"
    named = set(re.findall(rf"(?<![\w/.])(?!(?:data|distillation)\.(?:md|types|tools|device)\b){own}(?![\w/([])", text))
    assert named
    others = {"reward_model.ground_truth", "algorithm.token_price"}  # a column, and what CONTRIBUTING.md's example adds
    known = others | {key for schema in schemas for key in known_keys(schema)}
    known |= {".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)}
    free_form = ("env.kwargs.", "reward.custom_reward_function.reward_kwargs.", "rollout.engine_kwargs.")
    judged = {key: {judge(key, None, schema).kind for schema in (Config, SFTConfig)} for key in named - known}
    unknown = {key for key, kinds in judged.items() if kinds == {"unknown"}}
    assert not {key for key in unknown if not key.startswith(free_form)}
