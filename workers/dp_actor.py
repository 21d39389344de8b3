"""Trains the policy, and scores by it and by the frozen reference policy."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import ActorConfig
from data.protocol import DataProto
from data.seeding import forked_rng
from training.advantage import MAX_MISMATCH_RATIO, rollout_mismatch
from training.losses import (
    CLIPPED,
    ReadableNamespace,
    agg_loss,
    call_policy_loss,
    get_policy_loss,
    kl_penalty,
    masked_mean,
    zero_masked,
)
from training.mini_batches import Update, learning_rows
from training.roles import LOSS_COLUMNS, TEACHER_KEY, UPDATE_COLUMNS, has_teacher, loss_reads, loss_settings
from workers.collectives import data_rank, gather_shares
from workers.engine import TrainedModel, TrainEngine
from workers.micro_batches import MicroBatch, MicroBatchSize, PooledMetrics, cut, cut_share, score
from workers.model_worker import ModelWorker
from workers.models import frozen_copy

OTHER_SCORES = {"entropys": "entropy", "sum_pi_squared": "sum_pi_squared"}  # than log-probs, in TokenScores


class DataParallelPPOActor(TrainedModel):
    """Scores and updates the policy.

    Args:
        config: the actor's settings.
        engine: the model in training.
        update_size, log_prob_size: what a forward pass may hold, with and without a backward.
        policy_loss: its settings; None: the config's.
        loss_reads: further columns that the policy loss names, and logits, if it does.
    """

    def __init__(
        self,
        config: ActorConfig,
        engine: TrainEngine,
        update_size: MicroBatchSize,
        log_prob_size: MicroBatchSize,
        policy_loss: Any = None,
        loss_reads: Collection[str] = (),
    ) -> None:
        super().__init__(engine)
        self.config = config
        self.update_size = update_size
        self.log_prob_size = log_prob_size
        policy_loss = policy_loss or config.policy_loss
        self.policy_loss = get_policy_loss(policy_loss.loss_mode)
        reads_all_rows = config.entropy_coeff or config.use_kl_loss or not self.policy_loss.silent_at_zero
        self.only_logs_silent_rows = config.calculate_entropy and not reads_all_rows
        self.loss_reads, self.loss_columns = loss_reads, dict.fromkeys([*LOSS_COLUMNS, *loss_reads])
        self.loss_config = {**vars(config), "policy_loss": policy_loss}

    def compute_log_prob(self, batch: DataProto, temperature: float, columns: Sequence[str]) -> DataProto:
        """Computes `columns` (of old_log_probs, entropys, sum_pi_squared) on the policy's tokens: [B, R] float32."""
        with self.engine.on_device(), self.engine.autocast():
            return score_columns(self.engine.module, batch, self.log_prob_size, temperature, columns)

    def forward(self, batch: DataProto, temperature: float = 1.0) -> Tensor:
        """Computes the policy tokens' log-probs in one pass, for a loss by hand: [B, R] float32, 0 on other tokens."""
        [micro] = cut(batch, MicroBatchSize(len(batch), 0), [], self.engine.module)
        with self.engine.on_device(), self.engine.autocast(updates=True):
            log_probs = self.engine.module.token_scores(micro, temperature).log_probs
        missing = batch.batch["responses"].shape[1] - micro.response_width
        return torch.nn.functional.pad(zero_masked(log_probs, micro.is_scored), (0, missing))

    def update_policy(self, batch: DataProto, update: Update) -> dict[str, float]:
        """Takes one optimiser step on one mini-batch, of which `batch` is this worker's share, maybe without rows.

        L = pg − entropy_coeff·H + kl_loss_coef·KL, each aggregated over the whole mini-batch by `update.counts`. Rows
        without old_log_probs are exactly on-policy: the ratio is 1 and carries the gradient.
        """
        metrics = PooledMetrics()
        with forked_rng(update.seed), self.engine.on_device():  # for losses that draw
            if self.policy_loss.over_mini_batch:
                gradient = self.policy_gradient(batch, update, metrics)
                batch = DataProto(batch.batch.copy(), batch.non_tensor_batch).union(gradient)
            if self.only_logs_silent_rows:
                learns = learning_rows(batch)
                self.measure(batch.select_idxs(~learns), update, metrics)
                batch = batch.select_idxs(learns)
            losses = (self.micro_batch_loss(micro, update, metrics) for micro in self.micro_batches(batch))
            stepped = self.engine.update(losses, update.step)
        return metrics.reduce() | {f"actor/{name}": value for name, value in stepped.items()}

    def compute_loss(self, batch: DataProto, update: Update) -> dict[str, float]:
        """Computes the metrics that `update_policy` would have of a loss that is a sum over tokens; no update."""
        metrics = PooledMetrics()
        with self.engine.on_device():
            self.measure(batch, update, metrics)
        return metrics.reduce()

    @torch.no_grad()
    def measure(self, batch: DataProto, update: Update, metrics: PooledMetrics) -> None:
        """Adds to the `metrics` of an update what it would have of these rows, of which nothing is learnt."""
        for micro in self.micro_batches(batch):
            self.micro_batch_loss(micro, update, metrics)

    def micro_batches(self, batch: DataProto) -> Iterator[MicroBatch]:
        names = ["response_mask", *UPDATE_COLUMNS, *self.loss_reads, "policy_gradient"]
        columns = [name for name in dict.fromkeys(names) if name in batch.batch]
        return cut_share(batch, self.update_size, columns, self.engine.module)

    def policy_gradient(self, batch: DataProto, update: Update, metrics: PooledMetrics) -> DataProto:
        """Differentiates the policy loss of a mini-batch by each token's log-prob: column policy_gradient, [B, R]. The
        gradient by the weights is then a sum over tokens, so that a loss over the whole can be cut like any other."""
        with self.engine.autocast():
            scores = score(self.engine.module, batch, self.log_prob_size, update.temperature)
        columns = {name: batch.batch[name] for name in ("response_mask", *self.loss_columns) if name in batch.batch}
        shares = gather_shares({"log_probs": scores.log_probs, **columns})
        gathered = {name: torch.cat([share[name] for share in shares]) for name in shares[0]}
        log_probs = gathered.pop("log_probs").requires_grad_()
        counted_once = metrics if data_rank() == 0 else PooledMetrics()
        tokens = int(gathered["response_mask"].sum())
        loss = self.policy_term(gathered, log_probs, tokens, update.counts, counted_once)
        counted_once.add_sum("actor/loss", loss)
        [gradient] = torch.autograd.grad(loss, log_probs)
        parts = gradient.split([len(share["log_probs"]) for share in shares])
        return DataProto.from_dict({"policy_gradient": parts[data_rank()]})

    def policy_term(
        self, columns: dict[str, Tensor], log_probs: Tensor, tokens: int, counts: dict[str, Any], metrics: PooledMetrics
    ) -> Tensor:
        """Computes the policy loss of some rows, of `tokens` under the mask: their share of the mini-batch's."""
        mask, weights = columns["response_mask"], columns.get("rollout_is_weights")
        optional = {name: columns[name] for name in self.loss_reads} | self.config.policy_loss.kwargs
        if weights is not None:  # without them, a loss need not accept them
            optional = {"rollout_is_weights": weights, **optional}
        loss, loss_metrics = call_policy_loss(
            self.policy_loss.function,
            (columns.get("old_log_probs", log_probs.detach()), log_probs, columns["advantages"], mask),
            self.config.loss_agg_mode,
            ReadableNamespace(**self.loss_config, global_batch_info=counts),
            optional,
        )
        metrics.add_sum("actor/pg_loss", loss)
        for name, value in loss_metrics.items():
            if name in CLIPPED:
                metrics.add_sum(name, value, tokens / max(1, counts["batch_num_tokens"]))
            else:
                metrics.add_mean(name, value, tokens)
        return loss

    def micro_batch_loss(self, micro: MicroBatch, update: Update, metrics: PooledMetrics) -> Tensor:
        """Computes the micro-batch's share of the mini-batch's loss."""
        if micro.is_dummy:
            with self.engine.autocast(updates=True):
                return 0 * self.engine.module.token_scores(micro, update.temperature).log_probs.sum()
        config, columns, mask = self.config, micro.columns, micro.columns["response_mask"]
        counts, weight = update.counts, micro.policy_tokens
        with self.engine.autocast(updates=True):
            ask = ["log_probs", *(["entropy"] if config.entropy_coeff or config.calculate_entropy else [])]
            ask += {"logits"}.intersection(self.loss_reads)
            log_probs, entropy, *_, logits = self.engine.module.token_scores(micro, update.temperature, ask)
        if "rollout_log_probs" in columns:
            for name, value in rollout_mismatch(log_probs, columns["rollout_log_probs"], mask).items():
                metrics.add_max(name, value) if name == MAX_MISMATCH_RATIO else metrics.add_mean(name, value, weight)
        if self.policy_loss.over_mini_batch:
            linear = zero_masked(log_probs, mask) * columns["policy_gradient"]
            loss = (linear - linear.detach()).sum()  # its value was counted once, for the mini-batch
        else:
            loss = self.policy_term({**columns, "logits": logits}, log_probs, weight, counts, metrics)
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


