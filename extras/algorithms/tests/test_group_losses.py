"""The losses that compare the answers to a prompt: a twin in loops, by hand, and that no cut changes the step."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from configs.errors import ConfigError
from configs.schema import ActorConfig, PolicyLossConfig
from data.protocol import DataProto
from extras.algorithms import group_losses
from extras.algorithms.group_losses import LOSSES, GroupIds
from tests.batches import CUTS, close, ragged_batch, recorded, relative_distance, update_of
from tests.runs import compose
from tests.test_policy_losses import Batch
from training.losses import get_policy_loss
from training.plan import check_algorithm
from training.roles import loss_reads, needed_roles
from workers.dp_actor import DataParallelPPOActor
from workers.engine import TrainEngine
from workers.micro_batches import PooledMetrics

BETAS = SimpleNamespace(
    gvpo_beta=0.7, dpo_beta=0.3, flowrl_beta=2, clip_ratio=None, clip_ratio_low=0.2, clip_ratio_high=0.1
)
NAMES = ["flowrl", "gvpo", "pair", "spin"]
TO_REFERENCE = ("flowrl", "pair")  # the others compare with the policy that drew the answers


def run_loss(name, old, new, reference, advantages, mask, ids):
    """(loss, metrics, gradient with respect to `new`)."""
    log_prob = new.clone().requires_grad_()
    columns = {"group_ids": ids[:, None].expand_as(mask)}
    columns |= {"ref_log_prob": reference} if name in TO_REFERENCE else {}
    loss, metrics = LOSSES[name].function(old, log_prob, advantages, mask, config=BETAS, **columns)
    loss.backward()
    return loss.detach(), metrics, log_prob.grad


def twin(name, old, new, reference, advantages, mask, ids):
    """(loss, gradient), row by row."""
    log_prob, base = new.clone().requires_grad_(), reference if name in TO_REFERENCE else old
    groups = {}
    for row in range(len(mask)):
        tokens = mask[row].nonzero()[:, 0].tolist()
        if tokens:
            u = sum(log_prob[row, t] - base[row, t].item() for t in tokens)
            score = sum(advantages[row, t].item() for t in tokens) / len(tokens)
            if name == "flowrl":
                drift = sum(new[row, t].item() - old[row, t].item() for t in tokens) / len(tokens)
                u, score = u / len(tokens) - 2 * score, min(max(math.exp(drift), 0.8), 1.1)
            groups.setdefault(ids[row].item(), []).append((u, score))
    parts = []
    for answers in groups.values():
        if name == "gvpo" and len(answers) > 1:
            gaps = [0.7 * u - score for u, score in answers]
            mean = sum(gaps) / len(gaps)
            parts.append(sum((gap - mean) ** 2 for gap in gaps) / 2 / (len(gaps) - 1))
        if name == "flowrl" and len(answers) > 1:
            log_z = -sum(weight * flow for flow, weight in answers) / sum(weight for _, weight in answers)
            parts += [weight * (flow + log_z) ** 2 for flow, weight in answers]
        if name in ("pair", "spin"):
            scores = [score for _, score in answers]
            best, worst = scores.index(max(scores)), scores.index(min(scores))
            if scores[best] > scores[worst]:
                parts.append(-torch.sigmoid(0.3 * (answers[best][0] - answers[worst][0])).log())
    loss = sum(parts) / max(1, len(parts)) + 0 * log_prob.nan_to_num(0).sum()
    loss.backward()
    return loss.detach(), log_prob.grad.nan_to_num(0)


def drawn(seed):
    """Rows with holes, a failed one and NaN under the mask, float64; two of three scores are 0 or 1."""
    batch, generator = Batch.draw(seed, rows=9), torch.Generator().manual_seed(seed)
    ids = torch.randint(4, (9,), generator=generator)
    scores = torch.randint(-1, 2, (9, 1), generator=generator).double()
    advantages = scores.expand(-1, 5).masked_fill(batch.mask == 0, math.nan)
    reference = batch.old + 0.2 * torch.randn(9, 5, generator=generator, dtype=torch.float64)
    return batch.old, batch.new, reference, advantages, batch.mask, ids


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", NAMES)
def test_each_equals_its_twin_in_loops(name, seed):
    loss, _, gradient = run_loss(name, *drawn(seed))
    twin_loss, twin_gradient = twin(name, *drawn(seed))
    close(loss, twin_loss, 1e-9)
    close(gradient, twin_gradient, 1e-9)


def test_by_hand():
    """Two answers of one prompt, of 2 tokens and 1: u are 0.3 and -0.1, scores 1 and 0; the third row is alone."""
    old = torch.zeros(3, 2, dtype=torch.float64)
    new = torch.tensor([[0.1, 0.2], [-0.1, 9], [5, 5]], dtype=torch.float64)
    mask, ids = torch.tensor([[1, 1], [1, 0], [1, 1]]), torch.tensor([4, 4, 7])
    advantages = torch.tensor([[1.0, 1], [0, 0], [3, 3]], dtype=torch.float64)
    loss, metrics, gradient = run_loss("gvpo", old, new, old, advantages, mask, ids)
    # gaps 0.7 · 0.3 - 1 = -0.79 and -0.07: a variance of 0.72² / 2, and slopes 0.7 · ∓0.36
    close(loss, 0.72**2 / 4, 1e-6)
    close(gradient, [[-0.252, -0.252], [0.252, 0], [0, 0]], 1e-6)
    close(metrics["actor/ppo_kl"], -(0.1 + 0.2 - 0.1 + 10) / 5)
    for name in ("pair", "spin"):
        loss, metrics, gradient = run_loss(name, old, new, old, advantages, mask, ids)
        close(loss, math.log(1 + math.exp(-0.12)), 1e-6)
        slope = 0.3 / (1 + math.exp(0.12))
        close(gradient, [[-slope, -slope], [slope, 0], [0, 0]], 1e-6)
        close([metrics["actor/pair_accuracy"], metrics["actor/pair_margin"]], [1, 0.12])
    loss, metrics, gradient = run_loss("flowrl", old, new, old, advantages, mask, ids)
    # flows 0.15 - 2 · 1 and -0.1, 1.75 apart; weights e^0.15, clipped to 1.1, and e^-0.1; two answers are not alone
    weights = 1.1, math.exp(-0.1)
    pull = 1.75 * weights[0] * weights[1] / sum(weights)
    close(loss, 1.75 * pull / 2, 1e-6)
    close(gradient, [[-pull / 2, -pull / 2], [pull, 0], [0, 0]], 1e-6)
    close(metrics["actor/log_z"], (1.85 * weights[0] + 0.1 * weights[1]) / sum(weights))


@pytest.mark.parametrize("name", NAMES)
def test_groups_that_tie_and_failed_batches_are_nothing(name):
    old, new, reference, advantages, mask, ids = drawn(0)
    if name in ("pair", "spin"):  # the others hold the policy together even where all score alike
        loss, _, gradient = run_loss(name, old, new, reference, torch.ones_like(advantages), mask, ids)
        assert loss == 0 and not gradient.any()
    first = (each[:, :1] for each in (old, new, reference, advantages, torch.zeros_like(mask)))  # answers of one token
    loss, metrics, gradient = run_loss(name, *first, ids)
    assert loss == 0 and not gradient.any() and not any(metrics.values())


@pytest.mark.parametrize("name", ["pair", "spin"])
@pytest.mark.parametrize("advantage", [0.7, -0.3, 1.1, 2.3])
def test_the_length_of_an_answer_does_not_choose_it(name, advantage):
    """The mean of L equal float32 numbers depends on L; of equal bests and worsts the first counts, whatever L is."""
    for lengths in [(8, 6, 3), (6, 8, 5), (1, 7, 3), (5, 3, 7)]:
        mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).float()
        old, new = torch.zeros(3, 8), torch.full((3, 8), 0.1)
        for last, taught in ((advantage, []), (advantage - 1, [0, 2]), (advantage + 1, [0, 2])):
            advantages = torch.tensor([[advantage], [advantage], [last]]) * mask
            _, _, gradient = run_loss(name, old, new, old, advantages, mask, torch.zeros(3, dtype=torch.int64))
            assert gradient.any(-1).nonzero().flatten().tolist() == taught


# The actor


def grouped_batch():
    batch = ragged_batch()
    batch.batch.pop("rollout_is_weights")
    ids = torch.tensor([0, 1, 0, 2, 1, 2, 0, 1, 2])  # the answers to a prompt are in different micro-batches
    batch.batch["group_ids"] = ids[:, None].expand_as(batch.batch["response_mask"]).contiguous()
    return batch


def actor_of(policy, name, cut):
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name), gvpo_beta=0.7, dpo_beta=0.3)
    engine = TrainEngine(copy.deepcopy(policy), config.optim, 10, torch.device("cpu"), torch.float32)
    reads = ("ref_log_prob", "group_ids") if name in TO_REFERENCE else ("group_ids",)
    return DataParallelPPOActor(config, engine, CUTS[cut], CUTS[cut], loss_reads=reads), config


@pytest.mark.parametrize("name", NAMES)
def test_the_actor_makes_the_same_step_however_it_cuts_the_batch(policy, name):
    gradients = []
    for cut in ("all rows", "1 row", "24 tokens"):
        (actor, config), batch = actor_of(policy, name, cut), grouped_batch()
        gradients.append(recorded(actor.engine, partial(actor.update_policy, batch, update_of(batch, config)))[1])
    assert any(gradient.any() for gradient in gradients[0])
    assert relative_distance(gradients[0], gradients[1]) < 1e-5 > relative_distance(gradients[0], gradients[2])


@pytest.mark.parametrize("name", NAMES)
def test_the_answers_to_a_prompt_may_be_on_different_ranks(policy, name, monkeypatch):
    actor, config = actor_of(policy, name, "all rows")
    batch = grouped_batch()
    update, rows = update_of(batch, config), ([0, 4, 5], [1, 2, 3, 6, 7, 8])
    whole = actor.policy_gradient(batch, update, PooledMetrics()).batch["policy_gradient"]
    gathered = []
    monkeypatch.setattr("workers.dp_actor.gather_shares", lambda value: gathered.append(value) or [value])
    for share in rows:
        actor.policy_gradient(batch.select_idxs([*share]), update, PooledMetrics())
    monkeypatch.setattr("workers.dp_actor.gather_shares", lambda value: gathered)
    for rank, share in enumerate(rows):
        monkeypatch.setattr("workers.dp_actor.data_rank", lambda rank=rank: rank)
        part = actor.policy_gradient(batch.select_idxs([*share]), update, PooledMetrics()).batch["policy_gradient"]
        close(part, whole[[*share]])


# A run


def test_the_stage_labels_the_rows_of_each_prompt():
    batch = DataProto.from_dict({"response_mask": torch.ones(4, 2)}, {"uid": ["b", "a", "b", "c"]})
    stage = GroupIds(SimpleNamespace(config=None))
    assert stage(batch, {}) == {}
    assert batch.batch["group_ids"].tolist() == [[0, 0], [1, 1], [0, 0], [3, 3]]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_gives_each_what_it_reads_and_refuses_what_it_cannot_compare(name):
    loss = f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"
    config = compose(loss, "actor_rollout_ref.actor.use_kl_loss=false")
    check_algorithm(config)
    assert get_policy_loss(name) is group_losses.LOSSES[name]
    assert loss_reads(config) == {"group_ids"} | ({"ref_log_prob"} if name in TO_REFERENCE else set())
    assert ("ref" in needed_roles(config)) == (name in TO_REFERENCE)
    with pytest.raises(ConfigError, match=r"set actor_rollout_ref\.rollout\.n=2 or more"):
        check_algorithm(compose(loss, "actor_rollout_ref.rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus"))
    with pytest.raises(ConfigError, match=r"env\.history=turns cuts them"):
        check_algorithm(compose(loss, "env.mode=episode", "env.history=turns"))
    with pytest.raises(ValueError, match="rollout_is_weights"):
        check_algorithm(compose(loss, "algorithm.rollout_correction.rollout_is=token"))
