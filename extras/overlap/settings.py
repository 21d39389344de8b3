"""Settings of pools of workers, and of generation beside training."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting

ROLES = ("ref", "critic", "rm")


@dataclass
class Pool(Frozen):
    """The workers that generate, where they are not the trainer's (verl's keys)."""

    nnodes: int = setting(0, "Machines of a pool of its own for generation; 0: the trainer's workers generate.", ge=0)
    n_gpus_per_node: int | None = setting(None, "GPUs of each; null: as trainer's.", ge=0)
    n_workers_per_node: int = setting(1, "Workers of each when it has no GPU; with GPUs, one each.", ge=1)
    pool_roles: list[str] = setting(["rm"], "Roles that play in that pool, too: of ref, critic and rm.")

    @property
    def roles_apart(self) -> tuple[str, ...]:
        return ("rollout", "receiver", *self.pool_roles) if self.nnodes else ()

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if unknown := sorted({*self.pool_roles} - {*ROLES}):
            raise ConfigError(f"{key}.pool_roles names {unknown}: there are {', '.join(ROLES)}.")
        if self.nnodes and config.trainer.get("executor") == "local":
            raise ConfigError(f"{key}.nnodes={self.nnodes} asks for a second pool: trainer.executor=local has one.")


@dataclass
class Settings(Frozen):
    async_mode: str | None = setting(
        None,
        "one_step_off: generate the next step's batch while this one is learnt. null: one after the other.",
        choices=("one_step_off",),
    )

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.async_mode and not config.actor_rollout_ref.rollout.roles_apart:
            raise ConfigError(
                f"{key}.async_mode={self.async_mode} generates beside the update, which takes workers of its own: set "
                "actor_rollout_ref.rollout.nnodes=1."
            )
        correction = config.algorithm.get("rollout_correction")
        if self.async_mode and not (correction and (correction.bypass_mode or correction.rollout_is)):
            raise ConfigError(
                f"{key}.async_mode={self.async_mode} learns from weights of a step before: set algorithm."
                "rollout_correction.rollout_is=token, or bypass_mode=true, which takes a pass less."
            )
