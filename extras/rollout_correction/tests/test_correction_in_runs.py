"""Rollout correction as the stage of a run: settings and presets, what it has roles compute, what is learnt from."""

import json
import math
from dataclasses import replace

import pytest
import torch

import main
from configs.checks import check_config
from configs.errors import ConfigError
from data.protocol import DataProto
from data.types import SamplingParams
from extras.rollout_correction.correction import correct_rollout
from extras.rollout_correction.settings import PRESETS, RolloutCorrectionConfig
from tests.runs import compose, learning_metrics, short_run
from tests.test_advantage import MASK, make_batch
from tests.test_config import load
from tests.test_ray_trainer import ALL_ROWS, ARMS, MINI, REAL, Bandit, assert_stages_run, make_trainer
from training.mini_batches import first_policy_step
from training.plan import check_algorithm
from training.roles import POLICY_COLUMNS, columns_read

CORRECTION, LOSS = "algorithm.rollout_correction", "actor_rollout_ref.actor.policy_loss"
REJECT = f"{CORRECTION}.rollout_rs"


# Settings


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_rollout_correction_goes_by_its_name(name, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"algorithm:\n  rollout_correction: {name}\n")
    wanted = getattr(RolloutCorrectionConfig, name)()
    named, written = compose(f"algorithm.rollout_correction={name}"), load(tmp_path, "mine")
    assert named.algorithm.rollout_correction == written.algorithm.rollout_correction == wanted
    check_config(named)


def test_single_keys_of_a_preset_are_changed_after_it_and_a_preset_replaces_all_before_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("algorithm: {rollout_correction: decoupled_seq_is_rs}\n")
    key = "algorithm.rollout_correction"
    changed = load(tmp_path, "mine", f"{key}.rollout_is_threshold=3.0").algorithm.rollout_correction
    assert changed == replace(RolloutCorrectionConfig.decoupled_seq_is_rs(), rollout_is_threshold=3.0)
    other = [f"{key}.rollout_is_threshold=3.0", f"{key}=decoupled_token_is", f"{key}.rollout_is_batch_normalize=true"]
    replaced = load(tmp_path, "mine", *other).algorithm.rollout_correction
    assert replaced == replace(RolloutCorrectionConfig.decoupled_token_is(), rollout_is_batch_normalize=True)


def test_a_preset_is_inherited_in_parts_and_null_corrects_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text("algorithm: {rollout_correction: {preset: decoupled_seq_is_rs}}\n")
    child = "defaults: [mine]\nalgorithm: {rollout_correction: {rollout_is_threshold: 3}}\n"
    (tmp_path / "child.yaml").write_text(child)
    wanted = replace(RolloutCorrectionConfig.decoupled_seq_is_rs(), rollout_is_threshold=3)
    assert load(tmp_path, "child").algorithm.rollout_correction == wanted
    nothing = load(tmp_path, "child", "algorithm.rollout_correction=null").algorithm.rollout_correction
    assert nothing == RolloutCorrectionConfig.disabled()


