"""The config: how it is composed and checked, which spellings are accepted, and that no key is dead."""

import ast
import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import main
from configs import extras, loader
from configs.checks import batch_arithmetic, check_config, check_names
from configs.errors import ConfigError
from configs.loader import CONFIG_DIR, Arguments, check_is_whole, load_config, parse_arguments
from configs.schema import Config
from configs.settings import Frozen, is_known
from tests.pages import shipped_modules
from tests.runs import ROOT, compose
from training.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est
from training.plan import check_algorithm
from training.roles import check_roles, needed_roles
from workers import ray_group, vllm_rollout_spmd
from workers.rollout import load_rollout_class

HOME = str(Path.home())
COMMANDS = ["main.py"]
COMMANDS += [str(path) for path in sorted((ROOT / "extras").glob("*/__main__.py")) if " = command(" in path.read_text()]
SHIPPED = sorted(path.stem for path in CONFIG_DIR.glob("*.yaml"))


def load(folder: Path, name: str, *overrides: str) -> Config:
    return load_config(Arguments(name, folder, list(overrides), print_config=False), Config)


# Composition


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_yaml_composes_and_nothing_is_told(name, capsys):
    compose(name=name)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.logger=[console,wandb]", "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=['console','tensorboard']", "trainer.logger", ["console", "tensorboard"]),
        ("trainer.logger=wandb", "trainer.logger", "wandb"),
        ("env.kwargs={is_slippery: false, map_name: 8x8}", "env.kwargs", {"is_slippery": False, "map_name": "8x8"}),
        ("env.kwargs.size=5", "env.kwargs", {"size": 5}),
        ("+actor_rollout_ref.model.override_config.a.b=1", "actor_rollout_ref.model.override_config", {"a": {"b": 1}}),
        ("data.train_files='a file, with commas.jsonl'", "data.train_files", "a file, with commas.jsonl"),
        ('data.prompt_key="a=b"', "data.prompt_key", "a=b"),
        ('data.prompt_key="a,b"', "data.prompt_key", "a,b"),
        ("trainer.total_training_steps=null", "trainer.total_training_steps", None),
        ("+trainer.seed=7", "trainer.seed", 7),
        ("++trainer.seed=7", "trainer.seed", 7),
        ("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.optim.lr", 1e-3),
        ("actor_rollout_ref.actor.optim.betas=[0.8,0.9]", "actor_rollout_ref.actor.optim.betas", [0.8, 0.9]),
        ("trainer.default_local_dir=out/${trainer.experiment_name}", "trainer.default_local_dir", "out/default"),
        ("data.train_files=/my data/a (1).jsonl", "data.train_files", "/my data/a (1).jsonl"),
        ("data.train_files=it's=a~b,é.jsonl", "data.train_files", "it's=a~b,é.jsonl"),
        ("data.train_files=~/a (1).jsonl", "data.train_files", f"{HOME}/a (1).jsonl"),
        ("data.train_files=['~/a (1).jsonl','b.jsonl']", "data.train_files", [f"{HOME}/a (1).jsonl", "b.jsonl"]),
        ("trainer.default_local_dir=~/${trainer.experiment_name}", "trainer.default_local_dir", f"{HOME}/default"),
    ],
)  # fmt: skip
def test_overrides_follow_hydras_grammar(override, key, value):
    found = compose(override, name="ppo_trainer")
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


NO_PART_OF_A_NAME = (
    "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=9", "algorithm.kl_ctrl.kl_coef=0.1",
)  # fmt: skip
PART_OF_A_NAME = (
    "algorithm.adv_estimator=rloo", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "recipe=dapo",
    "trainer.seed=1", "actor_rollout_ref.model.path=elsewhere/Qwen", "data.train_files=[/data/other/train.parquet]",
    "reward.custom_reward_function.path=mine.py", "reward.reward_manager.name=mine",
    "reward.reward_model.model.path=judge",
)  # fmt: skip


@pytest.mark.parametrize("more", NO_PART_OF_A_NAME + PART_OF_A_NAME)
def test_a_run_without_a_name_has_one_of_its_model_data_reward_and_algorithm(more):
    command = ["actor_rollout_ref.model.path=some/Qwen", "data.train_files=[/data/train.parquet,b.parquet]"]
    first, second = (compose(*command, *add, name="ppo_trainer").trainer for add in ([], [more]))
    assert first.experiment_name.startswith("Qwen_train.parquet_")
    assert first.default_local_dir == f"outputs/{first.experiment_name}"
    assert (second.experiment_name == first.experiment_name) == (more in NO_PART_OF_A_NAME)
    assert compose(*command, more, "trainer.experiment_name=mine", name="ppo_trainer").trainer.experiment_name == "mine"


