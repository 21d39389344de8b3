"""Ranks in processes of their own, over real gloo, with whole models and a share of the rows each: what comes out is
what one process has."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import ActorConfig, CriticConfig, ModelConfig, OptimConfig, PolicyLossConfig
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from tests.batches import CUTS, Recorded, ragged_batch, recorded, relative_distance, update_of
from tests.ranks import Ranks
from training.core_algos import POLICY_LOSS_REGISTRY
from workers.collectives import Peers, data_rank, group_size
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.engine import TrainEngine
from workers.group import shares_of
from workers.micro_batches import MicroBatchSize
from workers.models import load_causal_lm, load_value_model
from workers.parallel import Replicas

CPU = torch.device("cpu")
OPTIM = OptimConfig(lr=1e-2, clip_grad=0.5)
LOSSES = {
    "vanilla, every term": ActorConfig(entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.3, optim=OPTIM),
    "vanilla, means of rows": ActorConfig(loss_agg_mode="seq-mean-token-mean", optim=OPTIM),
} | {
    name: ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **settings), optim=OPTIM)
    for name, settings in {"gspo": {}, "clip_cov": {"clip_cov_ratio": 0.3}, "kl_cov": {"kl_cov_ratio": 0.3}}.items()
    if name in POLICY_LOSS_REGISTRY
}
CRITIC = CriticConfig(optim=OPTIM, loss_agg_mode="token-mean")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_layers(tmp_path_factory.mktemp("models") / "two_layers")


def save_two_layers(folder: Path) -> Path:
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def own_share(batch: DataProto) -> DataProto:
    """Returns this rank's rows of `batch`, as a run deals them out."""
    return shares_of(batch, group_size() // Peers.size, [*batch.non_tensor_batch])[data_rank()]


def trainer(
    path: Path,
    config: ActorConfig | CriticConfig,
    size: MicroBatchSize,
    parallel: Replicas,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """The actor or the critic of a run that computes in `dtype`."""
    settings = {"dtype": dtype, "parallel": parallel}
    if isinstance(config, CriticConfig):
        module = load_value_model(ModelConfig(path=str(path)), seed=0, **settings)
        return DataParallelPPOCritic(config, TrainEngine(module, config.optim, 10, CPU, dtype), size)
    module = load_causal_lm(ModelConfig(path=str(path)), **settings)
    engine = TrainEngine(module, config.optim, 10, CPU, dtype)
    return DataParallelPPOActor(config, engine, size, CUTS["24 tokens"])


def learn(
    path: Path, batches: dict[str, DataProto], names: list[str], spread: Callable[[], Replicas]
) -> dict[str, Recorded]:
    """An update with this rank's share of each batch, by each loss; "critic" is the critic's."""
    found = {}
    for kind, batch in batches.items():
        for name in names:
            config = LOSSES.get(name, CRITIC)
            worker = trainer(path, config, CUTS["3 rows"], spread())
            verb = worker.update_critic if name == "critic" else worker.update_policy
            update = partial(verb, own_share(batch), update_of(batch, config))
            metrics, gradient, weights = recorded(worker.engine, update)
            full = worker.engine.parallel.full
            found[f"{kind}, {name}"] = metrics, [*map(full, gradient)], [*map(full, weights)]
    return found


def assert_the_step_of_one(
    ranks: Ranks, model: Path, names: list[str], spread: Callable[[], Replicas], batch: DataProto | None = None
) -> None:
    """Updates of a model that `spread` lays out are those of one process; with fewer rows than ranks, too."""
    batch = batch or ragged_batch()
    batches = {"all rows": batch, "1 row": batch[4:5]}
    wanted = learn(model, batches, names, spread)
    found = ranks.run(learn, model, batches, names, spread)
    for name, (metrics, gradient, weights) in wanted.items():
        assert metrics[f"{'critic' if 'critic' in name else 'actor'}/skipped_updates"] == 0
        for found_metrics, found_gradient, found_weights in (learnt[name] for learnt in found):
            assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6), name
            assert relative_distance(found_gradient, gradient) < 1e-5, name
            assert relative_distance(found_weights, weights) < 3e-5, f"{name}: Adam divides"
            assert all(map(torch.equal, found_weights, found[0][name][2])), f"{name}: the ranks drift apart"


@pytest.mark.slow
def test_ranks_take_the_step_of_one(ranks: Ranks, model: Path):
    assert_the_step_of_one(ranks, model, ["kl_cov", "critic"], Replicas)
