"""The actor's update equals its definition, written one row at a time, however the batch is cut."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.extras import present
from configs.schema import AGGREGATION_MODES, ActorConfig, OptimConfig, PolicyLossConfig
from data.protocol import DataProto
from data.seeding import seed_everything
from main import run
from tests.batches import (
    CUTS,
    TEMPERATURE,
    Recorded,
    aggregate,
    policy_tokens,
    ragged_batch,
    recorded,
    unpadded,
    update_of,
)
from tests.batches import relative_distance as distance
from tests.runs import compose, needs_algorithms, short_run
from training import core_algos
from training.core_algos import agg_loss, get_policy_loss, get_policy_loss_fn, kl_penalty, register_policy_loss
from training.losses import CLIPPED
from training.mini_batches import PolicyUpdates, learning_rows
from workers.dp_actor import DataParallelPPOActor, ReferencePolicy
from workers.engine import TrainEngine
from workers.micro_batches import MicroBatchSize

ALL_TERMS = ActorConfig(
    entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.3, optim=OptimConfig(lr=1e-3, clip_grad=1e9)
)


def make_actor(
    policy: PreTrainedModel, config: ActorConfig = ALL_TERMS, size: MicroBatchSize = CUTS["3 rows"]
) -> DataParallelPPOActor:
    engine = TrainEngine(copy.deepcopy(policy), config.optim, 10, torch.device("cpu"), torch.float32)
    return DataParallelPPOActor(config, engine, size, size)


def old_log_probs(policy: PreTrainedModel, batch: DataProto) -> Tensor:
    return make_actor(policy).compute_log_prob(batch, TEMPERATURE, ["old_log_probs"]).old_log_probs


def forwarded(actor: DataParallelPPOActor, with_gradient: bool = False) -> list[int]:
    """Returns a list to which each forward of the actor adds its tokens."""
    tokens: list[int] = []

    def note(module: Any, args: Any, kwargs: dict) -> None:
        tokens.append(kwargs["input_ids"].numel() * (torch.is_grad_enabled() or not with_gradient))

    actor.engine.module.base_model.register_forward_pre_hook(note, with_kwargs=True)
    return tokens


def update(actor: DataParallelPPOActor, batch: DataProto) -> Recorded:
    return recorded(actor.engine, lambda: actor.update_policy(batch, update_of(batch, actor.config)))


def slow_loss(module: PreTrainedModel, batch: DataProto, config: ActorConfig) -> Tensor:
    """PPO's loss with entropy and KL, token by token, each row alone and without padding."""
    losses = []
    for row in range(len(batch)):
        ids, prompt = unpadded(batch, row)
        distributions = (module(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
        losses.append([])
        for column in policy_tokens(batch, row):
            before = distributions[prompt + column - 1]
            log_prob, entropy = before[ids[prompt + column]], -(before.exp() * before).sum()
            old, ref, advantage, weight = (
                batch.batch[name][row, column]
                for name in ("old_log_probs", "ref_log_prob", "advantages", "rollout_is_weights")
            )
            ratio = (log_prob - old).exp()
            loss = max(-advantage * ratio, -advantage * ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio))
            if advantage < 0:
                loss = min(loss, -advantage * config.clip_ratio_c)
            kl = (ref - log_prob).exp() - (ref - log_prob) - 1
            losses[-1].append(loss * weight - config.entropy_coeff * entropy + config.kl_loss_coef * kl)
    return aggregate(losses, config.loss_agg_mode, scale=batch.batch["responses"].shape[1])


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_any_cut_gives_the_loss_gradient_and_step_of_the_definition(policy: PreTrainedModel, mode: str):
    config, batch = replace(ALL_TERMS, loss_agg_mode=mode), ragged_batch()
    twin = copy.deepcopy(policy)
    loss = slow_loss(twin, batch, config)
    loss.backward()
    wanted = [parameter.grad for parameter in twin.parameters()]
    first_metrics, _, first_weights = update(make_actor(policy, config, CUTS["all rows"]), batch)
    for name, size in CUTS.items():
        metrics, gradient, weights = update(make_actor(policy, config, size), batch)
        assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-5), name
        assert distance(gradient, wanted) < 1e-5, name
        assert distance(weights, first_weights) < 1e-6, name
        assert metrics == pytest.approx(first_metrics, rel=1e-4, abs=1e-7), name
    assert distance(first_weights, list(policy.parameters())) > 1e-3  # a step was made


