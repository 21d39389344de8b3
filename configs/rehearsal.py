"""What a dry run (trainer.dry_run=true) does otherwise than the run itself: one small step that changes nothing."""

from dataclasses import replace
from typing import Any

from configs.loader import workers_asked_for
from configs.schema import Config

PROMPTS = 2


def rehearsal(config: Config) -> Config:
    """The config of one step on two prompts (more only if its samples could not be dealt out to all workers otherwise)
    at a learning rate of 0; a config without trainer.dry_run as it is."""
    if not config.trainer.dry_run:
        return config
    workers, samples = workers_asked_for(config.trainer), config.actor_rollout_ref.rollout.n
    prompts = next(count for count in range(PROMPTS, PROMPTS + workers) if count * samples % workers == 0)
    return with_settings(
        config,
        {
            "data.train_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
            "actor_rollout_ref.actor.ppo_epochs": 1,
            "actor_rollout_ref.actor.optim.lr": 0.0,
            "critic.ppo_mini_batch_size": prompts,
            "critic.ppo_epochs": 1,
            "critic.optim.lr": 0.0,
            "algorithm.filter_groups.max_num_gen_batches": 1,
            "trainer.critic_warmup": 0,
            "trainer.total_training_steps": 1,
            "trainer.resume_mode": "disable",
        },
    )


def with_settings(section: Any, settings: dict[str, Any]) -> Any:
    """`section` (a dataclass of the config) with other values under these dotted keys."""
    below: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        below.setdefault(name, {})[rest] = value
    changed = {name: found[""] if "" in found else with_settings(section[name], found) for name, found in below.items()}
    return replace(section, **changed)
