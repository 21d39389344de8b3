"""Trains a language model by reinforcement learning: python main.py --config-name frozenlake key=value …"""

from configs.checks import batch_arithmetic, check_config, sampling_summary
from configs.loader import command
from configs.schema import Config

main = command("ppo_trainer", Config, check_config, __doc__, "main.start")
if __name__ == "__main__":
    raise SystemExit(main())  # the imports below take seconds

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from configs.errors import refusals, users_line_noted, warns_of_close
from configs.extras import find
from configs.settings import with_settings
from data.files import sole_run
from training.messages import files_to_come
from training.preparation import Parts, prepare
from training.roles import needed_roles
from workers.group import distinct_groups, roles_of
from workers.ray_group import check_machine, start_command, start_pools, worker_summary


def start(config: Config) -> None:
    """Trains from a command line: checks all that does not need workers first, and refuses in one line."""
    with refusals():
        config = action_of(config).settle(config)
        check_machine(config)
    with lock_folder(config):
        with refusals():
            parts = prepare(config)
        start_command(config)
        train(config, parts)


def run(config: Config, **arguments: Any) -> dict[str, float]:
    """Trains by `config`; passes `arguments` on to `prepare`; returns the metrics of the last validation."""
    config = action_of(config).settle(config)
    with lock_folder(config):
        return train(config, prepare(config, **arguments))


def action_of(config: Config) -> type:
    """Finds what is done with a trainer: to train, if no setting asks for another thing."""
    return find("action", config.trainer.action)


def lock_folder(config: Config) -> AbstractContextManager[None]:
    """Locks the run's folder, unless nothing is written to it."""
    writes = action_of(config).writes and not config.trainer.val_only
    return sole_run(config.trainer.default_local_dir) if writes else nullcontext()


@users_line_noted()
def train(config: Config, parts: Parts) -> dict[str, float]:
    """Starts the workers and runs the training loop, in a folder that this run has locked."""
    config = with_settings(config, {"data.train_batch_size": parts.train_loader.batch_size})  # a default may not fit
    print(batch_arithmetic(config), sampling_summary(config), worker_summary(config), sep="\n")
    if action_of(config).writes:
        print(files_to_come(config.trainer, config.actor_rollout_ref.actor.checkpoint.save_contents))
    pools = start_pools(config, parts.total_steps, needed_roles(config, parts.trainer_class.reads))
    try:
        return action_of(config).act(parts.build_trainer(config, roles_of(pools, config)))
    finally:
        for group in reversed(distinct_groups(pools)):
            group.close()
        if parts.environment is not None:
            with warns_of_close("the environment"):
                parts.environment.close()
