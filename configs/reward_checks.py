"""What scores the responses: which settings of rewards go together."""

from configs.errors import ConfigError
from configs.schema import Config, ScoringConfig


def check_rewards(config: Config) -> None:
    rollout, groups = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    if groups.enable and rollout.n < 2:
        raise ConfigError(
            f"algorithm.filter_groups.enable=true with actor_rollout_ref.rollout.n={rollout.n}: one sample cannot "
            "differ from itself. Set n to at least 2 (8 is usual)."
        )
    check_functions(config.reward)
    if config.reward.reward_model.enable and config.env.id and config.env.history == "turns":
        raise ConfigError(
            f"reward.reward_model.enable=true with env.id={config.env.id}, env.history=turns: a reward model scores "
            "whole responses, and here an episode is many rows. Set env.history=transcript."
        )
    source, manager = config.reward.source(), config.reward.reward_manager
    if manager != type(manager)() and ((config.env.id and source) or config.reward.functions):
        raise ConfigError(
            f"reward.reward_manager={{path: {manager.path}, name: {manager.name}}} scores answers, and {source} scores "
            "them: take one of the two back. Of verl's names, naive, batch, dapo, gdpo, prime, remote and rate_limited "
            "are accepted."
        )
    key, shaping = "reward.reward_kwargs", config.reward.reward_kwargs
    buffer = shaping.overlong_buffer_cfg
    if buffer.enable and buffer.len is not None and buffer.len > shaping.max_resp_len:
        raise ConfigError(
            f"{key}.overlong_buffer_cfg.len={buffer.len} is above {key}.max_resp_len={shaping.max_resp_len}: so many "
            "tokens before the longest length the penalty begins. Leave it null for a fifth of that length."
        )


def check_functions(reward: ScoringConfig) -> None:
    """Raises ConfigError for an entry of reward.functions without a file, and for functions in two places."""
    if reward.functions and reward.custom_reward_function.path:
        raise ConfigError(
            f"{reward.source()} and reward.custom_reward_function.path={reward.custom_reward_function.path}: set one "
            "of the two; reward.functions may name a single function as well."
        )
    if reward.in_process and (reward.max_rpm or reward.max_tpm):
        raise ConfigError(
            f"reward.max_rpm={reward.max_rpm}, reward.max_tpm={reward.max_tpm} and reward.in_process=true: calls in "
            "this process are not counted by the minute. Set reward.in_process=false."
        )
    for place, entry in enumerate(reward.functions):
        if not entry.path:
            raise ConfigError(f"reward.functions[{place}] ({entry.name}) has no path: name the file of the function.")
