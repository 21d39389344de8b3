"""The policy in training, and the frozen reference policy."""

from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from configs.schema import ActorConfig
from data.protocol import DataProto
from training.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from training.torch_functional import masked_mean
from workers.engine import TrainEngine
from workers.metrics import PooledMetrics
from workers.micro_batches import MicroBatch, MicroBatchSize, cut, token_scores


class DataParallelPPOActor:
    """Scores and updates the policy.

    Args:
        config: the actor's settings.
        engine: the model in training.
        update_size, log_prob_size: what a forward pass may hold, with and without a backward.
    """

    def __init__(
        self, config: ActorConfig, engine: TrainEngine, update_size: MicroBatchSize, log_prob_size: MicroBatchSize
    ) -> None:
        self.config = config
        self.engine = engine
        self.update_size = update_size
        self.log_prob_size = log_prob_size
        self.policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Columns old_log_probs and entropys, [B, R] float32, 0 after a response's end."""
        with self.engine.autocast():
            log_probs, entropy = score(self.engine.module, batch, self.log_prob_size, with_entropy=True)
        return DataProto.from_dict({"old_log_probs": log_probs, "entropys": entropy})

    def update_policy(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on one mini-batch.

        L = pg − entropy_coeff·H + kl_loss_coef·KL, each aggregated over the whole mini-batch: `meta_info` carries its
        `global_batch_info` (counts of tokens and sequences), `temperature` and `update_index` (the schedule's step).
        A batch without the column old_log_probs is exactly on-policy: the ratio is 1 and carries the gradient.
        """
        metrics = PooledMetrics()
        wanted = ["response_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights"]
        columns = [name for name in wanted if name in batch.batch]
        micro_batches = cut(batch, self.update_size, columns, self.engine.device)
        losses = (self.micro_batch_loss(micro, batch.meta_info, metrics) for micro in micro_batches)
        stepped = self.engine.update(losses, batch.meta_info["update_index"])
        return metrics.reduce() | {f"actor/{name}": value for name, value in stepped.items()}

    def micro_batch_loss(self, micro: MicroBatch, meta: dict, metrics: PooledMetrics) -> torch.Tensor:
        """The micro-batch's share of the mini-batch's loss."""
        config, columns, mask = self.config, micro.columns, micro.columns["response_mask"]
        counts, weight = meta["global_batch_info"], int(mask.sum())
        with self.engine.autocast():
            with_entropy = config.entropy_coeff != 0 or config.calculate_entropy
            log_probs, entropy = token_scores(self.engine.module, micro, meta["temperature"], with_entropy)
        # Passed on only where there are any, so that a loss of five arguments and a config is enough.
        weights = {name: columns[name] for name in ["rollout_is_weights"] if name in columns}
        loss, loss_metrics = self.policy_loss(
            columns.get("old_log_probs", log_probs.detach()),
            log_probs,
            columns["advantages"],
            mask,
            config.loss_agg_mode,
            config=SimpleNamespace(**vars(config), global_batch_info=counts),
            **weights,
        )
        metrics.add_sum("actor/pg_loss", loss)
        for name, value in loss_metrics.items():
            metrics.add_mean(name, value, weight)
        if entropy is not None:
            metrics.add_mean("actor/entropy", masked_mean(entropy.detach(), mask), weight)
            entropy_loss = agg_loss(entropy, mask, config.loss_agg_mode, **counts)
            metrics.add_sum("actor/entropy_loss", entropy_loss)
            if config.entropy_coeff:
                loss = loss - config.entropy_coeff * entropy_loss
        if config.use_kl_loss:
            kl = kl_penalty(log_probs, columns["ref_log_prob"], config.kl_loss_type)
            kl_loss = agg_loss(kl, mask, config.loss_agg_mode, **counts)
            metrics.add_sum("actor/kl_loss", kl_loss)
            metrics.add_mean("actor/kl_coef", config.kl_loss_coef, weight)
            loss = loss + config.kl_loss_coef * kl_loss
        metrics.add_sum("actor/loss", loss)
        return loss


class ReferencePolicy:
    """A frozen policy that only scores."""

    def __init__(self, module: PreTrainedModel, log_prob_size: MicroBatchSize) -> None:
        self.module = module.eval().requires_grad_(False)
        self.log_prob_size = log_prob_size

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Column ref_log_prob, [B, R] float32, 0 after a response's end."""
        log_probs, _ = score(self.module, batch, self.log_prob_size, with_entropy=False)
        return DataProto.from_dict({"ref_log_prob": log_probs})


@torch.no_grad()
def score(
    module: PreTrainedModel, batch: DataProto, size: MicroBatchSize, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropy or zeros) of every response token of `batch`, both [B, R] float32 on the CPU."""
    log_probs = torch.zeros(batch.batch["responses"].shape)
    entropy = torch.zeros_like(log_probs)
    for micro in cut(batch, size, [], module.device):
        scores, entropies = token_scores(module, micro, batch.meta_info["temperature"], with_entropy)
        micro.place(scores, log_probs)
        if entropies is not None:
            micro.place(entropies, entropy)
    return log_probs, entropy
