"""Trains a language model by reinforcement learning: python main.py --config-name frozenlake key=value …"""

from configs.checks import check_config, check_early
from configs.loader import command
from configs.schema import Config

main = command("ppo_trainer", Config, check_config, __doc__, "main.start", check_early)
if __name__ == "__main__":
    raise SystemExit(main())  # the imports below take seconds

from typing import Any

from torch.utils.data import Dataset

from configs.errors import refusals
from training.environment import build_environment
from training.plan import make_plan
from training.preparation import build_datasets, build_reward
from training.ray_trainer import RayPPOTrainer
from workers.launch import Launch, lock_folder, settle
from workers.ray_group import check_machine, start_command


def start(config: Config) -> None:
    """Trains from a command line: refuses in one line what cannot work, before workers start."""
    with refusals():
        config = settle(config)
        check_machine(config)
    with lock_folder(config):
        with refusals():
            trainer = build(config)
        start_command(config)
        trainer.init_workers()  # the actor, the rollout and further roles: in this process, or on Ray
        trainer.fit()


def run(config: Config, **objects: Any) -> dict[str, float]:
    """Trains by `config` and objects of the caller (`build`); returns the metrics of the last validation."""
    config = settle(config)
    with lock_folder(config):
        return build(config, **objects).fit()


def build(
    config: Config, train_dataset: Dataset | None = None, reward_fn: Any = None, val_dataset: Dataset | None = None
) -> Launch:
    """Makes the environment, its data set and reward manager, and the trainer. Objects of the caller replace those that
    settings name."""
    plan = make_plan(config)  # refuses what settings alone show to be wrong
    environment = build_environment(config)  # of env.id, as text (custom/env_wrapper.py); None: rows come from files
    # What is shown: states of the environment, by CustomEnvDataset of custom/env_dataset.py; or rows of files.
    train_dataset, val_dataset = build_datasets(plan, environment, train_dataset, val_dataset)
    # What is paid: the environment's rewards, by CustomRewardManager of custom/reward_manager.py; or a function's.
    reward_fn = build_reward(plan, environment, reward_fn)
    return RayPPOTrainer(config, train_dataset, reward_fn, val_dataset=val_dataset, environment=environment, plan=plan)
