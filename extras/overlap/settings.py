"""Settings of pools of workers, and of generation beside training."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting
from extras.overlap.record import ENGINE_STEPS, GROUPS, check_replay

ROLES = ("ref", "critic", "rm", "teachers")


@dataclass
class Pool(Frozen):
    """The workers that generate, where they are not the trainer's (verl's keys)."""

    switches = "nnodes: n_gpus_per_node n_workers_per_node pool_roles"
    nnodes: int = setting(0, "Machines of a pool of its own for generation; 0: the trainer's workers generate.", ge=0)
    n_gpus_per_node: int | None = setting(None, "GPUs of each; null: as trainer's.", ge=0)
    n_workers_per_node: int = setting(1, "Workers of each when it has no GPU; with GPUs, one each.", ge=1)
    pool_roles: list[str] = setting(["rm"], "Roles that play in that pool, too: ref, critic, rm, teachers, or yours.")

    @property
    def roles_apart(self) -> tuple[str, ...]:
        return ("rollout", "receiver", "generator", *self.pool_roles) if self.nnodes else ()

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if unknown := sorted({*self.pool_roles} - {*ROLES} - config.get("roles", {}).keys()):
            raise ConfigError(
                f"{key}.pool_roles names {unknown}: there are {', '.join(ROLES)}, and yours that are set at roles."
            )
        if self.nnodes and config.trainer.get("executor") == "local":
            raise ConfigError(f"{key}.nnodes={self.nnodes} asks for a second pool: trainer.executor=local has one.")


@dataclass
class Settings(Frozen):
    switches = "async_mode=fully_async: max_staleness batch_order"
    async_mode: str | None = setting(
        None,
        "Generate beside the update: the next batch (one_step_off), or several, by weights that change meanwhile.",
        choices=("one_step_off", "fully_async"),
    )
    max_staleness: int = setting(1, "With fully_async: most updates that a token may be behind; 0: as usual.", ge=0)
    batch_order: str = setting(
        "strict",
        "With fully_async: each step learns its own prompts, or the groups that are finished first (first_come).",
        choices=("strict", "first_come"),
    )
    replay: str | None = setting(None, "Folder of a fully_async run that is to be played again, step by step.")

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.replay and self.async_mode != "fully_async":
            raise ConfigError(f"{key}.replay={self.replay} plays a run of {key}.async_mode=fully_async again: set it.")
        if not self.async_mode:
            return
        mode, rollout = f"{key}.async_mode={self.async_mode}", config.actor_rollout_ref.rollout
        if not rollout.roles_apart:
            raise ConfigError(
                f"{mode} generates beside the update, which takes workers of its own: set actor_rollout_ref.rollout."
                "nnodes=1."
            )
        fully, correction = self.async_mode == "fully_async", config.algorithm.get("rollout_correction")
        if (self.max_staleness or not fully) and not (correction and (correction.bypass_mode or correction.rollout_is)):
            raise ConfigError(
                f"{mode} learns from tokens of older weights: set algorithm.rollout_correction.rollout_is=token, or "
                "bypass_mode=true, which takes a pass less."
            )
        filters = config.algorithm.get("filter_groups")
        takes_first = self.batch_order == "first_come"
        if fully and (self.max_staleness or takes_first) and filters and filters.enable:
            raise ConfigError(f"{mode} draws batches ahead: leave out algorithm.filter_groups, or one_step_off has it.")
        if fully and takes_first and config.algorithm.adv_estimator == "remax":
            raise ConfigError(
                f"{key}.batch_order=first_come draws no greedy answers: algorithm.adv_estimator=remax needs them."
            )
        if fully and rollout.tensor_model_parallel_size > 1:
            raise ConfigError(f"{mode}: set rollout.tensor_model_parallel_size=1, or async_mode=one_step_off.")
        if self.replay:
            trainer, gpus = config.trainer, rollout.n_gpus_per_node
            gpus = trainer.n_gpus_per_node if gpus is None else gpus
            workers = range(rollout.nnodes * (gpus or rollout.n_workers_per_node))
            names = [*map(ENGINE_STEPS.format, workers), *[GROUPS] * takes_first]
            check_replay(Path(self.replay), Path(trainer.default_local_dir), names)