REFUSED = [
    ([f"{CORRECTION}.rollout_is_threshold=1_2_3_x"], rf"^{CORRECTION}.rollout_is_threshold is '1_2_3_x'; .*an upper"),
    ([f"{CORRECTION}.rollout_is_threshold='2.0_0.5'"], "rollout_is_threshold is '2.0_0.5'; .* 0 < lower <= upper"),
    ([f"{CORRECTION}.rollout_is_threshold=-1"], "rollout_is_threshold is -1; "),
    ([f"{CORRECTION}.rollout_is_threshold=true"], "rollout_is_threshold is True, a bool; "),
    ([f"{CORRECTION}.rollout_is=batch"], "rollout_is='batch' must be one of token, sequence"),
    ([f"{REJECT}=seq_k9"], "rollout_rs is 'seq_k9', but must be one or more of token_k1"),
    ([f"{REJECT}=token_k1"], "rollout_rs is 'token_k1' but rollout_rs_threshold is null: set how far"),
    ([f"{REJECT}='token_k1,token_k2'", f"{REJECT}_threshold='1.0,2.0,3.0'"], "has 3 entries, .* names 2 options"),
    ([f"{REJECT}=token_k1", f"{REJECT}_threshold=0.5"], "which means the band from 2 to 0.5: give an upper bound of"),
    ([f"{REJECT}=token_k2", f"{REJECT}_threshold='0.5_2.0'"], "a statistic that starts at 0"),
    ([f"{CORRECTION}=bypass_pg_is", f"{LOSS}.loss_mode=gspo"], "bypass_mode=true brings .*loss_mode=gspo"),
    ([f"{LOSS}.loss_mode=bypass_mode"], rf"chosen by {CORRECTION}.bypass_mode=true: set that"),
    ([f"{CORRECTION}=bypass_pg_is", f"{CORRECTION}.rollout_is_batch_normalize=true"], "normalize=true needs a whole"),
    ([f"{CORRECTION}=decoupled_tokn_is"], "no such preset. Did you mean 'decoupled_token_is'. disabled, decoupled_tok"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_settings_that_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        compose(*overrides)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_what_bypass_mode_does_not_compute_is_refused_at_the_start(name):
    with pytest.raises(ConfigError, match="bypass_mode"):
        check_algorithm(compose(f"algorithm.adv_estimator={name}", "algorithm.rollout_correction=bypass_pg_is"))


# Columns


@pytest.mark.parametrize(
    ("overrides", "columns"),
    [
        (["algorithm.use_kl_in_reward=true", f"{CORRECTION}=bypass_ppo_clip"], []),
        ([f"{CORRECTION}.rollout_is=sequence"], ["old_log_probs"]),
        ([f"{REJECT}=token_k1", f"{REJECT}_threshold=2.0"], ["old_log_probs"]),
        ([f"{CORRECTION}.rollout_is_threshold=3.0"], []),
    ],
)
def test_the_log_prob_pass_is_made_where_it_is_read(overrides, columns):
    config = compose("data.train_batch_size=4", "algorithm.adv_estimator=grpo", *overrides, name="ppo_trainer")
    assert sorted(columns_read(config, first_policy_step(config) <= 1).intersection(POLICY_COLUMNS)) == columns


TWICE = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "algorithm.use_kl_in_reward=true")


@pytest.mark.parametrize(
    ("overrides", "roles", "stages"),
    [
        (["decoupled_token_is"], {}, "generate reward old_log_prob update_actor update_weights"),
        (["bypass_ppo_clip", *TWICE], {"ref": True}, "generate reward ref update_actor update_actor update_weights"),
    ],
    ids=["corrected", "bypassed"],
)
def test_stages_run_in_order_and_only_where_needed(tmp_path, overrides, roles, stages):
    preset, *others = overrides
    assert_stages_run(tmp_path, [f"{CORRECTION}={preset}", *others], roles, stages.split())


def corrected(batch: DataProto, settings: RolloutCorrectionConfig) -> dict[str, float]:
    batch.batch["loss_mask"] = batch.batch["response_mask"]
    return correct_rollout(batch, settings)


def test_the_batchs_mask_stays_and_another_is_handed_out():
    old, rollout = torch.zeros(3, 4), torch.zeros(3, 4)
    rollout[0, 3] = -math.log(4)  # π_rollout / π_train is a quarter: rejected, and its weight of 4 cut to 2
    batch = make_batch(old_log_probs=old, rollout_log_probs=rollout)
    settings = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    metrics = corrected(batch, RolloutCorrectionConfig(**settings))
    assert batch.loss_mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert torch.equal(batch.response_mask, MASK)
    assert batch.rollout_is_weights.tolist() == [[1, 1, 0, 2], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.25
    assert metrics["training/rollout_probs_diff_max"] == 0.75


@pytest.mark.parametrize("missing", ["old_log_probs", "bypass"])
def test_without_old_log_probs_and_in_bypass_mode_nothing_is_corrected(missing):
    columns = {} if missing == "old_log_probs" else {"old_log_probs": torch.zeros(3, 4)}
    batch = make_batch(rollout_log_probs=torch.full((3, 4), -9.0), **columns)
    assert corrected(batch, RolloutCorrectionConfig(rollout_is="token", bypass_mode=missing == "bypass")) == {}
    assert torch.equal(batch.loss_mask, MASK) and "rollout_is_weights" not in batch
    assert missing != "bypass" or torch.equal(batch.old_log_probs, batch.rollout_log_probs)


def test_without_the_engines_log_probs_nothing_is_corrected_and_a_correction_is_refused():
    batch = make_batch(old_log_probs=torch.zeros(3, 4))
    correction = RolloutCorrectionConfig
    assert corrected(batch, correction()) == {} and torch.equal(batch.loss_mask, MASK)
    for asked in (correction.bypass_ppo_clip(), correction.decoupled_token_is(), correction.decoupled_geo_rs()):
        with pytest.raises(ValueError, match=r"reads the column rollout_log_probs, .* return it"):
            corrected(batch, asked)


# Runs


class Drifting(Bandit):
    """A bandit whose engine thinks R four times less likely than it is, and is right about L."""

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        batch = super().generate_sequences(prompts, sampling, seed)
        drift = torch.where(batch.responses == ARMS[1], math.log(4), 0.0)
        batch.batch["rollout_log_probs"] = self.log_probs(batch).detach() - drift
        return batch


def test_weights_and_rejection_reach_the_update_and_leave_statistics_and_transcripts_alone(tmp_path):
    overrides = [f"{CORRECTION}.rollout_is=token", f"{REJECT}=token_k1", f"{REJECT}_threshold='0.5_2.0'"]
    overrides.append(f"trainer.rollout_data_dir={tmp_path}/rollouts")
    trainer, drifting = make_trainer(tmp_path, MINI, ALL_ROWS, *overrides, bandit=Drifting())
    trainer.fit()
    plain, exact = make_trainer(tmp_path / "plain", MINI, ALL_ROWS)
    plain.fit()
    [batch], [same] = trainer.train_loader.sampler.seen, plain.train_loader.sampler.seen
    right = batch.responses == ARMS[1]
    assert 0 < right.sum() < 16 and torch.equal(batch.responses, same.responses)
    assert batch.response_mask.all()  # a rejected token is still the policy's
    assert torch.equal(batch.advantages, same.advantages)  # and was measured
    for update, told, before in zip(drifting.updates, drifting.told, exact.updates, strict=True):
        rejected = update.responses == ARMS[1]
        assert torch.equal(update.response_mask.bool(), ~rejected) and before.response_mask.all()
        assert torch.equal(update.rollout_is_weights, torch.where(rejected, 2.0, 1.0))
        counts = told.counts
        assert counts["batch_num_tokens"] == counts["global_batch_size"] == int((~rejected).sum())
        assert "rollout_is_weights" not in before.batch
    rows = [json.loads(line) for line in (tmp_path / "rollouts/1.jsonl").read_text().splitlines()]
    assert [row["output"] for row in rows] == ["R" if is_right else "L" for is_right in right[:, 0]]
    assert [row["rows"][0]["loss_mask"] for row in rows] == (~right).int().tolist()
    metrics, share = learning_metrics(tmp_path)[1], right.float().mean().item()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == share
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1 + share)
    assert metrics["training/rollout_probs_diff_max"] == 0.5 - 0.125
    assert metrics["critic/score/mean"] == learning_metrics(tmp_path / "plain")[1]["critic/score/mean"]


def test_in_bypass_mode_the_rollouts_log_probs_are_the_old_ones_of_every_update(tmp_path):
    epochs = "actor_rollout_ref.actor.ppo_epochs=2"
    trainer, drifting = make_trainer(tmp_path, MINI, epochs, f"{CORRECTION}=bypass_pg_is", bandit=Drifting(), steps=2)
    trainer.fit()
    assert "old_log_prob" not in drifting.calls and len(drifting.updates) == 8
    for first, later in zip(drifting.updates[::4], drifting.updates[2::4], strict=True):  # the same rows
        assert torch.equal(first.old_log_probs, first.rollout_log_probs)
        assert torch.equal(later.old_log_probs, first.old_log_probs) and "rollout_log_probs" not in later
    for update in drifting.updates:
        assert update.response_mask.all() and "rollout_is_weights" not in update.batch
    assert drifting.updates[0].old_log_probs.unique().tolist() == pytest.approx([math.log(0.125), math.log(0.5)])
    assert not [name for name in learning_metrics(tmp_path)[1] if name.startswith("rollout_corr/")]  # the loss's task


@pytest.mark.parametrize("preset", ["decoupled_geo_rs_token_tis", "decoupled_seq_is_rs"])
def test_the_exact_engine_has_no_drift(tmp_path, tiny_model, preset):
    main.run(compose(*short_run(tiny_model, tmp_path, *REAL, MINI, f"{CORRECTION}={preset}", "env.val_episodes=0")))
    zero = ["kl", "k3_kl", "log_ppl_abs_diff", "chi2_seq", "rollout_rs_masked_fraction", "rollout_is_std"]
    zero = [f"rollout_corr/{name}" for name in zero]
    zero += [f"training/rollout_probs_diff_{what}" for what in ("max", "mean", "std")]
    one = [f"rollout_corr/rollout_is_{what}" for what in ("mean", "max", "min", "eff_sample_size", "seq_mean")]
    one += ["rollout_corr/ppl_ratio", "training/rollout_probs_diff_valid", "training/rollout_actor_probs_pearson_corr"]
    for metrics in learning_metrics(tmp_path).values():
        assert {name: metrics[name] for name in zero} == pytest.approx(dict.fromkeys(zero, 0.0), abs=1e-5)
        assert {name: metrics[name] for name in one} == pytest.approx(dict.fromkeys(one, 1.0), abs=1e-5)