def test_scores_are_those_of_each_row_alone(policy: PreTrainedModel):
    batch, ask = ragged_batch(), ["old_log_probs", "entropys", "sum_pi_squared"]
    for size in CUTS.values():
        scored = make_actor(policy, size=size).compute_log_prob(batch, TEMPERATURE, ask)
        reference = ReferencePolicy(copy.deepcopy(policy), size).compute_log_prob(batch, TEMPERATURE, ["ref_log_prob"])
        torch.testing.assert_close(scored.old_log_probs, reference.ref_log_prob, rtol=0, atol=0)
        for row in range(len(batch)):
            ids, prompt = unpadded(batch, row)
            with torch.no_grad():
                sampled_from = torch.distributions.Categorical(
                    logits=policy(ids[None]).logits[0, prompt - 1 : -1] / TEMPERATURE
                )
            policys = batch.response_mask[row].bool()
            wanted = sampled_from.log_prob(ids[prompt:]), sampled_from.entropy(), (sampled_from.probs**2).sum(-1)
            for name, column in zip(ask, wanted, strict=True):
                found = scored.batch[name][row]
                torch.testing.assert_close(
                    found[policys], column[policys[: len(ids) - prompt]], rtol=1e-5, atol=1e-7 if "pi" in name else 1e-5
                )
                assert found.dtype == torch.float32 and not found[~policys].any()


def test_a_loss_of_the_forward_by_hand_has_the_gradient_of_an_update(policy: PreTrainedModel):
    config, batch = ActorConfig(optim=OptimConfig(clip_grad=1e9)), ragged_batch()
    batch.batch = batch.batch.exclude("rollout_is_weights")
    actor = make_actor(policy, config)
    log_probs = actor.forward(batch, TEMPERATURE)
    torch.testing.assert_close(log_probs.detach(), old_log_probs(policy, batch))
    loss, _ = core_algos.compute_ppo_loss(batch.old_log_probs, log_probs, batch.advantages, batch.response_mask)
    loss.backward()
    metrics, gradient, _ = update(make_actor(policy, config), batch)
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert distance([parameter.grad for parameter in actor.engine.module.parameters()], gradient) < 1e-5


@pytest.mark.parametrize(("mini_batch_size", "updates"), [(4, 1), (2, 2), (3, 2)])
def test_the_first_update_of_a_batch_has_a_ratio_of_exactly_one(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mini_batch_size: int, updates: int
):
    """The ratio is 1 though log-probs and updates are cut differently; later updates have moved on."""
    largest: list[float] = []
    name = f"recording_{mini_batch_size}"

    @register_policy_loss(name)
    def recording(old_log_prob: Tensor, log_prob: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, dict]:
        loss, metrics = get_policy_loss_fn("vanilla")(old_log_prob, log_prob, *args, **kwargs)
        largest[-1] = max(largest[-1], (log_prob - old_log_prob).abs().max().item())
        return loss, metrics

    actor = f"policy_loss.loss_mode={name} ppo_mini_batch_size={mini_batch_size} ppo_micro_batch_size_per_gpu=3"
    config = compose(
        *short_run(tiny_model, tmp_path, "trainer.total_training_steps=3", "env.val_episodes=0"),
        *(f"actor_rollout_ref.actor.{setting}" for setting in [*actor.split(), "optim.lr_warmup_steps=0"]),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    )
    updating = DataParallelPPOActor.update_policy

    def update_policy(*arguments: Any) -> dict[str, float]:
        largest.append(0.0)
        return updating(*arguments)

    monkeypatch.setattr(DataParallelPPOActor, "update_policy", update_policy)
    run(config)
    assert len(largest) == 3 * updates
    assert largest[::updates] == [0.0, 0.0, 0.0]
    assert updates == 1 or min(largest[1::updates]) > 0


def test_without_old_log_probs_nothing_is_clipped_and_the_kl_is_zero(policy: PreTrainedModel):
    batch = ragged_batch()
    batch.batch = batch.batch.exclude("old_log_probs")
    metrics, gradient, _ = update(make_actor(policy), batch)
    assert [metrics[f"actor/{name}"] for name in ("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower")] == [0, 0, 0]
    assert any(part.any() for part in gradient)


@pytest.mark.parametrize(
    ("column", "value"), [("advantages", torch.inf), ("old_log_probs", torch.nan), ("ref_log_prob", torch.nan)]
)
def test_a_loss_that_is_not_finite_leaves_no_trace(policy: PreTrainedModel, column: str, value: float):
    """The last micro-batch has the bad number: gradients of those before it must go too."""
    clean, hit = make_actor(policy), make_actor(policy)
    bad = ragged_batch()
    bad.batch[column][-1, 0] = value
    for actor in (clean, hit):
        update(actor, ragged_batch())
    metrics, _, _ = update(hit, bad)
    assert metrics["actor/skipped_updates"] == 1
    _, _, weights = update(hit, ragged_batch(1))
    metrics, _, wanted = update(clean, ragged_batch(1))
    assert metrics["actor/skipped_updates"] == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True))


