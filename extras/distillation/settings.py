"""Settings of on-policy distillation: verl's keys, and the address of a server that has a teacher."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, group, setting

TOP_K = "forward_kl_topk"
SAMPLED = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")  # estimators of the reverse KL by the sampled token
TEACHERS = "distillation.teacher_models"
ONE_TOKEN, TOP_COLUMNS = ("teacher_log_prob",), ("teacher_topk_log_probs", "teacher_topk_ids")  # [B, R], [B, R, k]


@dataclass
class Teacher(Frozen):
    key: str | None = setting(None, "Rows whose teacher_key is this are its own; null: all rows, of a teacher alone.")
    model_path: str | None = setting(None, "Directory of the teacher, which the workers hold.")
    base_url: str | None = setting(None, "Address of a server that has it, in place of model_path: vLLM's, or ours.")
    model: str | None = setting(None, "Name of the teacher at its server; null: the server's only model.")
    api_key: str | None = setting(None, "Key of the server.")
    timeout: float = setting(600.0, "Seconds that the server may take to score a row.", gt=0)


@dataclass
class LossConfig(Frozen):
    switches = f"loss_mode={TOP_K}: topk; use_policy_gradient: clip_ratio clip_ratio_low clip_ratio_high"
    loss_mode: str = setting(
        "k3",
        "How far the policy is from the teacher: of the sampled token, or over the teacher's topk tokens.",
        choices=(*SAMPLED, TOP_K),
    )
    topk: int = setting(32, "With forward_kl_topk: tokens of the teacher in each place, the likeliest ones.", ge=1)
    use_task_rewards: bool = setting(True, "Learn from the rewards, too; false: from the teacher alone.")
    distillation_loss_coef: float = setting(1.0, "Weight of the teacher's loss beside that of the rewards.", ge=0)
    loss_max_clamp: float | None = setting(None, "Largest loss of a token, either side of 0; null: any.", gt=0)
    log_prob_min_clamp: float | None = setting(None, "With forward_kl_topk: least log-prob that is read; null: any.")
    use_policy_gradient: bool = setting(False, "Take the loss as a reward of minus as much, and not its gradient.")
    clip_ratio: float = setting(0.2, "With use_policy_gradient: ε of PPO's loss.", ge=0)
    clip_ratio_low: float | None = setting(None, "Lower ε; null: clip_ratio.", ge=0)
    clip_ratio_high: float | None = setting(None, "Upper ε; null: clip_ratio.", ge=0)

    @property
    def scored_topk(self) -> int | None:
        """Returns how many tokens of each place a teacher scores; None: the sampled one."""
        return self.topk if self.loss_mode == TOP_K else None

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.loss_mode in ("k1", "kl") and not self.use_policy_gradient and config.distillation.enabled:
            raise ConfigError(
                f"{key}.loss_mode={self.loss_mode} has a gradient that does not depend on the teacher: set loss_mode="
                f"k2, whose gradient is that of the KL, or {key}.use_policy_gradient=true."
            )


@dataclass
class DistillationConfig(Frozen):
    enabled: bool = setting(False, "Learn from teachers that score the policy's own answers.")
    teacher_key: str = setting("data_source", "Column of the rows that says which teacher a row has.")
    teacher_models: dict[str, Teacher] = setting({}, "Teachers by a name of yours: NAME.model_path=…, NAME.key=….")
    distillation_loss: LossConfig = group(LossConfig, "What is learnt from them.")

    @property
    def teachers(self) -> dict[str, Teacher]:
        """Returns the teachers of which anything is set: verl's yaml has one of which nothing is."""
        return {name: teacher for name, teacher in self.teacher_models.items() if teacher != Teacher()}

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        teachers = self.teachers
        if not self.enabled:
            return
        if not teachers:
            raise ConfigError(f"{key}.enabled=true and no teacher: set {key}.teacher_models.NAME.model_path=….")
        for name, teacher in teachers.items():
            where = f"{key}.teacher_models.{name}"
            if bool(teacher.model_path) == bool(teacher.base_url):
                raise ConfigError(f"{where}: a teacher has either model_path or base_url. Set one of them.")
            if len(teachers) > 1 and teacher.key is None:
                raise ConfigError(f"{where}.key is not set: of several teachers each names the rows that it has.")
            if teacher.base_url and config.actor_rollout_ref.rollout.temperature != 1:
                raise ConfigError(
                    f"{where}.base_url: a server scores at temperature 1. Set actor_rollout_ref.rollout.temperature=1, "
                    "or model_path."
                )
        keys = [teacher.key for teacher in teachers.values()]
        if len({*keys}) < len(keys):
            raise ConfigError(f"{key}.teacher_models: two teachers have one key, of {', '.join(map(str, keys))}.")

    def of_key(self, value: Any) -> int:
        """Returns the place of the teacher of a row whose teacher_key is `value`; raises ValueError if it has none."""
        keys = [teacher.key for teacher in self.teachers.values()]
        if keys == [None]:
            return 0
        if value not in keys:
            raise ValueError(
                f"a row has {self.teacher_key}={value}, and distillation.teacher_models has teachers of "
                f"{', '.join(map(str, keys))}: give one the key {value}, or leave such rows out."
            )
        return keys.index(value)


@dataclass
class Settings(Frozen):
    """Stand at the top of the config."""

    switches = "distillation.enabled: distillation"
    distillation: DistillationConfig = group(DistillationConfig, "On-policy distillation (docs/distillation.md).")
