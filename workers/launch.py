"""Starts the workers of a prepared run, trains with them, and ends them."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from configs.checks import batch_arithmetic, sampling_summary
from configs.errors import ConfigError, users_line_noted, warns_of_close
from configs.import_utils import find
from configs.loader import compose
from configs.schema import Config
from configs.settings import with_settings
from data.files import locked, sole_run
from data.types import Metrics
from training.environment import build_environment
from training.messages import files_to_come
from training.plan import Plan, make_plan
from training.preparation import build_datasets, build_reward, prepare
from training.ray_trainer import RayPPOTrainer
from workers.group import distinct_groups, roles_of
from workers.ray_group import start_pools, worker_summary


class Launch:
    """A run that is ready to start: a `RayPPOTrainer` that has its data set and reward, but no workers yet.

    Args:
        trainer_class: `RayPPOTrainer`, or a subclass, which then replaces that of trainer.cls.
        config: of `configs.loader.compose`; or a mapping or DictConfig of settings, which are checked here.
        train_dataset: rows or states, of any class (docs/data.md); one without a tokenizer gets the run's.
        reward_fn: a reward manager, or a function in any form of docs/rewards.md.
        environment: of env.id, closed at the end. plan: made from `config`. Without a plan, both are made here.

    Raises:
        ValueError: the parts do not fit together; names the setting or the row.
    """

    def __init__(
        self,
        trainer_class: type[RayPPOTrainer],
        config: Any,
        train_dataset: Dataset,
        reward_fn: Any,
        *,
        val_dataset: Dataset | None = None,
        environment: Any | None = None,
        plan: Plan | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            names = ", ".join(unknown)
            raise ConfigError(f"RayPPOTrainer takes no {names}: settings say which workers start, and the tokenizer.")
        if plan is None:
            config = settle(config if isinstance(config, Config) else compose(config, takes_objects=True))
            plan, environment = make_plan(config, trainer_class), build_environment(config)
            train_dataset, val_dataset = build_datasets(plan, environment, train_dataset, val_dataset)
            reward_fn = build_reward(plan, environment, reward_fn)
        self.plan, self.environment = plan, environment
        self.trainer: RayPPOTrainer | None = None  # once workers run
        self.parts = prepare(plan, train_dataset, reward_fn, val_dataset, environment)
        size = self.parts.train_loader.batch_size  # the default may have been lowered
        self.config = with_settings(plan.config, {"data.train_batch_size": size})

    @users_line_noted()
    def init_workers(self) -> None:
        """Starts the workers, and makes the trainer that drives them, in a folder that no other run has."""
        config, plan, parts = self.config, self.plan, self.parts
        with ExitStack() as cleanup:
            if Path(config.trainer.default_local_dir) not in locked:
                cleanup.enter_context(lock_folder(config))
            if "close" in dir(self.environment):
                cleanup.callback(close, self.environment)
            print(batch_arithmetic(config), sampling_summary(config), worker_summary(config), sep="\n")
            if action_of(config).writes:
                print(files_to_come(config.trainer, config.actor_rollout_ref.actor.checkpoint.save_contents))
            pools = start_pools(config, parts.total_steps, plan.roles)
            for group in distinct_groups(pools):
                cleanup.callback(group.close)
            self.trainer = plan.trainer_class(
                config,
                tokenizer=plan.tokenizer,
                roles=roles_of(pools, config),
                reward=parts.reward,
                train_loader=parts.train_loader,
                val_loader=parts.val_loader,
                env_setup=parts.env_setup,
                total_steps=parts.total_steps,
            )
            self.trainer.began = parts.began
            self.cleanup = cleanup.pop_all()

    @users_line_noted()
    def fit(self) -> Metrics:
        """Trains, and ends the workers; returns the metrics of the last validation."""
        if self.trainer is None:
            self.init_workers()
        with self.cleanup:
            trainer, self.trainer = self.trainer, None
            return action_of(self.config).act(trainer)


def close(environment: Any) -> None:
    with warns_of_close("the environment"):
        environment.close()


def action_of(config: Config) -> type:
    """Returns the class that trainer.action names: `Training`, or an extra's."""
    return find("action", config.trainer.action)


def settle(config: Config) -> Config:
    """Returns the settings that the run's action uses: a dry run reduces them."""
    return action_of(config).settle(config)


def lock_folder(config: Config) -> AbstractContextManager[None]:
    """Locks the run's folder, unless nothing is written to it."""
    writes = action_of(config).writes and not config.trainer.val_only
    return sole_run(config.trainer.default_local_dir) if writes else nullcontext()
