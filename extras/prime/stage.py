"""PRIME in the step (arXiv:2502.01456): the process reward model learns from the outcomes, and rewards each token."""

from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from data.protocol import DataProto
from data.types import Metrics, Stage
from extras.prime.estimator import (
    batch_norm,
    best_of_n_weights,
    opponents_of,
    pair_accuracy,
    sign_accuracy,
    token_rewards,
)
from extras.prime.role import reference_column
from extras.prime.settings import KEY
from training.losses import masked_mean, masked_sum, zero_masked
from training.metric_utils import timer
from training.mini_batches import Update, mini_batches
from training.roles import SEQUENCES

ROUNDING = 1e-6  # of a sum of an episode's rewards


class ProcessRewards(Stage):
    """Trains the process reward model by a batch's outcomes, and adds the column prm_rewards [B, R] for the estimator.

    Where the model scores before it learns (update=reverse or none, or a loss that compares samples), the trainer has
    asked it, as it asks for every column that is read.

    Raises:
        ValueError: an outcome is not in [0, 1].
    """

    at = "prepared"

    @classmethod
    def reads(cls, config: Config) -> set[str]:
        settings = config.algorithm.prime
        is_scored_first = settings.update in ("reverse", "none") or settings.loss_type != "ce"
        return {reference_column(config), *(["prm_log_probs"] if is_scored_first else [])}

    @classmethod
    def makes(cls, config: Config) -> set[str]:
        return {"prm_rewards"}

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        settings, role, columns = self.config.algorithm.prime, self.trainer.roles["prm"], batch.batch
        mask, reference, acc = columns["response_mask"], columns[reference_column(self.config)], outcomes(batch)
        metrics: Metrics = {}
        if settings.update != "none":
            with timer("update_prm", timing):
                learnt, metrics = self.learn(batch, acc, reference)
            metrics |= {f"{name}_before": value for name, value in self.accuracies(learnt - reference, batch).items()}
            if settings.update == "after":
                columns["prm_log_probs"] = learnt
        if settings.update == "before":
            with timer("prm", timing):
                columns["prm_log_probs"] = role.compute(batch, ["prm_log_probs"], 1.0).batch["prm_log_probs"]
        log_ratio = zero_masked(columns["prm_log_probs"] - reference, mask)
        rewards = token_rewards(log_ratio, mask, settings.beta_train, settings.lam)
        columns["prm_rewards"] = batch_norm(rewards, mask) if settings.norm == "batch_norm" else rewards
        is_valid = mask.any(1)
        return metrics | {
            "reward_model/reward": masked_mean(columns["prm_rewards"].sum(1), is_valid).item(),
            "reward_model/raw_reward": masked_mean(log_ratio.sum(1), is_valid).item(),
            **self.accuracies(log_ratio, batch),
        }

    def learn(self, batch: DataProto, acc: Tensor, reference: Tensor) -> tuple[Tensor, Metrics]:
        """Has the model learn from each mini-batch; returns the log-probs of the passes that did, and metrics."""
        settings, mask = self.config.algorithm.prime, batch.batch["response_mask"]
        columns = {name: batch.batch[name] for name in SEQUENCES} | {"loss_mask": mask, "prm_reference": reference}
        columns |= {"prm_outcomes": acc[:, None], "row": torch.arange(len(batch))}
        if settings.loss_type != "ce":
            scores = settings.beta_train * masked_sum(batch.batch["prm_log_probs"] - reference, mask, axis=1)
            compared = {"bon_rm": scores, "bon_acc": acc}.get(settings.loss_type)
            weights = torch.ones_like(acc) if compared is None else best_of_n_weights(compared, batch.uid, mask)
            columns["prm_opponents"] = opponents_of(scores, acc, batch.uid, mask)[:, None]
            columns["prm_weights"] = weights[:, None]
        learner = KeepsLogProbs(self.trainer.roles["prm"], torch.zeros_like(reference))
        objects = [name for name in ("uid", *learner.spec.objects) if name in batch.non_tensor_batch]
        rows = DataProto.from_dict(columns, {name: batch.non_tensor_batch[name] for name in objects})
        metrics = self.trainer.learn(learner, mini_batches(rows, self.config, settings, self.trainer.global_step))
        return learner.log_probs, metrics

    def accuracies(self, log_ratio: Tensor, batch: DataProto) -> Metrics:
        """Measures how the model's rewards of the rows stand to their outcomes."""
        settings, mask, acc = self.config.algorithm.prime, batch.batch["response_mask"], outcomes(batch)
        rewards = token_rewards(zero_masked(log_ratio, mask), mask, settings.beta_train, settings.lam).sum(1)
        return {
            "reward_model/dpo_acc": pair_accuracy(rewards, acc, batch.uid, mask),
            "reward_model/dpo_acc_abs": sign_accuracy(rewards, acc, mask),
        }


class KeepsLogProbs:
    """Calls a role that learns, and keeps the log-probs that its passes have computed."""

    def __init__(self, role: Any, log_probs: Tensor) -> None:
        self.role, self.spec, self.log_probs = role, role.spec, log_probs

    def rows(self, method: str, mini_batch: DataProto, update: Update) -> Metrics:
        """Learns from a mini-batch; returns the metrics, on which all workers agree."""
        answer = self.role.rows(method, mini_batch, update)
        self.log_probs[mini_batch.batch["row"]] = answer.batch["prm_log_probs"]
        return {name: values[0] for name, values in answer.meta_info["metrics"].items()}


def outcomes(batch: DataProto) -> Tensor:
    """Returns the outcome of each row, [B]: the sum of its scores; raises ValueError if one is not in [0, 1]."""
    acc = batch.batch["token_level_scores"].sum(1)
    beyond = ((acc < -ROUNDING) | (acc > 1 + ROUNDING)).nonzero()[:, 0].tolist()
    if beyond:
        raise ValueError(
            f"{KEY}: row {beyond[0]} of the batch is scored {acc[beyond[0]].item():g}, and the process reward model "
            "learns from outcomes between 0 and 1: have the reward return such."
        )
    return acc
