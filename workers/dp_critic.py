"""Trains the value model of PPO, and estimates values by it."""

from typing import Any

import torch

from configs.schema import CriticConfig
from data.protocol import DataProto
from data.seeding import forked_rng
from training.losses import compute_value_loss, masked_mean
from training.mini_batches import Update
from workers.engine import TrainedModel, TrainEngine
from workers.micro_batches import MicroBatch, MicroBatchSize, PooledMetrics, cut_share, score
from workers.model_worker import ModelWorker


class DataParallelPPOCritic(TrainedModel):
    """Estimates and updates values; `size` is what a forward pass may hold."""

    def __init__(self, config: CriticConfig, engine: TrainEngine, size: MicroBatchSize) -> None:
        super().__init__(engine)
        self.config, self.size = config, size

    def compute_values(self, batch: DataProto) -> DataProto:
        """Estimates the value before each response token: column values, [B, R] float32, 0 where response_mask is 0."""
        with self.engine.on_device(), self.engine.autocast():
            values = score(self.engine.module, batch, self.size, temperature=1.0, ask=["values"]).values
        return DataProto.from_dict({"values": values * batch.batch["response_mask"]})

    def update_critic(self, batch: DataProto, update: Update) -> dict[str, float]:
        """Takes one optimiser step on one mini-batch, of which `batch` is this worker's share, maybe without rows.

        The loss is the clipped value loss, normalised by the whole mini-batch's counts.
        """
        metrics = PooledMetrics()
        with forked_rng(update.seed), self.engine.on_device():
            micro_batches = cut_share(batch, self.size, ["response_mask", "values", "returns"], self.engine.module)
            losses = (self.micro_batch_loss(micro, update.counts, metrics) for micro in micro_batches)
            stepped = self.engine.update(losses, update.step)
        return metrics.reduce() | {f"critic/{name}": value for name, value in stepped.items()}

    def micro_batch_loss(self, micro: MicroBatch, counts: dict[str, Any], metrics: PooledMetrics) -> torch.Tensor:
        """Computes the micro-batch's share of the mini-batch's loss."""
        with self.engine.autocast(updates=True):
            predicted = self.engine.module.token_scores(micro, temperature=1.0, ask=["values"]).values
        if micro.is_dummy:
            return 0 * predicted.sum()
        columns, mask = micro.columns, micro.columns["response_mask"]
        loss, clip_fraction = compute_value_loss(
            vpreds=predicted,
            returns=columns["returns"],
            values=columns["values"],
            response_mask=mask,
            cliprange_value=self.config.cliprange_value,
            loss_agg_mode=self.config.loss_agg_mode,
            **counts,
        )
        weight = micro.policy_tokens
        metrics.add_sum("critic/vf_loss", loss)
        metrics.add_mean("critic/vf_clipfrac", clip_fraction, weight)
        metrics.add_mean("critic/vpred_mean", masked_mean(predicted.detach(), mask), weight)
        return loss


def build_critic(worker: ModelWorker) -> DataParallelPPOCritic:
    config = worker.config.critic
    engine = worker.train(worker.load_values(config.model.path), config.optim)
    return DataParallelPPOCritic(config, engine, MicroBatchSize.of_updates(config))