@dataclass
class ReferencePolicy:
    """Scores by a frozen policy."""

    module: PreTrainedModel
    log_prob_size: MicroBatchSize  # what a forward pass may hold
    autocast: Callable[[], AbstractContextManager] = nullcontext  # the actor's, so that equal weights have no KL
    on_device: Callable[[], AbstractContextManager] = nullcontext  # in which its weights are there, and its own

    def compute_log_prob(self, batch: DataProto, temperature: float, columns: Sequence[str]) -> DataProto:
        """Computes `columns`, which are [ref_log_prob]: [B, R] float32, 0 where the policy produced no token."""
        with self.on_device(), self.autocast():
            return score_columns(self.module, batch, self.log_prob_size, temperature, columns)


def score_columns(
    module: PreTrainedModel, batch: DataProto, size: MicroBatchSize, temperature: float, columns: Sequence[str]
) -> DataProto:
    """Computes the `columns` of a log-prob pass: [B, R] float32, 0 but on the policy's tokens."""
    names = {column: OTHER_SCORES.get(column, "log_probs") for column in columns}
    scores = score(module, batch, size, temperature, [*names.values()])
    return DataProto.from_dict({column: getattr(scores, name) for column, name in names.items()})


def build_actor(worker: ModelWorker) -> DataParallelPPOActor:
    config = worker.config.actor_rollout_ref
    sizes = MicroBatchSize.of_updates(config.actor), MicroBatchSize.of_scoring(config.rollout)
    policy_loss = loss_settings(worker.config)
    return DataParallelPPOActor(config.actor, worker.policy, *sizes, policy_loss, loss_reads(worker.config))