@pytest.mark.parametrize(
    "override", ["hydra.run.dir='x/${now:%Y}'", "+hydra.sweep.dir=x", "hydra/job_logging=disabled", "~hydra.x"]
)
def test_what_is_hydras_own_has_no_effect_and_says_what_to_use_instead(override, capsys):
    assert compose(override) == compose()
    said = "nothing sets it" if override[0] == "~" else "trainer.default_local_dir is the folder of the run, --config"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--lr", "1e-3"], "--lr: .* key=value, without dashes: lr=…"), (["--lr=1e-3"], "without dashes: lr=1e-3")],
)
def test_a_flag_that_there_is_not_is_refused_with_what_to_write_instead(flags, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_arguments(flags, "ppo_trainer", "")
    assert stop.value.code == 2 and re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("multiturn", r"it is the base of blackjack, .*, taxi: name one"),
        ("recipe/dapo", r"this is a recipe: --config-name frozenlake recipe=dapo"),
    ],
)
def test_a_yaml_that_is_no_config_by_itself_says_so(name, said):
    with pytest.raises(ConfigError, match=said):
        check_is_whole(Arguments(name, CONFIG_DIR, [], print_config=False), compose(name=name))
    completed = compose("env.id=FrozenLake-v1", name="multiturn")
    check_is_whole(Arguments("multiturn", CONFIG_DIR, [], print_config=False), completed)
    check_config(completed)


def test_what_else_is_in_a_users_folder_does_not_matter(tmp_path):
    (tmp_path / "mine.yaml").write_text("env: {id: FrozenLake-v1}\n")
    (tmp_path / "latin.yaml").write_bytes(b"env: {id: \xe9}\n")
    (tmp_path / "folder.yaml").mkdir()
    check_is_whole(Arguments("mine", tmp_path, [], print_config=False), load(tmp_path, "mine"))
    with pytest.raises(ConfigError, match=r"latin\.yaml cannot be read"):
        load(tmp_path, "latin")


def test_tilde_takes_back_what_the_yaml_sets():
    assert compose().env.max_turns == 30
    assert compose("~env.max_turns").env.max_turns is None
    with pytest.raises(ConfigError, match=r"~env\.paths: nothing sets this key"):
        compose("~env.paths")


@pytest.mark.parametrize("defaults", ["[frozenlake]", "[frozenlake, _self_]"])
def test_a_users_yaml_inherits_from_a_shipped_one_and_wins_over_it(tmp_path, defaults):
    (tmp_path / "mine.yaml").write_text(f"defaults: {defaults}\nenv: {{max_turns: 7}}\n")
    (tmp_path / "child.yaml").write_text("defaults: [mine]\ntrainer: {seed: 5}\n")
    config = load(tmp_path, "child.yaml", "data.train_batch_size=2")
    assert (config.env.id, config.env.max_turns) == ("FrozenLake-v1", 7)
    assert (config.trainer.seed, config.data.train_batch_size) == (5, 2)