# Losses over the whole mini-batch

SHIPPED = [name for name in present("policy_loss") if name != "bypass_mode"]  # which reads what a stage sets
SETTINGS = {
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 1.0},
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": -1e9, "clip_cov_ub": 1e9},
}
OVER_ALL = {name: PolicyLossConfig(loss_mode=name, **SETTINGS[name]) for name in SETTINGS if name in SHIPPED}


def whole_loss(module: PreTrainedModel, batch: DataProto, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """(all terms, the policy's alone) of the mini-batch at once, from each row alone and without padding."""
    shape = batch.batch["responses"].shape
    log_probs, entropy = torch.zeros(shape), torch.zeros(shape)
    for row in range(len(batch)):
        ids, prompt = unpadded(batch, row)
        distributions = (module(ids[None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
        columns = torch.arange(len(ids) - prompt)
        place = (torch.full_like(columns, row), columns)
        log_probs = log_probs.index_put(place, distributions.gather(1, ids[prompt:, None])[:, 0])
        entropy = entropy.index_put(place, -(distributions.exp() * distributions).sum(-1))
    columns, counts = batch.batch, update_of(batch, config).counts
    mask, mode = columns["response_mask"], config.loss_agg_mode
    seed_everything(update_of(batch, config).seed)  # clip_cov draws
    policy_loss, _ = get_policy_loss_fn(config.policy_loss.loss_mode)(
        *(columns["old_log_probs"], log_probs, columns["advantages"], mask, mode),
        config=SimpleNamespace(**vars(config), global_batch_info=counts),
        rollout_is_weights=columns["rollout_is_weights"],
    )
    kl = kl_penalty(log_probs, columns["ref_log_prob"], config.kl_loss_type)
    others = config.kl_loss_coef * kl - config.entropy_coeff * entropy
    return policy_loss + agg_loss(others, mask, mode, **counts), policy_loss


@pytest.mark.parametrize("name", OVER_ALL)
def test_a_loss_over_the_mini_batch_is_the_same_in_any_cut(policy: PreTrainedModel, name: str):
    """Entropy and KL are added to the loss; test_policy_losses.py has every loss alone."""
    config, batch = replace(ALL_TERMS, policy_loss=OVER_ALL[name], loss_agg_mode="seq-mean-token-mean"), ragged_batch()
    twin = copy.deepcopy(policy)
    loss, policy_loss = whole_loss(twin, batch, config)
    loss.backward()
    wanted = [parameter.grad for parameter in twin.parameters()]
    reports = []
    for cut_name, size in CUTS.items():
        metrics, gradient, _ = update(make_actor(policy, config, size), ragged_batch())
        assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-5, abs=2e-7), cut_name
        assert metrics["actor/pg_loss"] == pytest.approx(policy_loss.item(), rel=1e-5), cut_name
        assert distance(gradient, wanted) < 1e-5, cut_name
        reports.append(metrics)
    assert all(metrics == pytest.approx(reports[0], rel=1e-4, abs=1e-7) for metrics in reports)
    assert {"actor/entropy", "actor/kl_loss"} <= reports[0].keys()


def test_a_loss_of_the_users_is_called_once_a_mini_batch_if_it_says_so(policy: PreTrainedModel):
    """The loss squares a mean, which its parts would not add up to. `scale` comes from policy_loss.kwargs."""
    calls: list[int] = []

    def squared(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, scale=1.0, **kwargs):
        calls.append(len(log_prob))
        return scale * agg_loss(log_prob, response_mask, "token-mean", **config.global_batch_info) ** 2, {}

    settings = PolicyLossConfig(loss_mode="squared_for_test", kwargs={"scale": 3.0})
    config = replace(ALL_TERMS, policy_loss=settings, entropy_coeff=0.0, use_kl_loss=False)
    batch = ragged_batch()
    scored = old_log_probs(policy, batch)
    whole = 3 * scored[batch.batch["response_mask"].bool()].mean().item() ** 2
    register_policy_loss("squared_for_test", over_mini_batch=True)(squared)
    metrics, gradient, _ = update(make_actor(policy, config), batch)
    assert calls == [9] and metrics["actor/loss"] == pytest.approx(whole, rel=1e-5)
    assert any(part.any() for part in gradient)
    calls.clear()
    register_policy_loss("squared_for_test")(squared)
    metrics, _, _ = update(make_actor(policy, config), ragged_batch())
    assert calls == [3, 3, 3] and metrics["actor/loss"] < whole * 0.9
    assert not get_policy_loss("squared_for_test").over_mini_batch


@pytest.mark.parametrize("name", OVER_ALL)
def test_a_mini_batch_without_a_token_is_no_gradient(policy: PreTrainedModel, name: str):
    """All rows may have failed, or been rejected for their drift."""
    for config in (replace(ALL_TERMS, policy_loss=OVER_ALL[name]), ALL_TERMS):
        batch = ragged_batch()
        batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
        metrics, gradient, _ = update(make_actor(policy, config), batch)
        assert metrics["actor/skipped_updates"] == 0 and not any(part.any() for part in gradient)


# Work not done


@pytest.mark.parametrize("name", [loss for loss in SHIPPED if get_policy_loss(loss).silent_at_zero])
def test_rows_without_advantage_cost_no_forward_and_the_step_is_the_same(policy: PreTrainedModel, name: str):
    """Parameters agree after the step: momentum and weight decay act as if the whole batch had gone through."""
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name), optim=OptimConfig(lr=1e-2, weight_decay=0.1))
    batch = ragged_batch()
    batch.batch["advantages"][[0, 2, 5, 7]] = 0.0
    tokens, weights, shares = [], [], []
    for skips in (False, True):
        seen = forwarded(actor := make_actor(policy, config))
        for _ in range(2):
            rows = batch.select_idxs(learning_rows(batch)) if skips else batch
            metrics = actor.update_policy(rows, update_of(batch, config))
        shares.append({name: metrics[name] for name in CLIPPED if name in metrics})
        tokens.append(sum(seen))
        weights.append([parameter.detach() for parameter in actor.engine.module.parameters()])
    assert tokens[1] < 0.7 * tokens[0]
    assert shares[1] == pytest.approx(shares[0], rel=1e-3)
    assert distance(*weights) < 1e-4  # AdamW divides by gradients whose last bits differ


def test_for_a_log_of_the_entropy_rows_without_advantage_go_forward_alone(policy: PreTrainedModel):
    batch, found, learnt = ragged_batch(), [], []
    batch.batch["advantages"][[0, 2, 5, 7]] = 0.0
    for alone in (False, True):
        seen = forwarded(actor := make_actor(policy, ActorConfig(calculate_entropy=True)), with_gradient=True)
        assert actor.only_logs_silent_rows
        actor.only_logs_silent_rows = alone
        found.append(update(actor, batch))
        learnt.append(sum(seen))
    (metrics, gradient, _), (metrics_alone, gradient_alone, _) = found
    assert learnt[1] < 0.7 * learnt[0] and distance(gradient_alone, gradient) < 1e-5
    assert metrics_alone == pytest.approx(metrics, rel=1e-4, abs=1e-7)


def test_a_batch_without_any_advantage_still_steps_the_optimiser(policy: PreTrainedModel):
    config = ActorConfig(optim=OptimConfig(lr=1e-2, weight_decay=0.1))
    batch, actor = ragged_batch(), make_actor(policy, config)
    batch.batch["advantages"].zero_()
    before = [parameter.detach().clone() for parameter in actor.engine.module.parameters()]
    learnt_from = batch.select_idxs(learning_rows(batch))
    assert len(learnt_from) == 1
    assert actor.update_policy(learnt_from, update_of(batch, config))["actor/grad_norm"] == 0
    for old, new in zip(before, actor.engine.module.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old * (1 - 1e-2 * 0.1))  # weight decay alone


@pytest.mark.parametrize(
    ("settings", "skips"),
    [
        ([], True),
        pytest.param(["actor.policy_loss.loss_mode=gspo"], True, marks=needs_algorithms),
        pytest.param(["actor.policy_loss.loss_mode=kl_cov"], False, marks=needs_algorithms),
        pytest.param(["actor.policy_loss={loss_mode: dro, dro_beta: 0.1}"], False, marks=needs_algorithms),
        (["actor.entropy_coeff=0.1"], False),
        (["actor.use_kl_loss=true"], False),
        (["actor.calculate_entropy=true"], False),
    ],
)
def test_all_rows_are_learnt_from_where_something_reads_them(settings: list[str], skips: bool):
    config = compose(*(f"actor_rollout_ref.{setting}" for setting in settings), name="ppo_trainer")
    batch = ragged_batch()
    batch.batch["advantages"][[0, 2, 5, 7]] = 0.0
    batch.batch["loss_mask"] = batch.batch["response_mask"]
    batch.non_tensor_batch["uid"] = np.arange(len(batch))
    [(rows, update)] = PolicyUpdates(config)(batch, step=1)
    assert len(rows) == len(batch) - 5 * skips  # MASKED_ROW is one of them
    assert update.counts == update_of(batch, config.actor_rollout_ref.actor).counts
