"""The table of roles: one of a user's file that learns, a teacher, and what a loss or a trainer asks for by name."""

import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import main
from configs.errors import ConfigError
from custom.tiny_model import save_tiny_model
from tests.runs import compose, learning_metrics, short_run, whole_and_resumed
from training.core_algos import register_policy_loss
from training.roles import ROLES, columns_read, needed_roles
from workers.model_worker import model_bytes
from workers.parallel import Replicas

GUESSER = """
from dataclasses import dataclass
from transformers import AutoModelForTokenClassification
from configs.schema import CriticConfig
from configs.settings import setting
from data.protocol import DataProto
from training.core_algos import register_adv_est
from training.roles import ROLES, RoleSpec, register_role
from workers.engine import TrainedModel
from workers.micro_batches import MicroBatchSize, cut_share, score

@dataclass
class Settings(CriticConfig):
    unit: float = setting(1.0, "What a guess is counted in.", gt=0)

class Guesser(TrainedModel):
    def compute(self, batch):
        guesses = score(self.engine.module, batch, self.size, 1.0, ["values"]).values
        return DataProto.from_dict({"guesses": guesses * self.unit * batch.batch["response_mask"]})

    def loss(self, micro, tokens):
        guesses = self.engine.module.token_scores(micro, 1.0, ["values"]).values
        if micro.is_dummy:
            return 0 * guesses.sum()
        return ((guesses * self.unit - micro.columns["returns"]) ** 2 * micro.columns["response_mask"]).sum() / tokens

    def update(self, batch, update):
        micros = cut_share(batch, self.size, ["response_mask", "returns"], self.engine.module)
        losses = (self.loss(micro, update.counts["batch_num_tokens"]) for micro in micros)
        return {f"guesser/{name}": value for name, value in self.engine.update(losses, update.step).items()}

def build(worker):
    settings = ROLES["guesser"].settings(worker.config)
    guesser = Guesser(worker.train(worker.load_values(settings.model.path), settings.optim))
    guesser.size, guesser.unit = MicroBatchSize.of_updates(settings), settings.unit
    return guesser

register_role(RoleSpec(
    "guesser", build, section=Settings, head=AutoModelForTokenClassification, columns=("guesses",), update="update"
))

@register_adv_est("better_than_guessed")
def better_than_guessed(token_level_rewards, response_mask, guesses):
    returns = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return (returns - guesses) * response_mask, returns
"""
NO_KL = "actor_rollout_ref.actor.use_kl_loss=false"  # as configs/frozenlake.yaml has one
ESTIMATOR = "algorithm.adv_estimator=better_than_guessed"


@pytest.fixture(autouse=True)
def table(restored_registries):
    """Forgets the roles that a test adds."""
    before = dict(ROLES)
    yield
    ROLES.clear()
    ROLES.update(before)


@pytest.fixture
def guesser(tmp_path: Path) -> list[str]:
    (tmp_path / "guesser.py").write_text(GUESSER)
    return [f"actor_rollout_ref.model.external_lib={tmp_path}/guesser.py", ESTIMATOR, NO_KL, "env.val_episodes=0"]


def test_a_fifth_role_of_a_users_file_learns_and_is_in_checkpoints(tmp_path, tiny_model, guesser):
    metrics, again = whole_and_resumed(tiny_model, tmp_path, *guesser)
    assert all(metrics[step]["guesser/grad_norm"] > 0 for step in (1, 2, 3, 4))
    assert sorted(part.name for part in (tmp_path / "whole/global_step_2").iterdir() if part.is_dir()) == [
        "actor", "guesser",
    ]  # fmt: skip
    assert [again[step] for step in (3, 4)] == [metrics[step] for step in (3, 4)]


