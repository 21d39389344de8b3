"""Trains a language model by reinforcement learning: python main.py --config-name frozenlake key=value …"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from configs.checks import batch_arithmetic, check_config, rehearsal, sampling_summary
from configs.errors import late_refusals, refusals, users_line_noted
from configs.loader import load_config, parse_arguments
from configs.process import end_on_interrupt, set_environment
from configs.schema import Config
from data.files import sole_run

if TYPE_CHECKING:
    from training.preparation import Parts

# torch, transformers and ray are imported inside functions: --help, --cfg job and config errors answer at once.


def main(argv: list[str] | None = None) -> None:
    set_environment()
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv, "ppo_trainer", __doc__)
    with refusals():
        config = load_config(arguments, Config)
        check_config(config)
        config = rehearsal(config)
        from training.preparation import prepare
        from workers.load_rollout import load_rollout_class
        from workers.worker_group import check_machine, start_command

        check_machine(config)
    with late_refusals(), own_folder(config):
        with refusals():
            parts = prepare(config)
            load_rollout_class(config.actor_rollout_ref.rollout.name)
        start_command(config)
        train(config, parts)


def run(config: Config) -> dict[str, float]:
    """Trains as `config` says; the metrics of the last validation."""
    from training.preparation import prepare

    config = rehearsal(config)
    with own_folder(config):
        return train(config, prepare(config))


def own_folder(config: Config) -> AbstractContextManager[None]:
    """Holds the run's folder, unless nothing is written to it."""
    writes = not (config.trainer.val_only or config.trainer.dry_run)
    return sole_run(config.trainer.default_local_dir) if writes else nullcontext()


@users_line_noted()
def train(config: Config, parts: "Parts") -> dict[str, float]:
    """The part that costs something: starts the workers and runs the loop, in a folder that is this run's."""
    from training.dry_run import dry_run
    from training.preparation import needed_roles
    from training.ray_trainer import RayPPOTrainer
    from training.reports import files_to_come
    from training.validation import Validator
    from workers.local_group import distinct_groups
    from workers.memory_needs import memory_report
    from workers.remote_roles import remote_roles
    from workers.worker_group import start_pools, worker_summary

    print(batch_arithmetic(config), sampling_summary(config), worker_summary(config.trainer), sep="\n")
    print(files_to_come(config.trainer, config.actor_rollout_ref.actor.checkpoint.save_contents))
    if memory := memory_report(config):
        print(memory)
    pools = start_pools(config, parts.total_steps, needed_roles(config))
    try:
        roles = remote_roles(pools, config.actor_rollout_ref.rollout.tensor_model_parallel_size)
        validator = Validator(config, parts.tokenizer, roles, parts.reward, parts.val_loader, parts.game)
        trainer = RayPPOTrainer(
            config,
            tokenizer=parts.tokenizer,
            roles=roles,
            reward=parts.reward,
            train_loader=parts.train_loader,
            validator=validator if parts.can_validate else None,
            total_steps=parts.total_steps,
        )
        return dry_run(trainer) if config.trainer.dry_run else trainer.fit()
    finally:
        for group in distinct_groups(pools):
            group.close()


if __name__ == "__main__":
    end_on_interrupt()
    main()
