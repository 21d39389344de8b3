"""Spellings of verl's guides, and of its older versions, are read as today's keys and say so; pages name keys alone."""

import re
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from configs.errors import ConfigError
from configs.import_utils import setting_at
from configs.loader import Arguments, known_keys, load_config
from configs.schema import Config
from configs.settings import is_known
from extras.evaluation.settings import EvaluationConfig, GenerationConfig
from extras.server.settings import ServerConfig
from extras.sft.settings import SFTConfig
from extras.verl.keys import CHATML, COMMON, ONLY_VALUE, READ, judge, pairs
from extras.verl.tests.test_verl_commands import A, M, R, compose_whole
from tests.runs import ROOT, compose
from training.plan import check_algorithm

OF_ALL_WORKERS = pairs(READ["of_all_workers"])
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES.remove(ROOT / "docs/from_documents.md")  # which shows what is refused, too


def load(folder: Path, name: str, *overrides: str) -> Config:
    return load_config(Arguments(name, folder, list(overrides), print_config=False), Config)


def value_of(key: str, *overrides: str) -> Any:
    return setting_at(asdict(compose(*overrides)), key)


KEYS = [  # (entry, settings, key of today, its value)
    ("main", "algorithm.policy_loss_fn=gspo", "actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"),
    ("main", "reward_model.custom_reward_function.name=score", "reward.custom_reward_function.name", "score"),
    (
        "main",
        "+custom_reward_function.reward_kwargs.alpha=2",
        "reward.custom_reward_function.reward_kwargs",
        {"alpha": 2},
    ),
    ("main", f"{R}.max_response_length=9", f"{R}.response_length", 9),
    ("main", "data.chat_template=chatml", f"{M}.custom_chat_template", CHATML),
    ("main", f"{R}.name=naive", f"{R}.name", "hf"),
    ("main", "trainer.max_critic_ckpt_to_keep=2", "trainer.max_ckpt_to_keep", 2),
    ("main", f"{A}.policy_loss.tau_neg=1.5", f"{A}.tau_neg", 1.5),
    ("main", f"{M}.torch_dtype=bfloat16", f"{A}.fsdp_config.dtype", "bfloat16"),
    ("main", "trainer.test_freq=False", "trainer.test_freq", -1),
    ("main", "critic.optim.warmup_style=cosine", "critic.optim.lr_scheduler_type", "cosine"),
    ("main", f"{A}.optim.lr=1e-5 {A}.optim.min_lr=5e-6", f"{A}.optim.min_lr_ratio", 0.5),
    ("main", f"{A}.optim.min_lr=1e-6 {A}.optim.lr=0", f"{A}.optim.min_lr_ratio", 0),
    ("main", f"{A}.optim.lr=1e-5 {A}.optim.lr_warmup_init=5e-6", f"{A}.optim.init_lr_ratio", 0.5),
    ("main", f"{A}.optim.init_lr_ratio=null", f"{A}.optim.init_lr_ratio", 0),
    ("main", "critic.optim.zero_indexed_step=False", "critic.optim.zero_indexed_step", False),
    ("sft", "optim.lr=1e-5 optim.lr_warmup_init=5e-6", "optim.init_lr_ratio", 0.5),
    ("main", f"{A}.use_token_level_loss=False", f"{A}.loss_agg_mode", "seq-mean-token-mean"),
    ("main", f"{A}.optim.exp_avg_dtype=bf16", f"{A}.optim.moments_dtype", "bfloat16"),
    ("main", f"{A}.use_rollout_log_probs=True", "algorithm.rollout_correction.bypass_mode", True),
    ("main", f"{R}.multi_turn.max_turns=3", f"{R}.multi_turn.max_assistant_turns", 3),
    ("main", "algorithm.filter_groups.metric=seq_final_reward", "algorithm.filter_groups.metric", "reward"),
    ("main", "trainer.remove_previous_ckpt_in_save=True", "trainer.max_ckpt_to_keep", 1),
    ("main", "trainer.resume_from_path=", "trainer.resume_from_path", None),
    ("main", f"{A}.megatron.tensor_model_parallel_size=2", f"{A}.tensor_parallel_size", 2),
    ("main", f"{M}.lora_rank=4 {R}.name=vllm {M}.lora.merge=False", f"{R}.load_lora", "adapter"),
    ("main", f"{R}.name=vllm {M}.lora.merge=False", f"{R}.load_lora", "merge"),
    ("main", f"{R}.name=sglang_async", f"{R}.name", "sglang"),
    ("main", f"{R}.agent.custom_agent_loop_loader=a.b.load", f"{R}.agent.agent_loop_config_path", "a.b.load"),
    ("sft", "model.use_remove_padding=False model=hf_model model.path=/m", "model.use_remove_padding", False),
    ("sft", "optim.weight_decay=0.5 optim=fsdp optim.lr=1e-5", "optim.weight_decay", 0.5),
    ("sft", "engine=megatron engine.optimizer_offload=True", "fsdp_config.optimizer_offload", True),
    ("sft", "trainer.resume_path=/x", "trainer.resume_mode", "resume_path"),
    ("sft", "model.lora.rank=8", "model.lora_rank", 8),
    ("sft", "data.chat_template=chatml", "model.custom_chat_template", CHATML),
    ("sft", "data.micro_batch_size=8 trainer.n_workers_per_node=2", "data.micro_batch_size_per_gpu", 4),
    ("sft", "data.micro_batch_size=1 trainer.n_workers_per_node=2", "data.micro_batch_size_per_gpu", 1),
    ("generation", "rollout.temperature=0", "rollout.do_sample", False),
    ("generation", "rollout.prompt_length=64", "data.max_prompt_length", 64),
    ("generation", f"{R}.n=3", "rollout.n", 3),
    ("generation", "rollout.seed=7", "trainer.seed", 7),
    ("generation", "data.input_files=x", "data.path", "x"),
    ("evaluation", "data.val_files=x reward_model.enable=False", "data.path", "x"),
]