def test_help_and_printing_import_neither_torch_nor_ray():
    script = (
        "import sys, contextlib, runpy\n"
        f"for file in {COMMANDS}:\n"
        "    for flags in (['--cfg', 'job'], ['trainer.sed=1'], ['--help']):\n"
        "        sys.argv = [file, *flags]\n"
        "        with contextlib.suppress(SystemExit): runpy.run_path(file, run_name='__main__')\n"
        "print([name for name in ('torch', 'transformers', 'ray', 'vllm', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    hints = ("--config-name", "--config-path", "--cfg", "frozenlake", "key=value", "configs/schema.py")
    assert not [hint for hint in hints if hint not in done.stdout]
    assert done.stderr.count("error: unknown key 'trainer.sed'. Did you mean '") == len(COMMANDS)


# Recipes and presets


def chosen(config: Config) -> tuple[str, str, bool]:
    """Returns what tells the recipes apart: (estimator, policy loss, whether dynamic sampling is on)."""
    algorithm = config.algorithm
    return algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode, algorithm.filter_groups.enable


def test_a_recipe_is_laid_over_the_yaml_and_keys_over_both():
    config = compose("actor_rollout_ref.actor.clip_ratio_high=0.4", "recipe=dapo", "actor_rollout_ref.rollout.n=3")
    assert chosen(config) == ("grpo", "vanilla", True) and config.env.id == "FrozenLake-v1"
    assert (config.actor_rollout_ref.actor.clip_ratio_c, config.actor_rollout_ref.actor.clip_ratio_high) == (10, 0.4)
    assert config.actor_rollout_ref.rollout.n == 3
    assert compose("recipe=remax") == compose("+recipe=remax") == compose("recipe=dapo", "recipe=remax")


def test_a_users_yaml_names_a_recipe_and_the_command_line_another(tmp_path):
    """The command line's recipe replaces the yaml's entirely; what the yaml itself sets wins over either."""
    for name, recipe in (("mine", "recipe: dapo, "), ("plain", "")):
        text = f"defaults: [frozenlake, {recipe}_self_]\nactor_rollout_ref: {{rollout: {{n: 5}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "child.yaml").write_text("defaults: [mine]\n")
    assert chosen(load(tmp_path, "mine")) == ("grpo", "vanilla", True)
    for name in ("mine", "child"):
        config = load(tmp_path, name, "recipe=gspo")
        assert config == load(tmp_path, "plain", "recipe=gspo", "actor_rollout_ref.rollout.n=5")
        assert chosen(config) == ("grpo", "gspo", False) and config.actor_rollout_ref.rollout.n == 5
        assert config.actor_rollout_ref.actor.clip_ratio_c == 3  # dapo's was 10


def test_recipes_of_the_users_stand_beside_the_shipped_ones_and_may_build_on_them(tmp_path):
    (tmp_path / "recipe").mkdir()
    head = "# @package _global_\n"
    (tmp_path / "mine.yaml").write_text("defaults: [frozenlake]\n")
    (tmp_path / "recipe/own.yaml").write_text(f"{head}algorithm: {{adv_estimator: opo}}\n")
    (tmp_path / "recipe/long.yaml").write_text(f"{head}defaults: [dapo, _self_]\nalgorithm: {{gamma: 0.5}}\n")
    assert chosen(load(tmp_path, "mine", "recipe=own")) == ("opo", "vanilla", False)
    assert chosen(load(tmp_path, "mine", "recipe=gspo")) == ("grpo", "gspo", False)
    based = load(tmp_path, "mine", "recipe=long")
    assert chosen(based) == ("grpo", "vanilla", True) and based.algorithm.gamma == 0.5
    (tmp_path / "recipe/gspo.yaml").write_text(f"{head}algorithm: {{adv_estimator: opo}}\n")
    assert chosen(load(tmp_path, "mine", "recipe=gspo")) == ("opo", "vanilla", False)  # theirs wins
    with pytest.raises(
        ConfigError, match=r"recipe=owns: no such recipe\. Did you mean 'own'\? .* cispo, .*, own, pair"
    ):
        load(tmp_path, "mine", "recipe=owns")


@pytest.mark.parametrize("nothing", ["~recipe", "recipe=null"])
def test_a_recipe_is_taken_back(nothing, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [frozenlake, recipe: dapo, _self_]\n")
    assert load(tmp_path, "mine", nothing) == compose(nothing) == compose()


@pytest.mark.parametrize("name", ["frozenlake", "ppo_trainer"])
def test_the_printed_config_is_the_same_config(name, tmp_path, capsys):
    overrides = ["recipe=dapo", "algorithm.gamma=0.9"]
    with pytest.raises(SystemExit):
        load_config(parse_arguments(["--config-name", name, "--cfg", "job", *overrides], "", ""), Config)
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load(tmp_path, "printed") == compose(*overrides, name=name)


# What estimators and losses ask for


@pytest.fixture
def estimator():
    """A decorator that registers an estimator as "asking" for one test."""
    yield register_adv_est("asking")
    ADV_ESTIMATOR_REGISTRY.pop("asking", None)


def test_roles_follow_from_the_arguments_of_the_estimator_whatever_its_name(estimator, tmp_path):
    estimator(lambda rewards, values, ref_log_prob: (rewards, rewards))
    here = f"trainer.default_local_dir={tmp_path}"
    asking = compose("algorithm.adv_estimator=asking", here)
    assert needed_roles(asking) == ["actor", "rollout", "ref", "critic"]
    check_algorithm(asking)
    plain = compose("algorithm.adv_estimator=grpo", here, name="ppo_trainer")
    assert needed_roles(plain) == ["actor", "rollout"]
    assert "critic" in needed_roles(compose("critic.enable=true", here))
    measured = compose("algorithm.adv_estimator=asking", "trainer.val_only=true", here)
    assert needed_roles(measured) == ["actor", "rollout"]
    with pytest.raises(ConfigError, match=r"adv_estimator=asking needs values, and critic\.enable=false"):
        check_algorithm(compose("algorithm.adv_estimator=asking", "critic.enable=false", here))
    too_long = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9"  # checked, as the reference will be there
    with pytest.raises(ConfigError, match=r"ref\.log_prob_max_token_len_per_gpu=9 is below"):
        check_roles(compose("algorithm.adv_estimator=asking", too_long, here), ["actor", "rollout", "ref"])


def test_values_with_a_default_ask_for_no_critic(estimator):
    estimator(lambda rewards, values=None, *, ref_log_prob=None, **kwargs: (rewards, rewards))
    config = compose("algorithm={adv_estimator: asking, adv_estimator_kwargs: {anything: 1}}", name="ppo_trainer")
    assert needed_roles(config) == ["actor", "rollout"]
    check_algorithm(config)


@pytest.mark.parametrize(
    "penalty", ["algorithm.use_kl_in_reward=true", "reward.reward_kwargs.overlong_buffer_cfg.enable=true"]
)
@pytest.mark.parametrize(
    "name", ["asking", *(name for name in ("gdpo", "max_rl", "no_rewards", "prime") if name in ADV_ESTIMATOR_REGISTRY)]
)
def test_a_penalty_that_an_estimator_would_not_read_is_refused(estimator, name, penalty):
    estimator(lambda token_level_scores, response_mask: (response_mask, response_mask))
    with pytest.raises(ConfigError, match=f"{penalty} with algorithm.adv_estimator={name}"):
        check_algorithm(compose(f"algorithm.adv_estimator={name}", penalty))


# Mistakes


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("trainer.sed", "trainer.seed"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("algorithm.advantage_estimator", "algorithm.adv_estimator"),
        ("adv_estimator", "algorithm.adv_estimator"),
        ("actor_rollout_ref.actor.kl_coef", "actor_rollout_ref.actor.kl_loss_coef"),
        ("learning_rate", "actor_rollout_ref.actor.optim.lr"),
        ("num_generations", "actor_rollout_ref.rollout.n"),
        ("max_grad_norm", "actor_rollout_ref.actor.optim.clip_grad"),
        ("total_steps", "trainer.total_training_steps"),
        ("num_epochs", "trainer.total_epochs"),
        ("model", "actor_rollout_ref.model.path"),
        ("actor_rollout_ref.rollout.gpu_mem", "actor_rollout_ref.rollout.gpu_memory_utilization"),
    ],
)
def test_an_unknown_key_is_answered_by_the_nearest_one(typo, meant):
    with pytest.raises(ConfigError, match=rf"^unknown key '{re.escape(typo)}'\. Did you mean '{re.escape(meant)}'\?"):
        compose(f"{typo}=1")


@pytest.mark.parametrize("key", ["actor_rollout_ref.rollout.interplay", "trainer.path", "x.enable", "trainer.wandb"])
def test_an_unknown_key_that_is_near_none_is_refused_without_a_guess(key):
    with pytest.raises(ConfigError, match=rf"^unknown key '{re.escape(key)}'\. --cfg job lists them all"):
        compose(f"{key}=1")


def test_an_unknown_key_of_a_yaml_or_behind_a_plus_is_answered_too(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {sed: 1}\n")
    for attempt in (lambda: compose("+trainer.sed=1"), lambda: load(tmp_path, "mine")):
        with pytest.raises(ConfigError, match=r"^unknown key 'trainer\.sed'\. Did you mean 'trainer\.seed'"):
            attempt()


def test_a_key_of_an_absent_extra_is_refused_by_the_name_of_the_extra(monkeypatch):
    monkeypatch.setitem(extras.SETTINGS, "ghosts", ("trainer.ghost_",))
    with pytest.raises(ConfigError, match=r"^trainer.ghost_rank: ghosts is not in this copy; extras/ghosts was remo"):
        compose("trainer.ghost_rank=4")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.seed=abc", "trainer.seed='abc': .* could not be converted to Integer. trainer.seed: The one seed"),
        ("trainer.seed=-1", "trainer.seed=-1 must be at least 0. trainer.seed: The one seed"),
        ("data.shuffle=maybe", "data.shuffle='maybe': .* not a valid bool"),
        ("data=null", "data is a section; set the keys in it"),
        ("data.train_files=5", "data.train_files=5 must be a text or a list of texts"),
        ("data.truncation=top", "data.truncation='top' must be one of error, left, right, middle"),
        ("algorithm.gamma=1.5", "algorithm.gamma=1.5 must be at most 1"),
        ("actor_rollout_ref.actor.optim.clip_grad=0", "clip_grad=0.0 must be above 0"),
        ("actor_rollout_ref.actor.optim.lr=nan", "optim.lr=nan is no number"),
        ("trainer.seed=1,2", "-m runs each of them"),
        ("trainer.seed", "'trainer.seed' is not of the form key=value"),
        ("=5", "'=5' is not of the form key=value"),
        ("trainer.default_local_dir=", "trainer.default_local_dir='' must not be empty. .* Folder of the run"),
        ("reward.failure_score=nan", "reward.failure_score=nan is no number. reward.failure_score: The score of such"),
        ("recipe=GRPO", "recipe=GRPO: no such recipe. Did you mean 'grpo'"),
        ("recipe=[dapo,gspo]", r"no such recipe\. There are cispo, clip_cov, dapo, .*, sppo\.$"),
        ("data.prompt_key=a,b", """stands in quotes: 'data.prompt_key="a,b"'"""),
        ("config_name=taxi", "unknown key 'config_name'. Did you mean '--config-name'"),
        ("trainer.logger=[console", r"cannot read trainer.logger=\[console: .* a comma stands in quotes"),
        ("trainer.experiment_name=${nothing}", "trainer.experiment_name: .*nothing"),
    ],
)
def test_a_bad_value_names_key_value_rule_and_meaning(override, message):
    with pytest.raises(ConfigError, match=message):
        compose(override)


