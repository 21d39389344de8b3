"""Ranks in processes of their own, over real gloo: a share each, and what comes out is what one process has."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.schema import ActorConfig, CriticConfig, ModelConfig, OptimConfig, PolicyLossConfig
from data.protocol import DataProto
from tests.batches import CUTS, ragged_batch, relative_distance, update_of
from tests.ranks import Ranks
from training.mini_batches import Update
from workers.collectives import (
    BUCKET_BYTES,
    buckets,
    gather,
    group_size,
    join_group,
    rank,
    sum_gradients,
)
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.engine import TrainEngine
from workers.models import load_causal_lm, load_value_model
from workers.remote_roles import shares_of

OPTIM = OptimConfig(lr=1e-2, clip_grad=0.5)
LOSSES = {
    "vanilla, every term": ActorConfig(entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.3, optim=OPTIM),
    "vanilla, means of rows": ActorConfig(loss_agg_mode="seq-mean-token-mean", optim=OPTIM),
    "gspo": ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gspo"), optim=OPTIM),
    "clip_cov": ActorConfig(policy_loss=PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=0.3), optim=OPTIM),
    "kl_cov": ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.3), optim=OPTIM),
}
Learnt = tuple[dict[str, float], list[Tensor]]  # the metrics of the last update, and the weights after it


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Three, so that shares are uneven; tests/test_scoring_model.py has two."""
    ranks = Ranks(3)
    yield ranks
    ranks.pool.shutdown()


def learn(model: Path, batches: dict[str, DataProto]) -> dict[str, Learnt]:
    """Two updates with this rank's shares of each batch, by each loss, and by the critic's."""
    policy = load_causal_lm(ModelConfig(path=str(model)))
    found = {}
    for kind, batch in batches.items():
        for name, config in LOSSES.items():
            engine = TrainEngine(copy.deepcopy(policy), config.optim, 10, torch.device("cpu"), torch.float32)
            actor = DataParallelPPOActor(config, engine, CUTS["3 rows"], CUTS["24 tokens"])
            found[f"{kind}, {name}"] = updated(actor.update_policy, engine, batch, update_of(batch, config))
        critic_config = CriticConfig(optim=OPTIM, loss_agg_mode="token-mean")
        module = load_value_model(ModelConfig(path=str(model)), str(model), seed=0)
        engine = TrainEngine(module, OPTIM, 10, torch.device("cpu"), torch.float32)
        critic = DataParallelPPOCritic(critic_config, engine, CUTS["24 tokens"])
        found[f"{kind}, critic"] = updated(critic.update_critic, engine, batch, update_of(batch, critic_config))
    return found


def updated(
    verb: Callable[[DataProto, Update], dict[str, float]], engine: TrainEngine, batch: DataProto, update: Update
) -> Learnt:
    for _ in range(2):
        metrics = verb(shares_of(batch, group_size())[rank()], update)
    return metrics, [parameter.detach() for parameter in engine.module.parameters()]


@pytest.mark.slow
def test_ranks_take_the_step_of_one(ranks: Ranks, tiny_model: Path):
    """…and reports its metrics, whatever the loss; with fewer rows than ranks as well."""
    torch.set_num_threads(1)
    batches = {"9 rows": ragged_batch(), "1 row": ragged_batch()[4:5]}
    wanted = learn(tiny_model, batches)
    found = ranks.run(learn, tiny_model, batches)
    start = list(load_causal_lm(ModelConfig(path=str(tiny_model))).parameters())
    for name, (metrics, weights) in wanted.items():
        assert metrics[f"{'critic' if 'critic' in name else 'actor'}/skipped_updates"] == 0
        for found_metrics, found_weights in (learnt[name] for learnt in found):
            assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6), name
            assert relative_distance(found_weights, weights) < 1e-5, name
            assert all(map(torch.equal, found_weights, found[0][name][1])), f"{name}: the ranks drift apart"
        if "critic" not in name:
            assert relative_distance(weights, start) > 1e-3, name


def refuse(model: Path, batch: DataProto) -> tuple[dict[str, float], bool]:
    """An update in which the last row's loss is not finite; whether the weights stayed."""
    module = load_causal_lm(ModelConfig(path=str(model)))
    before = copy.deepcopy(module.state_dict())
    engine = TrainEngine(module, OPTIM, 10, torch.device("cpu"), torch.float32)
    actor = DataParallelPPOActor(ActorConfig(), engine, CUTS["1 row"], CUTS["1 row"])
    metrics = actor.update_policy(shares_of(batch, group_size())[rank()], update_of(batch, actor.config))
    return metrics, all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_is_refused_by_all(ranks: Ranks, tiny_model: Path):
    batch = ragged_batch()
    batch.batch["advantages"][-1] = torch.inf
    for metrics, stayed in ranks.run(refuse, tiny_model, batch):
        assert metrics["actor/skipped_updates"] == 1
        assert stayed


def add_up(gradients: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Sums of this rank's gradients, one list a rank, with those of the others; and what it gathers."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (5,), (1, 2))]
    frozen = nn.Parameter(torch.zeros(7), requires_grad=False)
    for parameter, gradient in zip(parameters, gradients[rank()], strict=True):
        parameter.grad = gradient
    sum_gradients([*parameters, frozen])
    assert frozen.grad is None
    assert gather({"rank": rank()}) == [{"rank": place} for place in range(group_size())]
    return [parameter.grad for parameter in parameters]


@pytest.mark.slow
def test_gradients_are_summed_and_what_no_rank_has_stays_none(ranks: Ranks):
    def of_rank(place: int) -> list[Tensor | None]:
        transposed = torch.arange(6.0).view(3, 2).T * (place + 1)
        return [transposed, torch.full((4,), 10.0**place), None if place else torch.ones(5), None]

    places = range(ranks.size)
    for total in ranks.run(add_up, [of_rank(place) for place in places]):
        assert torch.equal(total[0], sum(place + 1 for place in places) * torch.arange(6.0).view(3, 2).T)
        assert torch.equal(total[1], torch.full((4,), float("1" * ranks.size)))
        assert torch.equal(total[2], torch.ones(5))
        assert total[3] is None


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_asked():
    with pytest.raises(dist.DistError, match=r"(?i)timed out after 1 seconds|timeout"):
        join_group(dist.HashStore(), rank=0, size=2, timeout=1)
    assert group_size() == 1


def test_a_process_on_its_own_is_a_group_of_one():
    assert (group_size(), rank(), gather("x")) == (1, 0, ["x"])


def test_buckets_keep_the_order_and_hold_one_type_and_no_more_than_fits(monkeypatch: pytest.MonkeyPatch):
    assert BUCKET_BYTES > 1 << 20
    monkeypatch.setattr("workers.collectives.BUCKET_BYTES", 40)
    tensors = [torch.zeros(n) for n in (4, 6, 1, 100, 2)] + [torch.zeros(2, dtype=torch.float64)]
    found = list(buckets(tensors))
    assert [[tensor.numel() for tensor in bucket] for bucket in found] == [[4, 6], [1], [100], [2], [2]]
    assert [id(tensor) for bucket in found for tensor in bucket] == list(map(id, tensors))
    assert list(buckets([])) == []
