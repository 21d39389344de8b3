"""Has teachers score the policy's answers, each the rows that are its own, for a policy loss that follows them."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from configs.errors import ConfigError
from configs.schema import Config
from data.pretrained import check_same_tokens, load_tokenizer
from data.protocol import DataProto
from data.types import Metrics, Stage
from extras.distillation.settings import ONE_TOKEN, TEACHERS, TOP_COLUMNS, TOP_K
from training.losses import get_policy_loss
from training.metric_utils import timer
from training.roles import RoleSpec


def columns_of(config: Config) -> tuple[str, ...]:
    return TOP_COLUMNS if config.distillation.distillation_loss.scored_topk else ONE_TOKEN


def teacher_models(config: Config) -> dict[str, Any]:
    """Returns the settings of the teachers that the workers hold, by the keys of their paths."""
    return {
        f"{TEACHERS}.{name}.model_path": config.policy_model.at(teacher.model_path)
        for name, teacher in config.distillation.teachers.items()
        if teacher.model_path
    }


def check_teachers(config: Config) -> None:
    """Raises ValueError for a teacher that reads other tokens than the policy, or a server that cannot score them."""
    from extras.distillation.prompt_scores import check_server

    tokenizer, settings = load_tokenizer(config.policy_model), config.distillation.distillation_loss
    if settings.loss_mode == TOP_K and settings.topk > len(tokenizer):
        raise ConfigError(
            f"distillation.distillation_loss.topk={settings.topk} is above the {len(tokenizer)} tokens of the policy."
        )
    for key, model in teacher_models(config).items():
        check_same_tokens(config.policy_model, model.path, key)
    for name, teacher in config.distillation.teachers.items():
        if teacher.base_url:
            check_server(teacher, f"{TEACHERS}.{name}", tokenizer, config)


ROLE = RoleSpec(
    name="teachers",
    build="extras.distillation.teachers:build_teachers",
    section="distillation",
    head=AutoModelForCausalLM,
    model=teacher_models,
    columns=(*ONE_TOKEN, *TOP_COLUMNS),
    reads=lambda config: {"compute": ("teacher",)},
    plays=lambda config: config.distillation.enabled and not config.trainer.val_only,
    check=check_teachers,
)


class Distillation(Stage):
    """Adds what the teachers say of each token of the policy's (`columns_of`)."""

    at = "advantaged"

    @classmethod
    def check(cls, config: Config) -> None:
        actor, correction = config.actor_rollout_ref.actor, config.algorithm.get("rollout_correction")
        key, loss = "actor_rollout_ref.actor.policy_loss.loss_mode", get_policy_loss(actor.policy_loss.loss_mode)
        if correction and correction.bypass_mode:
            raise ConfigError(
                "distillation.enabled=true and algorithm.rollout_correction.bypass_mode=true bring a policy loss each: "
                "take one of them back (rollout_correction.rollout_is=token corrects without one)."
            )
        if config.distillation.distillation_loss.use_task_rewards and loss.over_mini_batch:
            raise ConfigError(
                f"{key}={actor.policy_loss.loss_mode} is of a whole mini-batch, and cannot stand beside "
                "distillation.enabled=true: set another, or distillation_loss.use_task_rewards=false."
            )
        if columns_of(config) == TOP_COLUMNS and actor.peers > 1:
            raise ConfigError(
                f"distillation.distillation_loss.loss_mode={TOP_K} reads all logits of a token: set "
                "actor_rollout_ref.actor.tensor_parallel_size=1."
            )

    @classmethod
    def makes(cls, config: Config) -> set[str]:
        return {*columns_of(config)}

    @classmethod
    def loss_settings(cls, config: Config) -> dict[str, Any]:
        from extras.distillation import divergence  # noqa: F401, registers them; it imports what imports this module

        loss = config.distillation.distillation_loss
        task = config.actor_rollout_ref.actor.policy_loss.loss_mode if loss.use_task_rewards else None
        name = "distillation_topk" if columns_of(config) == TOP_COLUMNS else "distillation"
        return {"loss_mode": name, "task_loss": task, "distillation": loss}

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        settings = self.config.distillation
        with timer("teachers", timing):
            keys = batch.non_tensor_batch.get(settings.teacher_key, [None] * len(batch))
            batch.batch["teacher"] = torch.tensor([settings.of_key(key) for key in keys])
            batch.batch.update(self.trainer.roles["teachers"].rows("compute", batch).tensors)
            batch.batch.pop("teacher")
        return {}
