"""Trains PRIME's process reward model, a language model whose log-ratio to its start is the reward of a token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from data.protocol import DataProto
from data.seeding import forked_rng
from extras.prime.estimator import SUMMED, row_losses
from extras.prime.role import LEARNS_FROM, models
from extras.prime.settings import KEY, PrimeConfig
from training.losses import masked_sum, zero_masked
from training.mini_batches import Update
from workers.dp_actor import ReferencePolicy, build_teacher
from workers.engine import TrainedModel, TrainEngine
from workers.micro_batches import MicroBatch, MicroBatchSize, PooledMetrics, cut_share, score
from workers.model_worker import ModelWorker


class ProcessRewardModel(TrainedModel):
    """Scores answers token by token, and learns from their outcomes.

    Args:
        engine: the model in training.
        update_size, score_size: what a forward pass may hold, with and without a backward.
        reference: the frozen model, unless the policy's reference is the same.
    """

    def __init__(
        self,
        config: PrimeConfig,
        engine: TrainEngine,
        update_size: MicroBatchSize,
        score_size: MicroBatchSize,
        reference: ReferencePolicy | None = None,
    ) -> None:
        super().__init__(engine)
        self.config, self.update_size, self.score_size, self.reference = config, update_size, score_size, reference

    def compute_prm(self, batch: DataProto, columns: Sequence[str]) -> DataProto:
        """Computes `columns`, of prm_log_probs and prm_ref_log_prob, at temperature 1: [B, R] float32, 0 where the
        policy produced no token."""
        computed = {}
        if "prm_log_probs" in columns:
            with self.engine.on_device(), self.engine.autocast():
                scores = score(self.engine.module, batch, self.score_size, temperature=1.0)
            computed["prm_log_probs"] = scores.log_probs
        if "prm_ref_log_prob" in columns:
            scored = self.reference.compute_log_prob(batch, 1.0, ["ref_log_prob"])
            computed["prm_ref_log_prob"] = scored.batch["ref_log_prob"]
        return DataProto.from_dict(computed)

    def update_prm(self, batch: DataProto, update: Update) -> DataProto:
        """Takes one optimiser step on one mini-batch, of which `batch` is this worker's share, maybe without rows.

        Returns the log-probs of the passes that learnt, column prm_log_probs, and in meta_info the metrics.
        """
        metrics, log_probs = PooledMetrics(), torch.zeros(batch.batch["responses"].shape)
        names = ["response_mask", *(name for name in LEARNS_FROM if name in batch.batch)]
        with forked_rng(update.seed), self.engine.on_device():
            micro_batches = cut_share(batch, self.update_size, names, self.engine.module)
            losses = (self.micro_batch_loss(micro, update, metrics, log_probs) for micro in micro_batches)
            stepped = self.engine.update(losses, update.step)
        named = {"rm/lr" if name == "lr" else f"reward_model/{name}": value for name, value in stepped.items()}
        return DataProto.from_dict({"prm_log_probs": log_probs}, meta_info={"metrics": metrics.reduce() | named})

    def micro_batch_loss(self, micro: MicroBatch, update: Update, metrics: PooledMetrics, log_probs: Tensor) -> Tensor:
        """Computes the micro-batch's share of the mini-batch's loss; puts its log-probs in their places."""
        with self.engine.autocast(updates=True):
            scored = self.engine.module.token_scores(micro, temperature=1.0).log_probs
        if micro.is_dummy:
            return 0 * scored.sum()
        columns, mask = micro.columns, micro.columns["response_mask"]
        log_probs[micro.host.rows, : micro.response_width] = zero_masked(scored.detach(), mask).cpu()
        totals = masked_sum(scored - columns["prm_reference"], mask, axis=1)
        acc, opponents, weights = (columns[name][:, 0] if name in columns else None for name in LEARNS_FROM[1:])
        losses = zero_masked(row_losses(self.config.beta_train * totals, acc, opponents, weights), mask.any(1))
        rows = 1 if self.config.loss_type in SUMMED else max(1, update.counts["global_batch_size"])
        loss = losses.sum() / rows
        metrics.add_sum("reward_model/dpo_loss", loss)
        return loss


def build_prm(worker: ModelWorker) -> ProcessRewardModel:
    config, policy = worker.config.algorithm.prime, worker.config.actor_rollout_ref
    [start, *compared] = models(worker.config).values()
    engine = worker.train(worker.load_policy(start, "policy", key=f"{KEY}.model"), config.optim)
    reference = build_teacher(worker, compared[0].path, f"{KEY}.model") if compared else None
    sizes = MicroBatchSize.of_updates(policy.actor), MicroBatchSize.of_scoring(policy.ref)
    return ProcessRewardModel(config, engine, *sizes, reference)
