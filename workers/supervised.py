"""Supervised training in workers: one model, and the negative log-likelihood of what it is to learn, as a role.

The other side of `training.supervised.SupervisedRole`. Which rows each worker gets, forward pass, optimiser and the
sums over workers are those of reinforcement learning.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from configs.schema import SFTConfig
from data.import_utils import load_modules
from data.protocol import DataProto
from data.seeding import derive_seed, forked_rng
from training.mini_batches import Update
from workers.engine import TrainEngine, compute_dtype
from workers.micro_batches import MicroBatch, MicroBatchSize, PooledMetrics, cut_share
from workers.models import load_causal_lm, training_device
from workers.remote_roles import RemoteTrained

ROLE = "model"


class SFTWorker:
    """One process's share of a supervised run: the whole model, and some rows of every batch.

    Args:
        config: the whole run's.
        total_steps: length of the run, for the learning-rate schedule.
    """

    def __init__(self, config: SFTConfig, total_steps: int) -> None:
        load_modules(config.model.external_lib)
        device = training_device(config.trainer.n_gpus_per_node)
        dtype = compute_dtype(config.fsdp_config.dtype, device)
        with forked_rng(derive_seed(config.trainer.seed, "worker")):  # for weights that the folder does not hold
            module = load_causal_lm(config.model, device, dtype, config.data.max_length)
        engine = TrainEngine(module, config.optim, total_steps, device, dtype)
        size = MicroBatchSize(config.data.micro_batch_size_per_gpu, config.data.max_token_len_per_gpu)
        self.roles = {ROLE: SupervisedModel(engine, size)}

    def close(self) -> None: ...


class SupervisedModel:
    """A model that learns the tokens of response_mask; `size` is what a forward pass may hold."""

    def __init__(self, engine: TrainEngine, size: MicroBatchSize) -> None:
        self.engine = engine
        self.size = size

    def update(self, batch: DataProto, update: Update) -> dict[str, float]:
        """One optimiser step on one batch, of which `batch` is this worker's share; it may be without rows.

        L = −Σ log p(learnt token) / number of learnt tokens, of the whole batch (`update.counts`).
        """
        metrics = PooledMetrics()
        losses = (self.share_of_loss(micro, update, metrics) for micro in self.micro_batches(batch))
        stepped = self.engine.update(losses, update.step)
        return metrics.reduce() | {f"train/{name}": value for name, value in stepped.items()}

    @torch.no_grad()
    def loss_sum(self, batch: DataProto) -> float:
        """Σ −log p over the learnt tokens of this worker's share."""
        return sum(self.negative_log_likelihood(micro).item() for micro in self.micro_batches(batch))

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Writes the parts of the model named in `contents`."""
        self.engine.save(folder, contents)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        self.engine.load(folder)

    def micro_batches(self, batch: DataProto) -> Iterator[MicroBatch]:
        return cut_share(batch, self.size, ["response_mask"], self.engine.module)

    def share_of_loss(self, micro: MicroBatch, update: Update, metrics: PooledMetrics) -> Tensor:
        loss = self.negative_log_likelihood(micro) / update.counts["batch_num_tokens"]
        metrics.add_sum("train/loss", loss)
        return loss

    def negative_log_likelihood(self, micro: MicroBatch) -> Tensor:
        """Σ −log p over the learnt tokens of a micro-batch; 0 of a dummy."""
        with self.engine.autocast():
            log_probs = self.engine.module.token_scores(micro, temperature=1.0).log_probs
        return 0 * log_probs.sum() if micro.is_dummy else -(log_probs * micro.columns["response_mask"]).sum()


class RemoteSupervised(RemoteTrained):
    """The role as a group of `SFTWorker`s plays it."""

    def update(self, batch: DataProto, update: Update) -> dict[str, float]:
        return self.share_out("update", batch, update)[0]

    def loss_sum(self, batch: DataProto) -> float:
        return sum(self.share_out("loss_sum", batch))