@pytest.mark.parametrize(("entry", "overrides", "key", "value"), KEYS)
def test_an_old_spelling_acts_as_todays_and_says_so_in_one_line(entry, overrides, key, value, capsys, tmp_path):
    config, (given, *more) = compose_whole(entry, *overrides.split(), ""), overrides.split()
    assert setting_at(asdict(config), key) == value
    notices = [line for line in capsys.readouterr().err.splitlines() if "nothing reads" not in line]  # without a path
    old, _, text = given.lstrip("+").partition("=")
    if entry == "main" and not more and text and judge(old, yaml.safe_load(text), Config).kind == "renamed":
        assert len(notices) == 1 and notices[0].startswith(f"notice: {old}")
        OmegaConf.save(OmegaConf.from_dotlist([given.lstrip("+")]), tmp_path / "mine.yaml")
        assert load(tmp_path, "mine") == config


def test_a_setting_of_the_users_estimator_is_given_to_it_and_stands_in_its_config():
    algorithm = compose("+algorithm.my_alpha=2", name="ppo_trainer").algorithm
    assert algorithm.adv_estimator_kwargs == {"my_alpha": 2} and algorithm.my_alpha == algorithm.get("my_alpha") == 2
    with pytest.raises(ConfigError, match=r"grpo takes no argument \['lamm'\]"):
        check_algorithm(compose("+algorithm.lamm=2"))


def test_spellings_that_are_only_accepted_are_no_keys_of_ours_and_renamed_ones_lead_to_one():
    assert all(is_known(new, Config) or is_known(f"{new}.", Config) for new in COMMON.renamed.values())
    assert not [old for old in {**COMMON.renamed, **ONLY_VALUE} if is_known(old, Config)]


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
    assert value_of(new, f"{old}=32", *eight) == value_of(new, *eight, f"{old}=32") == 4
    said = capsys.readouterr().err.splitlines()
    assert said == [f"notice: {old} is now {new}=32 divided by the number of workers."] * 2
    assert value_of(new, f"{old}=32", "trainer.n_workers_per_node=3") == 10
    assert value_of(new, f"{old}=3", *eight) == 1
    assert value_of(new, f"{old}=32", f"{new}=7", *eight) == 7


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
