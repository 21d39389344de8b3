"""Teachers in a worker: frozen policies that it holds, or that servers have, each scoring the rows that are its own."""

from collections.abc import Sequence
from typing import Protocol

import torch

from data.protocol import DataProto
from extras.distillation.prompt_scores import ServerTeacher
from extras.distillation.settings import ONE_TOKEN, TEACHERS, TOP_COLUMNS, Teacher
from workers.dp_actor import ReferencePolicy, build_teacher
from workers.micro_batches import cut_share
from workers.model_worker import ModelWorker


class Scorer(Protocol):
    """A teacher."""

    def score(self, batch: DataProto) -> DataProto:
        """Returns the columns of `stage.columns_of`, for these rows, maybe none."""


class HeldTeacher:
    """A frozen policy of this worker.

    Args:
        topk: tokens of each place that are scored, the likeliest of the first `vocabulary`; None: the sampled one.
    """

    def __init__(self, policy: ReferencePolicy, temperature: float, topk: int | None, vocabulary: int) -> None:
        self.policy, self.temperature, self.topk, self.vocabulary = policy, temperature, topk, vocabulary

    def score(self, batch: DataProto) -> DataProto:
        if self.topk:
            return self.likeliest(batch)
        scores = self.policy.compute_log_prob(batch, self.temperature, ["ref_log_prob"])
        return DataProto.from_dict({ONE_TOKEN[0]: scores.batch["ref_log_prob"]})

    @torch.no_grad()
    def likeliest(self, batch: DataProto) -> DataProto:
        """Finds the likeliest tokens of each place that the policy filled, and their log-probs; 0 elsewhere."""
        policy, shape = self.policy, (*batch.batch["responses"].shape, self.topk)
        log_probs, ids = torch.zeros(shape), torch.zeros(shape, dtype=torch.long)
        with policy.on_device(), policy.autocast():
            for micro in cut_share(batch, policy.log_prob_size, [], policy.module):
                logits = policy.module.token_scores(micro, self.temperature, ["log_probs", "logits"]).logits
                top = logits[..., : self.vocabulary].topk(self.topk)
                values = top.values - logits.logsumexp(-1, keepdim=True)
                index, scored = (micro.host.rows, slice(micro.response_width)), micro.is_scored.unsqueeze(-1)
                log_probs[index] = values.where(scored, 0.0).cpu()
                ids[index] = top.indices.where(scored, 0).cpu()
        policy.module.parallel.reshard(policy.module)
        return DataProto.from_dict(dict(zip(TOP_COLUMNS, (log_probs, ids), strict=True)))


class Teachers:
    """The role: rows go to the teacher whose place their column `teacher` has."""

    def __init__(self, teachers: Sequence[Scorer]) -> None:
        self.teachers = teachers

    def compute(self, batch: DataProto) -> DataProto:
        """Has every teacher score its rows; all workers ask all of them, in one order, as models may be in parts."""
        row_sets = [(batch.batch["teacher"] == index).nonzero()[:, 0] for index in range(len(self.teachers))]
        parts = [teacher.score(batch.select_idxs(rows)) for teacher, rows in zip(self.teachers, row_sets, strict=True)]
        order = torch.cat(row_sets).argsort()
        return DataProto.concat(parts).select_idxs(order)


def build_teachers(worker: ModelWorker) -> Teachers:
    settings, temperature = worker.config.distillation, worker.config.actor_rollout_ref.rollout.temperature
    topk = settings.distillation_loss.scored_topk

    def build(name: str, teacher: Teacher) -> Scorer:
        if teacher.base_url:
            return ServerTeacher(teacher, topk)
        policy = build_teacher(worker, teacher.model_path, f"{TEACHERS}.{name}")
        return HeldTeacher(policy, temperature, topk, len(worker.tokenizer))

    return Teachers([build(*item) for item in settings.teachers.items()])