LOSS = "actor_rollout_ref.actor.policy_loss"
MEANT = {  # of algorithms that are spelt otherwise
    "algorithm.adv_estimator=GRPO": "'grpo'", "algorithm.adv_estimator=gropo": "'grpo'",
    "algorithm.adv_estimator=REINFORCE++": "'reinforce_plus_plus'", "algorithm.adv_estimator=ppo": "recipe=ppo",
    "algorithm.adv_estimator=Dr_GRPO": "recipe=dr_grpo", f"{LOSS}.loss_mode=gspoo": "'gspo'",
    f"{LOSS}.loss_mode=gmpo": "recipe=gmpo",
}  # fmt: skip
REFUSED_ALGORITHMS = [
    (["algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=1"], "rollout.n=1: one sample cannot differ"),
    (["algorithm.filter_groups.max_num_gen_batches=-1"], "max_num_gen_batches=-1 must be at least 0"),
    (["reward.reward_kwargs={max_resp_len: 8, overlong_buffer_cfg: {enable: true, len: 9}}"],
     "overlong_buffer_cfg.len=9 is above reward.reward_kwargs.max_resp_len=8: lower it, or null"),
    (["algorithm.adv_estimator_kwargs={epsilom: 1}"], r"grpo takes no argument \['epsilom'\]: its kwargs are"),
    ([f"{LOSS}.kwargs={{a: 1, b: 2}}"], r"loss_mode=vanilla takes no argument \['a', 'b'\]: its kwargs are"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_batch_size=1", "actor_rollout_ref.rollout.n=1"], "one sequence a step.* raise either"),
        (["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=5"], "actor.*Set it to at most 4"),
        (["data.train_batch_size=4", "critic.ppo_mini_batch_size=5", "critic.enable=true"], "^critic.ppo.* at most 4"),
        (["actor_rollout_ref.actor.use_dynamic_bsz=false"], r"needs .*ppo_micro_batch_size_per_gpu, e\.g\. 8"),
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24"], "is below .* = 25: raise it to at least 25"),
        (["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9", "algorithm.use_kl_in_reward=true"], "ref.log_prob"),
        (["critic.use_dynamic_bsz=false", "critic.enable=true"], "critic.use_dynamic_bsz=false needs critic.ppo_micro"),
        (["actor_rollout_ref.rollout.prompt_length=9"], "prompt_length=9 is below data.max_prompt_length=24"),
        (["actor_rollout_ref.rollout.response_length=9"], "response_length=9 is above data.max_response_length=1"),
        (["trainer.nnodes=2", "trainer.executor=local"], "ask for 2 workers, and .*=local has one: leave it null"),
        (["trainer.n_gpus_per_node=8", "trainer.executor=local"], "n_gpus_per_node=8.* ask for 8 workers"),
        (["actor_rollout_ref.rollout.name=trtllm"], "name=trtllm is none of hf, vllm, .*, nor a file"),
        (["algorithm.adv_estimator=gae", "critic.enable=false"], "gae needs values, .* leave that out"),
        (["actor_rollout_ref.actor.optim.betas=[1.0,0.9]"], r"betas=\[1.0, 0.9\] must be two numbers in \[0, 1\)"),
        (["trainer.resume_mode=resume_path"], "needs trainer.resume_from_path"),
        (["env.val_episodes=0", "trainer.test_freq=1"], "nothing to validate on: set"),
        (["actor_rollout_ref.actor.checkpoint.save_contents=[model,optimiser]"], "holds .'optimiser'.: it can hold"),
        (["env.id=null"], "nothing to train on: set data.train_files"),
        (["data.train_files=x.jsonl"], "both set: prompts come from one of them"),
        (["env.id=null", "data.custom_cls.path=null", "data.train_files=[x.jsonl]"], "=x.jsonl: there is no such file"),
        (["reward.reward_manager.path=mine.py", "reward.custom_reward_function.path=score.py"],
         "path: mine.py, .*and reward.custom_reward_function.path=score.py scores them: take one of the two back"),
        (["trainer.default_local_dir=Makefile/run"], r"cannot be written to \(Not a directory\): name another folder"),
        (["trainer.default_local_dir=/proc/run"], "cannot be written to .*: name another folder"),
        (["trainer.default_local_dir=s3://bucket/run"], r"s3://bucket/run: files are written to a disk\. Mount it"),
        *REFUSED_ALGORITHMS,
        *(([key], f"^{re.escape(key)}: there is none of this name. Did you mean {one}") for key, one in MEANT.items()),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused_with_a_way_out(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config = compose(*overrides)
        check_config(config)
        check_names(config)
        check_algorithm(config)
        check_roles(config, needed_roles(config))


def test_settings_of_a_critic_that_nobody_builds_are_not_refused():
    config = compose("algorithm.adv_estimator=grpo", "critic={use_dynamic_bsz: false, ppo_mini_batch_size: 99}")
    check_roles(config, needed_roles(config))


ROLLOUT = "actor_rollout_ref.rollout"


def check_engine(*overrides: str, workers: int = 1) -> None:
    rollout = compose(*overrides).actor_rollout_ref.rollout
    load_rollout_class(rollout.name).check(rollout, workers, gpus=0)


SPLIT = f"{ROLLOUT}.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("installed", "override", "workers", "said"),
    [
        (False, SPLIT, 2, r"name=vllm: vLLM is not installed here\. `make setup-vllm`.*name=hf"),
        (True, f"{ROLLOUT}.max_model_len=25", 1, None),
        (True, f"{ROLLOUT}.max_model_len=24", 1, r"max_model_len=24 is below .* = 25: leave it null"),
        (True, SPLIT, 2, None),
        (True, SPLIT, 4, None),
        (True, SPLIT, 3, r"tensor_model_parallel_size=2 does not divide the 3 workers"),
    ],
)
def test_vllm_is_accepted_where_it_is_installed_and_split_over_workers_that_there_are(
    installed, override, workers, said, monkeypatch
):
    monkeypatch.setattr(vllm_rollout_spmd, "find_spec", lambda name: object() if installed else None)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_engine(f"{ROLLOUT}.name=vllm", override, workers=workers)


def test_an_engine_is_split_over_the_workers_of_one_machine(monkeypatch):
    monkeypatch.setattr(vllm_rollout_spmd, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"does not divide the 1 workers of a machine"):
        ray_group.check_machine(compose(f"{ROLLOUT}.name=vllm", SPLIT, "trainer.nnodes=2", "trainer.n_gpus_per_node=0"))


def test_settings_of_vllm_that_hf_does_not_read_are_named(capsys):
    check_engine(f"{ROLLOUT}.max_num_batched_tokens=64")
    assert capsys.readouterr().err == ""
    others = ("gpu_memory_utilization=0.4", "load_format=dummy_dtensor", "free_cache_engine=false")
    check_engine(*(f"{ROLLOUT}.{setting}" for setting in others))
    assert f"{ROLLOUT} sets gpu_memory_utilization, free_cache_engine, which" in capsys.readouterr().err
    config = compose(f"{ROLLOUT}.engine_kwargs.vllm.block_size=64")
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"block_size": 64}}


