"""Says what settings mean for a run, and refuses those that cannot work, before an environment or data are touched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.checks import LIB_KEY, check_names
from configs.errors import ConfigError
from configs.import_utils import (
    accepts,
    asked_for,
    check_accepts,
    find,
    forget_changed_files,
    load_modules,
    load_subclass,
    split_object,
)
from configs.schema import Config, DataConfig
from data.chat import ChatFormat
from data.pretrained import check_model, load_tokenizer
from data.seeding import seed_everything
from training.advantage import estimator_needs
from training.checkpoint import checkpoint_to_resume
from training.core_algos import ADV_ESTIMATOR_REGISTRY, TAKES_NO_PENALTY
from training.environment import load_conversations
from training.losses import TENSOR_ARGS, bind_policy_loss, get_policy_loss
from training.ray_trainer import RayPPOTrainer
from training.roles import ROLES, check_roles, columns_made, loss_reads, loss_settings, models_of, needed_roles, stages
from training.tracking import check_observers


@dataclass(frozen=True)
class Plan:
    """Holds what settings alone say of a run.

    Attributes:
        trainer_class: `RayPPOTrainer`, a subclass of the user's, or what an extra makes of either.
        roles: names of those that take part.
        conversations: what rows talk to, tools and simulated users; None: rows are answered.
        data: the data section, with its seed and the tools that every prompt describes.
    """

    config: Config
    trainer_class: type[RayPPOTrainer]
    roles: list[str]
    tokenizer: PreTrainedTokenizerBase
    conversations: Any | None
    data: DataConfig


def make_plan(config: Config, trainer_class: type[RayPPOTrainer] = RayPPOTrainer) -> Plan:
    """Loads the files and the tokenizer that `config` names; raises what cannot work, with its key, the cheap first.

    Args:
        trainer_class: trains, unless trainer.cls names another one.
    """
    seed_everything(config.trainer.seed)
    forget_changed_files()
    load_modules(config.actor_rollout_ref.model.external_lib, LIB_KEY)  # first: it may register what the rest looks up
    named = load_subclass(*split_object(config.trainer.cls), RayPPOTrainer, "trainer.cls")
    trainer_class = trainer_class if named is RayPPOTrainer else named
    for make_trainer in asked_for("trainer", config):
        trainer_class = make_trainer(trainer_class, config)
    check_observers(config)
    check_names(config)
    check_algorithm(config)
    roles = needed_roles(config, trainer_class.reads)
    check_roles(config, roles)
    longest = config.data.max_prompt_length + config.actor_rollout_ref.rollout.response_length
    for role, key, model in models_of(config, roles):
        check_model(model, key, longest if role.like_policy else 0, head=role.head)
    adapter, key = config.policy_model.adapter, "actor_rollout_ref.model"
    find("adapter", adapter, key).check_settings(config.policy_model, key)
    for name in roles:
        ROLES[name].check(config)
    checkpoint_to_resume(config)  # or raises
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    conversations, data = load_conversations(config, tokenizer)
    chat = ChatFormat(tokenizer, data.apply_chat_template_kwargs)
    if config.env.mode == "episode" and config.env.history == "transcript":
        chat.check_keeps_thoughts("user")
    if conversations:
        conversations.tell(chat)
    return Plan(config, trainer_class, roles, tokenizer, conversations, data)


def check_algorithm(config: Config) -> None:
    """Raises ConfigError unless estimator and policy loss can be called, and are given what they need."""
    name, loss_key = config.algorithm.adv_estimator, "actor_rollout_ref.actor.policy_loss.loss_mode"
    estimator = ADV_ESTIMATOR_REGISTRY[name]
    check_penalties(config, estimator)
    settings = loss_settings(config)
    function = get_policy_loss(settings.loss_mode).function
    check_accepts(loss_key, settings.loss_mode, function, settings.kwargs)
    if estimator.__module__.startswith(("training.", "extras.")) or not accepts(estimator, "config"):
        check_accepts("algorithm.adv_estimator", name, estimator, config.algorithm.adv_estimator_kwargs)
    if config.critic.enable is False and "values" in estimator_needs(name):
        raise ConfigError(f"algorithm.adv_estimator={name} needs values, and critic.enable=false: leave that out.")
    for stage in stages(config):
        stage.check(config)
    extra_kwargs = dict.fromkeys({"rollout_is_weights"} & columns_made(config) | loss_reads(config)) | settings.kwargs
    bind_policy_loss(function, TENSOR_ARGS, None, None, extra_kwargs, f"{loss_key}={settings.loss_mode}")


def check_penalties(config: Config, estimator: Callable) -> None:
    """Raises ConfigError for a penalty in the reward where the estimator reads no rewards, or none below 0."""
    name, overlong = config.algorithm.adv_estimator, config.reward.reward_kwargs.overlong_buffer_cfg
    reads_rewards = accepts(estimator, "token_level_rewards") or accepts(estimator, "rewards")
    reason = TAKES_NO_PENALTY.get(name) or ("" if reads_rewards else "reads no rewards")
    penalties = {
        "algorithm.use_kl_in_reward": config.algorithm.use_kl_in_reward,
        "reward.reward_kwargs.overlong_buffer_cfg.enable": overlong.enable,
    }
    for key in [key for key, is_set in penalties.items() if reason and is_set]:
        raise ConfigError(
            f"{key}=true with algorithm.adv_estimator={name}, which {reason}: leave it out "
            "(actor_rollout_ref.actor.use_kl_loss=true holds the policy back)."
        )
