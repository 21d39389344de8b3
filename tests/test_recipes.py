"""Every recipe by what it brings; every estimator and policy loss by a short real run that learns something. Recipes
that train are in test_golden.py."""

import functools
import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import main
from configs.checks import check_config
from configs.extras import has, present
from configs.loader import options
from tests.runs import ROOT, compose, learning_metrics, short_run
from training.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, AdvantageEstimator, get_policy_loss
from training.plan import check_algorithm
from training.roles import needed_roles

# Answers nearly always differ in it: no group ties. `even` and `short` are rewards for gdpo, `flawed` marks for fapo.
REWARD = """
def compute_reward(prompt, response, ground_truth):
    score = sum(map(ord, response)) % 97 / 97
    return {"score": score, "even": score * 97 % 2, "short": -len(set(response)), "flawed": score > 0.9}
"""
SHIPPED_LOSSES = [name for name in present("policy_loss") if name != "bypass_mode"]  # a stage chooses it
NEEDED = {
    "algorithm.adv_estimator=gdpo": ["algorithm.gdpo_reward_keys=[even,short]"],
    "actor_rollout_ref.actor.policy_loss.loss_mode=dro": ["actor_rollout_ref.actor.policy_loss.dro_beta=0.05"],
}


@pytest.fixture
def two_steps(tiny_model: Path, tmp_path: Path):
    """two_steps(more…): the metrics of both steps, each of two updates of 4 rows, and whether the weights moved."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)

    def train(*more: str) -> tuple[list[dict[str, float]], bool]:
        config = compose(
            *short_run(tiny_model, tmp_path),
            *(f"reward.custom_reward_function.path={reward}", "reward.custom_reward_function.name=compute_reward"),
            *("data.max_response_length=5", "env.val_episodes=0", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
            "actor_rollout_ref.actor.optim.weight_decay=0",  # so that nothing but the loss moves the weights
            "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
            "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
            *("trainer.n_threads=1", "trainer.total_training_steps=2", "trainer.save_freq=2"),
            *more,
        )
        main.run(config)
        before = load_file(tiny_model / "model.safetensors")
        after = load_file(tmp_path / "global_step_2/actor/huggingface/model.safetensors")
        moved = before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before)
        return list(learning_metrics(tmp_path).values()), moved

    return train


def assert_learnt(steps: list[dict[str, float]], moved: bool) -> None:
    assert len(steps) == 2 and moved
    for metrics in steps:
        assert [name for name, value in metrics.items() if value is None or not math.isfinite(value)] == []
        assert metrics["actor/grad_norm"] > 0 and metrics["actor/skipped_updates"] == 0


def is_whole(recipe: str) -> bool:
    """Says whether this copy has the extras that a recipe asks for."""
    text = (ROOT / f"configs/recipe/{recipe}.yaml").read_text()
    chosen = re.findall(r"(?:adv_estimator|loss_mode): (\w+)", text)
    stage = "use_pf_ppo" not in text or has("stage", "algorithm.use_pf_ppo")
    filters = "filter_groups" not in text or has("trainer", "algorithm.filter_groups.enable")
    return stage and filters and {*chosen} <= {*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY}


RECIPES = [*filter(is_whole, options("recipe"))]
# What a recipe is known by, beside its estimator and its loss.
ROLES = {"ppo": ("critic",), "pf_ppo": ("critic",), "prime": ("ref", "prm")} | dict.fromkeys(
    ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "opd", "pair", "spin", "flowrl"),
    ("ref",),
)
TEACHER = {"opd": ["actor_rollout_ref.ref.model.path=teacher"]}


@pytest.mark.parametrize("name", ["frozenlake", "gsm8k"])  # both with a KL in the loss of their own
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_brings_the_roles_it_needs_and_no_others_and_nothing_is_told(recipe, name, capsys):
    files = [] if name == "frozenlake" else ["data.train_files=datasets:x", "data.val_files=datasets:x"]
    config = compose(f"recipe={recipe}", *TEACHER.get(recipe, []), *files, name=name)
    assert capsys.readouterr().err == ""
    assert needed_roles(config)[2:] == [*ROLES.get(recipe, ())]
    actor = config.actor_rollout_ref.actor
    check_config(config)
    check_algorithm(config)
    coef = {"opd": 1.0, "spin": 0.3}.get(recipe, 0.001)
    assert not actor.use_kl_loss or (actor.kl_loss_coef == coef and not config.algorithm.use_kl_in_reward)


TAUGHT = {"opd", "no_rewards"}  # which learn from a teacher alone: extras/distillation/tests
REWARDED = [name for name in map(str, AdvantageEstimator) if name not in TAUGHT]
PAIRS = list(itertools.zip_longest(REWARDED, reversed(SHIPPED_LOSSES), fillvalue="vanilla"))


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_every_estimator_and_every_loss_trains(two_steps, monkeypatch, estimator, loss):
    calls = Counter()

    def counted(function, name: str):
        @functools.wraps(function)
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, estimator, counted(ADV_ESTIMATOR_REGISTRY[estimator], "estimator"))
    record = get_policy_loss(loss)
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, loss, replace(record, function=counted(record.function, "loss")))
    chosen = [f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    cut = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"  # two forward passes an update
    assert_learnt(*two_steps(cut, *chosen, *(more for choice in chosen for more in NEEDED.get(choice, []))))
    assert calls == {"estimator": 2, "loss": 4 if get_policy_loss(loss).over_mini_batch else 8}