@pytest.mark.parametrize("rows", [1, 4])
def test_a_default_batch_size_fits_a_small_file(tiny_model, tmp_path, monkeypatch, capsys, rows):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "ground_truth": "2", "data_source": "math"}\n' * rows)
    monkeypatch.setattr(
        "workers.launch.start_pools", lambda config, *_: sys.exit(f"{config.data.train_batch_size} prompts")
    )
    settings = f"""data.train_files={tmp_path}/rows.jsonl actor_rollout_ref.model.path={tiny_model} trainer.test_freq=-1
        trainer.default_local_dir={tmp_path}/run data.max_prompt_length=32 data.max_response_length=4"""
    with pytest.raises(SystemExit, match=f"^{rows} prompts"):
        main.run(compose(*settings.split(), name="ppo_trainer"))
    said = capsys.readouterr()
    assert f"data.train_batch_size=1024, the default, is above the {rows} rows of an epoch" in said.err
    assert f"\n{rows} prompt" in said.out


# What start-up prints


@pytest.mark.parametrize(
    ("prompts", "n", "actor", "sentence"),
    [
        (8, 4, "", "8 prompts × 4 samples = 32 sequences a step → 1 update of 32 sequences → {} 16384 tokens."),
        (7, 5, "ppo_mini_batch_size=3",
         "7 prompts × 5 samples = 35 sequences a step → 3 updates of up to 15 sequences → {} 16384 tokens."),
        (6, 2, "ppo_mini_batch_size=2 ppo_epochs=4 ppo_micro_batch_size_per_gpu=3",
         "6 prompts × 2 samples = 12 sequences a step → 3 updates of 4 sequences, 4 times → {} 3 sequences."),
        (1, 2, "ppo_micro_batch_size_per_gpu=3 use_dynamic_bsz=true ppo_max_token_len_per_gpu=99",
         "1 prompt × 2 samples = 2 sequences a step → 1 update of 2 sequences → {} 99 tokens."),
    ],
)  # fmt: skip
def test_the_batch_arithmetic_in_one_sentence(prompts, n, actor, sentence):
    sizes = [f"data.train_batch_size={prompts}", f"actor_rollout_ref.rollout.n={n}"]
    config = compose(*sizes, *(f"actor_rollout_ref.actor.{setting}" for setting in actor.split()))
    assert batch_arithmetic(config) == sentence.format("forward passes of at most")