def test_a_role_plays_only_where_its_columns_are_read(tiny_model, tmp_path, guesser):
    config = compose(*short_run(tiny_model, tmp_path, *guesser))
    main.build(config)
    assert needed_roles(config) == ["actor", "rollout", "guesser"]
    assert needed_roles(compose(*short_run(tiny_model, tmp_path, NO_KL))) == ["actor", "rollout"]
    assert "guesser" in needed_roles(compose(*short_run(tiny_model, tmp_path, NO_KL)), trainer_reads=["guesses"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["roles.guesser.optim.lrr=1"], r"unknown key 'roles\.guesser\.optim\.lrr'\. Did you mean '.*optim\.lr'\?"),
        (["roles.guesser.unit=0"], r"roles\.guesser\.unit=0.* must be above 0"),
        (["roles.guesser.unit=much"], r"roles\.guesser\.unit: Value 'much'"),
        (["roles.guesser.ppo_mini_batch_size=99"], r"roles\.guesser\.ppo_mini_batch_size=99 is above data"),
        (["roles.gueser.unit=2"], r"roles\.gueser: no role of this name has settings there\. Did you mean 'guesser'\?"),
    ],
)
def test_settings_of_a_users_role_are_checked(tiny_model, tmp_path, guesser, settings, message):
    with pytest.raises(ConfigError, match=message):
        main.build(compose(*short_run(tiny_model, tmp_path, *guesser, *settings)))


def test_a_users_role_has_its_settings_and_those_that_its_defaults_name(tiny_model, tmp_path, guesser):
    run = short_run(tiny_model, tmp_path, *guesser, "roles.guesser={optim: {lr: 0.5}, unit: 2}")
    config = compose(*run, "actor_rollout_ref.actor.loss_agg_mode=token-sum")
    main.build(config)
    settings = ROLES["guesser"].settings(config)
    assert (settings.optim.lr, settings.unit, settings.loss_agg_mode) == (0.5, 2.0, "token-sum")
    assert settings.model.path == str(tiny_model)
    held = model_bytes(config, {"policy": Replicas()})
    assert held["guesser"] > 15 / 16 * held["actor"]  # of a head of one number a token


KL = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1", "env.val_episodes=0"]


@pytest.fixture
def teacher(tmp_path) -> str:
    save_tiny_model(tmp_path / "teacher", seed=5, hidden_size=48, layers=2)
    return f"actor_rollout_ref.ref.model.path={tmp_path}/teacher"


def test_a_teacher_is_a_reference_with_other_weights(tmp_path, tiny_model, teacher):
    found = {}
    for name, more in {"own": [], "teacher": [teacher]}.items():
        main.run(compose(*short_run(tiny_model, tmp_path / name, *KL, *more, "trainer.total_training_steps=2")))
        found[name] = learning_metrics(tmp_path / name)
    assert found["own"][1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert found["teacher"][1]["actor/kl_loss"] > 1e-3


def test_a_teacher_that_nobody_listens_to_is_refused(tmp_path, tiny_model, teacher):
    with pytest.raises(ConfigError, match=r"ref\.model\.path names a teacher, and nothing reads ref_log_prob"):
        main.build(compose(*short_run(tiny_model, tmp_path / "run", teacher, NO_KL, "env.val_episodes=0")))


def test_a_teacher_of_other_tokens_is_refused(tmp_path, tiny_model, teacher):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"ref\.model\.path.*other tokens than the policy"):
        main.build(compose(*short_run(tiny_model, tmp_path / "run", teacher, *KL)))


def test_a_loss_that_names_a_column_has_its_role_play(tmp_path, tiny_model):
    seen = []

    @register_policy_loss("towards_the_reference")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", *, config, ref_log_prob):
        seen.append(ref_log_prob.shape == log_prob.shape)
        gap = (log_prob - ref_log_prob) * response_mask
        return (gap**2).sum() / config.global_batch_info["batch_num_tokens"] - (log_prob * advantages).sum() * 0, {}

    overrides = ["actor_rollout_ref.actor.policy_loss.loss_mode=towards_the_reference", "env.val_episodes=0"]
    config = compose(*short_run(tiny_model, tmp_path, *overrides, "trainer.total_training_steps=1"))
    assert "ref_log_prob" in columns_read(config) and "ref" in needed_roles(config)
    main.run(config)
    assert seen and all(seen) and math.isfinite(learning_metrics(tmp_path)[1]["actor/pg_loss"])
