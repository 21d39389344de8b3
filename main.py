"""Trains a language model by reinforcement learning: python main.py --config-name frozenlake key=value …"""

from configs.checks import batch_arithmetic, check_config, rehearsal, sampling_summary
from configs.loader import command
from configs.schema import Config

main = command("ppo_trainer", Config, check_config, __doc__, "main.start")
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds

from contextlib import AbstractContextManager, nullcontext

from configs.errors import refusals, users_line_noted, warns_of_close
from configs.settings import with_settings
from data.files import sole_run
from extras.dry_run.dry_run import dry_run
from extras.report.lines import files_to_come
from extras.report.run_info import Start
from training.preparation import Parts, prepare
from training.roles import needed_roles
from training.validation import Validator
from workers.group import distinct_groups, roles_of
from workers.ray_group import Resources, check_machine, start_command, start_pools, worker_summary


def start(config: Config) -> None:
    """Trains from a command line: checks all that does not need workers first, and refuses in one line."""
    with refusals():
        config = rehearsal(config)
        check_machine(config)
    with lock_folder(config):
        with refusals():
            parts = prepare(config)
        start_command(config)
        train(config, parts)


def run(config: Config) -> dict[str, float]:
    """Trains by `config`, and returns the metrics of the last validation."""
    config = rehearsal(config)
    with lock_folder(config):
        return train(config, prepare(config))


def lock_folder(config: Config) -> AbstractContextManager[None]:
    """Locks the run's folder, unless nothing is written to it."""
    writes = not (config.trainer.val_only or config.trainer.dry_run)
    return sole_run(config.trainer.default_local_dir) if writes else nullcontext()


@users_line_noted()
def train(config: Config, parts: Parts) -> dict[str, float]:
    """Starts the workers and runs the training loop, in a folder that this run has locked."""
    config = with_settings(config, {"data.train_batch_size": parts.train_loader.batch_size})  # a default may not fit
    lines = [batch_arithmetic(config), sampling_summary(config), worker_summary(config.trainer)]
    print(*lines, files_to_come(config.trainer, config.actor_rollout_ref.actor.checkpoint.save_contents), sep="\n")
    threads = Resources.from_config(config.trainer).threads
    with Start.of_run(config, parts.total_steps, threads, lines) as start:
        pools = start_pools(config, parts.total_steps, needed_roles(config, parts.trainer_class.reads))
        try:
            roles = roles_of(pools, config.actor_rollout_ref)
            validator = Validator(config, parts.tokenizer, roles, parts.reward, parts.val_loader, parts.game)
            trainer = parts.trainer_class(
                config,
                tokenizer=parts.tokenizer,
                roles=roles,
                reward=parts.reward,
                train_loader=parts.train_loader,
                validator=validator if parts.can_validate else None,
                total_steps=parts.total_steps,
            )
            trainer.start = start
            return dry_run(trainer) if config.trainer.dry_run else trainer.fit()
        finally:
            for group in distinct_groups(pools):
                group.close()
            if parts.environment is not None:
                with warns_of_close("the environment"):
                    parts.environment.close()