# The schema


def sections(cls: type) -> list[type]:
    """`cls` and every section class below it."""
    below = [item.default_factory() for item in fields(cls) if callable(item.default_factory)]
    return [cls, *(found for value in below if is_dataclass(value) for found in sections(type(value)))]


def sections_of_extras() -> Iterator[type]:
    for path in (ROOT / "extras").glob("*/settings.py"):
        module = import_module(f"extras.{path.parent.name}.settings")
        classes = (it for it in vars(module).values() if isinstance(it, type) and it.__module__ == module.__name__)
        yield from (cls for cls in classes if issubclass(cls, Frozen))


ALL_SECTIONS = list(dict.fromkeys([*sections(Config), *filter(is_dataclass, sections_of_extras())]))


def test_nothing_can_be_set_after_start_up():
    def check(section: Any) -> None:
        for item in fields(section):
            value = getattr(section, item.name)
            with pytest.raises(FrozenInstanceError, match="read-only"):
                setattr(section, item.name, value)
            if is_dataclass(value):
                check(value)

    check(compose())


@pytest.mark.parametrize(
    ("section", "name", "nearest"),
    [("algorithm", "policy_loss_fn", ""), ("trainer", "save_frq", "save_freq"), ("data", "level", "")],
)
def test_what_is_no_setting_cannot_be_set(section, name, nearest):
    with pytest.raises(FrozenInstanceError, match=rf"has no setting '{name}'.*{nearest}"):
        setattr(compose()[section], name, 5)