def build_reference(worker: ModelWorker) -> ReferencePolicy:
    """Makes the frozen policy: the one that training starts from, which is the actor without its adapter if it has one;
    or the teacher that ref.model.path names."""
    policy, module = worker.config.actor_rollout_ref, worker.module
    if has_teacher(worker.config):
        return build_teacher(worker, policy.ref.model.path, TEACHER_KEY)
    if module.adapter.off:
        size, engine = MicroBatchSize.of_scoring(policy.ref), worker.policy
        return ReferencePolicy(engine.module, size, engine.autocast, engine.on_device_without_adapter)
    return freeze(worker, worker.load_policy(policy.model, "ref", module) if module.parallel.lockstep else module)


def build_teacher(worker: ModelWorker, path: str, key: str) -> ReferencePolicy:
    """Loads the frozen policy at `path`, which is set as `key`.path."""
    return freeze(worker, worker.load_policy(worker.config.policy_model.at(path), "ref", key=key))


def freeze(worker: ModelWorker, module: PreTrainedModel) -> ReferencePolicy:
    if not module.parallel.lockstep:
        module = frozen_copy(module, worker.dtype)
        module.parallel = worker.layouts["ref"]
    on_device = module.parallel.on_device(module.eval().requires_grad_(False))
    size = MicroBatchSize.of_scoring(worker.config.actor_rollout_ref.ref)
    return ReferencePolicy(module, size, worker.policy.autocast, on_device)