def names_read() -> set[str]:
    """Attributes that are read, and texts, in all modules but those that declare settings."""
    files = shipped_modules("configs", "data", "training", "workers", "custom", "scripts", "extras")
    files = [ROOT / "main.py", *(file for file in files if file.name != "schema.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return attributes | texts | {key.rpartition(".")[2] for key in extras.TABLE["stage"]}  # named by their settings


def test_every_key_is_read_somewhere():
    read = names_read()
    assert [item.name for cls in ALL_SECTIONS for item in fields(cls) if item.name not in read] == []
    assert "a_key_of_" + "nobody" not in read


# One seed

SEEDING_CALLS = ("manual_seed", "seed", "default_rng", "RandomState", "Random", "manual_seed_all")


def unseeded_generators(source: str) -> list[int]:
    """Lines where a random generator gets no seed, a literal one, or one of the clock's."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in SEEDING_CALLS]
    return [
        call.lineno
        for call in named
        if not call.args or not any(isinstance(node, ast.Name) for argument in call.args for node in ast.walk(argument))
    ]


def test_no_generator_is_seeded_by_a_literal_or_by_nothing():
    folders = ("configs", "data", "training", "workers", "custom", "scripts", "benchmarks")
    files = [ROOT / "main.py", *shipped_modules(*folders)]
    found = {str(file): lines for file in files if (lines := unseeded_generators(file.read_text()))}
    assert found == {}, "every generator gets a seed that follows from trainer.seed"


def test_a_section_is_read_like_verls_configs():
    data = compose().data
    assert data.get("max_prompt_length", 7) == data["max_prompt_length"] == data.max_prompt_length
    assert data.get("no_such_key", 7) == 7 and data.get("no_such_key") is None and data.get("seed", 7) is None
    assert {**data}.keys() == {item.name for item in fields(data)} == set(data) and "seed" in data and "no" not in data
    with pytest.raises(KeyError, match="no_such_key"):
        data["no_such_key"]


def test_a_dataset_class_takes_keys_of_its_own():
    given = ("path=mine.py", "name=Mine", "kwargs.size=3", "level=2", "words.first=one", "extras.b=1")
    config = compose(*(f"data.custom_cls.{setting}" for setting in given))
    own = config.data.custom_cls
    assert own.level == own.get("level") == own["level"] == 2 and own.get("words") == {"first": "one"} and own.b == 1
    assert own.kwargs == {"size": 3} and (own.path, own.name) == ("mine.py", "Mine")
    assert asdict(config)["data"]["custom_cls"]["extras"] == {"b": 1, "level": 2, "words": {"first": "one"}}
    assert copy.deepcopy(own) == pickle.loads(pickle.dumps(own)) == own
    with pytest.raises(AttributeError, match="has no 'size'; it has path, name, kwargs, extras, "):
        own.size  # noqa: B018
    with pytest.raises(ConfigError, match=r"unknown key 'data\.sampler\.level'.*where data.sampler.class_path names"):
        compose("+data.sampler.level=2")
    files = ("env.id=null", "data.train_files=a.jsonl", "data.custom_cls.path=mine.py", "data.sampler.class_path=b.py")
    data = compose(*files, "+data.words.first=one", "data.sampler.keep=2").data
    assert data.words == data.get("words") == {"first": "one"} and data.get("sampler", {}).get("keep") == 2
    for given in (("data.train_batchsize=2", *files), ("+data.level=2", "data.custom_cls.path=mine.py")):
        with pytest.raises(ConfigError, match=r"unknown key 'data\.(train_batchsize|level)'"):
            compose(*given)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("data.sampler.clas_name=x", r"data\.sampler\.clas_name .* Did you mean 'data.sampler.class_name'"),
        ("data.sampler.kwarg={a: 1}", r"data\.sampler\.kwarg\.a .* Did you mean 'data.sampler.kwargs'"),
        ("data.custom_cls.kwarg.a=1", r"data\.custom_cls\.kwarg\.a .* Did you mean 'data.custom_cls.kwargs'"),
    ],
)
def test_a_key_that_is_kept_for_a_users_class_is_told_with_the_nearest_of_ours(key, told, capsys):
    compose("data.sampler.class_path=a.py", "data.custom_cls.path=mine.py", key)
    assert re.search(told, capsys.readouterr().err)


KL, ACTOR = "algorithm.kl_ctrl", "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "switch", "idle"),
    [
        (f"{KL}.type=adaptive {KL}.horizon=5", "algorithm.use_kl_in_reward", f"{KL}.horizon, {KL}.type"),
        # A default that is set was meant, too.
        (f"{KL}={{type:adaptive}} {KL}.kl_coef=0.001", "algorithm.use_kl_in_reward", f"{KL}.kl_coef, {KL}.type"),
        (f"algorithm.use_kl_in_reward=false {KL}.type=adaptive", "", ""),  # who turns it off knows
        (f"algorithm.use_kl_in_reward=true {KL}.target_kl=1", f"{KL}.type=adaptive", f"{KL}.target_kl"),
        (f"recipe=ppo {ACTOR}.kl_loss_coef=1", f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"),
        (f"{ACTOR}.kl_loss_coef=1 {ACTOR}.optim.num_cycles=1", "", ""),  # the yaml turns both on
    ],
)
def test_settings_under_a_switch_that_is_off_are_told_once(overrides, switch, idle, capsys):
    compose(*overrides.split())
    assert capsys.readouterr().err == (f"notice: without {switch}, nothing reads {idle}.\n" if idle else "")


def test_of_a_users_yaml_what_it_sets_is_told_and_not_what_it_inherits(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("defaults: [frozenlake, _self_]\nalgorithm: {kl_penalty: k2}\n")
    load(tmp_path, "mine", "recipe=ppo")  # which turns the KL of frozenlake off
    assert (
        capsys.readouterr().err == "notice: without algorithm.use_kl_in_reward, nothing reads algorithm.kl_penalty.\n"
    )


def test_switches_and_what_is_under_them_are_settings():
    for cls in sections(Config):
        rules = ";".join(kind.switches for kind in cls.__mro__ if issubclass(kind, Frozen))
        for name in re.findall(r"[\w.]+", re.sub("=[^:]*", "", rules)):
            assert is_known(name, cls) or is_known(f"{name}.", cls), (cls, name)


def test_a_notebook_composes_as_a_command_does():
    overrides = ["trainer.seed=3", "actor_rollout_ref.model.path=DIR"]
    assert loader.compose("frozenlake", overrides) == compose(*overrides, name="frozenlake")
    with pytest.raises(ConfigError, match=r"trainer.sed"):
        loader.compose("frozenlake", ["trainer.sed=3"])
