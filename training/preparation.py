"""Builds and checks everything a run needs beside its workers, before any model is loaded."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.progress import track
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.checks import check_cuts
from configs.errors import ConfigError, did_you_mean
from configs.extras import Registry, asked_for, check_present, find
from configs.import_utils import accepts, forget_changed_files, load_modules, load_subclass, split_object
from configs.loader import options
from configs.schema import Config, DataConfig, RolloutConfig
from data.chat import ChatFormat
from data.pretrained import check_has_head, check_positions, load_model_config, load_tokenizer
from data.rl_dataset import (
    PROGRESS_BAR_FROM,
    OverlongPrompt,
    RLHFDataset,
    create_rl_dataset,
    gives_rows_as_they_are,
    report_overlong,
    row_maker,
)
from data.rows import report_overlap
from data.sampler import Dynamic, PromptLoader, SequentialSampler, create_rl_sampler, epoch_rows, fitting_batch_size
from data.seeding import seed_everything
from training.advantage import estimator_needs
from training.checkpoint import checkpoint_to_resume
from training.core_algos import ADV_ESTIMATOR_REGISTRY, NEEDS_GROUPS
from training.environment import (
    AGENT_COLUMN,
    SINGLE_TURN,
    TOOL_AGENT,
    EnvSetup,
    StateDataset,
    build_env_setup,
    build_environment,
    data_settings,
    env_dataset,
    known_names,
    load_agents,
    load_conversations,
)
from training.losses import POLICY_LOSS_REGISTRY, TENSOR_ARGS, bind_policy_loss
from training.ray_trainer import RayPPOTrainer
from training.reward import ChecksRows, RewardManager, load_reward_manager
from training.roles import (
    ROLES,
    TEACHER_KEY,
    columns_made,
    loss_reads,
    loss_settings,
    models_of,
    needed_roles,
    policy_loss_of,
    stages,
    teaches,
)
from training.tracking import check_observers

ROWS_LOOKED_AT = 32  # from all over the data set
LIB_KEY, MULTI_TURN = "actor_rollout_ref.model.external_lib", "actor_rollout_ref.rollout.multi_turn"


@dataclass
class Parts:
    tokenizer: PreTrainedTokenizerBase
    reward: RewardManager
    train_loader: PromptLoader
    val_loader: PromptLoader | None
    environment: Any | None
    game: EnvSetup | None
    total_steps: int
    trainer_class: type[RayPPOTrainer]
    began: float = field(default_factory=time.monotonic)

    def build_trainer(self, config: Config, roles: Mapping[str, Any]) -> RayPPOTrainer:
        names = ("tokenizer", "reward", "train_loader", "val_loader", "game", "total_steps")
        trainer = self.trainer_class(config, roles=roles, **{name: vars(self)[name] for name in names})
        trainer.began = self.began
        return trainer


def prepare(config: Config, reward: Callable | None = None) -> Parts:
    """Builds tokenizer, environment, reward and data, the cheap ones first; raises what cannot work, with its key.
    `reward`: a function that scores in place of what the settings name."""
    seed_everything(config.trainer.seed)
    forget_changed_files()
    load_modules(config.actor_rollout_ref.model.external_lib, LIB_KEY)  # first: it may register what the rest looks up
    trainer_class = load_subclass(*split_object(config.trainer.cls), RayPPOTrainer, "trainer.cls")
    for make_trainer in asked_for("trainer", config):
        trainer_class = make_trainer(trainer_class, config)
    check_observers(config)
    check_algorithm(config)
    check_roles(config, trainer_class.reads)
    check_models(config, trainer_class.reads)
    checkpoint_to_resume(config)  # or raises
    environment = build_environment(config)
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    if reward is None:
        reward = load_reward_manager(config.reward, tokenizer, environment, config)
    else:
        reward = find("reward", "object")(reward, config.reward, tokenizer)
    conversations = load_conversations(config.actor_rollout_ref.rollout.multi_turn, tokenizer)
    if conversations:
        conversations.tell(tokenizer)
    data = data_settings(config, conversations and conversations.template_kwargs(tokenizer))
    speaks = conversations is not None and conversations.users is not None
    check_goes_on(config, ChatFormat(tokenizer, data.apply_chat_template_kwargs), speaks)
    train_loader = build_train_loader(config, data, tokenizer, environment)
    if config.env.mode == "episode":
        check_has_state(train_loader)
    val_loader = build_val_loader(config, data, tokenizer, environment)
    if val_loader and (environment or config.data.train_files):
        datasets = train_loader.dataset, val_loader.dataset
        report_overlap(*(data.prompt_ids if isinstance(data, RLHFDataset) else [] for data in datasets), tokenizer)
    scores_itself = config.actor_rollout_ref.rollout.agent.program and config.reward.source() is None
    for loader in filter(None, (train_loader, val_loader)):
        positions = rows_looked_at(loader)
        if isinstance(reward, ChecksRows) and not scores_itself:
            reward.check({position: loader.row(position) for position in positions})
        check_rows(config.actor_rollout_ref.rollout, loader, positions, conversations)
    total_steps = config.trainer.total_training_steps or len(train_loader) * config.trainer.total_epochs
    check_warmup(config, total_steps)
    plays_episodes = config.env.id is not None and (config.env.mode == "episode" or config.env.val_episodes > 0)
    game = build_env_setup(config, environment, train_loader.dataset, reward) if plays_episodes else None
    return Parts(tokenizer, reward, train_loader, val_loader, environment, game, total_steps, trainer_class)


def check_warmup(config: Config, total_steps: int) -> None:
    """Raises ConfigError if the run is over before the policy's first update."""
    warmup = config.trainer.critic_warmup
    if warmup > total_steps and not config.trainer.val_only:
        raise ConfigError(
            f"trainer.critic_warmup={warmup}: the policy learns from that step on, and the run has {total_steps}: "
            f"it would never learn. Set it below {total_steps}."
        )


def rows_looked_at(loader: PromptLoader) -> list[int]:
    """Returns the positions of rows from all over the data."""
    usable = [position for position in range(len(loader.dataset)) if position not in loader.left_out]
    return usable[:: -(-len(usable) // ROWS_LOOKED_AT)]


def check_roles(config: Config, trainer_reads: Collection[str] = ()) -> None:
    """Has each role of a run check its settings; raises ConfigError, also for settings of a role that there is not."""
    needed = needed_roles(config, trainer_reads)
    with_section = [name for name, spec in ROLES.items() if not isinstance(spec.section, str)]
    for name in config.roles.keys() - with_section:
        raise ConfigError(f"roles.{name}: no role of this name has settings there.{did_you_mean(name, with_section)}")
    if teaches(config) and not config.trainer.val_only and "ref" not in needed:
        raise ConfigError(
            f"{TEACHER_KEY}.path names a teacher, and nothing reads ref_log_prob: set actor_rollout_ref.actor."
            "use_kl_loss=true or algorithm.use_kl_in_reward=true, or leave it out."
        )
    for spec in map(ROLES.get, needed):
        if spec.section:
            check_cuts(config, spec.settings(config), spec.key)


def check_models(config: Config, trainer_reads: Collection[str]) -> None:
    """Checks by the config.json of each model that it has the head, and positions for the longest sequence; then has
    each role check the rest."""
    longest = config.data.max_prompt_length + config.actor_rollout_ref.rollout.response_length
    for spec, key, model in models_of(config, trainer_reads):
        model_config = load_model_config(model, model.path, key)
        check_has_head(model_config, key, spec.head)
        if spec.like_policy:
            check_positions(model_config, longest, key, "data.max_prompt_length + data.max_response_length")
    policy, key = config.policy_model, "actor_rollout_ref.model"
    find("adapter", policy.adapter, key).check_settings(policy, key)
    for name in needed_roles(config, trainer_reads):
        ROLES[name].check(config)


def check_algorithm(config: Config) -> None:
    """Raises ConfigError unless estimator and policy loss exist, can be called, and are given what they need."""
    algorithm, settings = config.algorithm, loss_settings(config)
    name, samples = algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    loss_key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    check_known(config, "algorithm.adv_estimator", name, ADV_ESTIMATOR_REGISTRY)
    check_known(config, loss_key, settings.loss_mode, POLICY_LOSS_REGISTRY)
    function, estimator = policy_loss_of(config).function, ADV_ESTIMATOR_REGISTRY[name]
    check_accepts(loss_key, settings.loss_mode, function, settings.kwargs)
    if estimator.__module__.startswith(("training.", "extras.")) or not accepts(estimator, "config"):
        check_accepts("algorithm.adv_estimator", name, estimator, algorithm.adv_estimator_kwargs)
    if name in NEEDS_GROUPS and samples < 2:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={samples}: algorithm.adv_estimator={name} compares the samples of one prompt "
            "and needs at least 2 (8 is usual)."
        )
    if config.critic.enable is False and "values" in estimator_needs(name):
        raise ConfigError(f"algorithm.adv_estimator={name} needs values, and critic.enable=false: leave that out.")
    for stage in stages(config):
        stage.check(config)
    extra_kwargs = dict.fromkeys({"rollout_is_weights"} & columns_made(config) | loss_reads(config)) | settings.kwargs
    bind_policy_loss(function, TENSOR_ARGS, None, None, extra_kwargs, f"{loss_key}={settings.loss_mode}")


def check_known(config: Config, key: str, name: str, registry: Registry) -> None:
    """Raises ConfigError unless a function is registered as `name`, by the setting `key`, or an extra has it."""
    if name not in registry:
        check_present(registry.kind, name, key)
        lowered, loaded = name.lower(), config.actor_rollout_ref.model.external_lib
        is_recipe = lowered in options("recipe") and lowered not in registry
        guess = f" Did you mean recipe={lowered}?" if is_recipe else did_you_mean(lowered, list(registry))
        decorator = "register_adv_est" if registry is ADV_ESTIMATOR_REGISTRY else "register_policy_loss"
        raise ConfigError(
            f"{key}={name}: there is none of this name.{guess} There are {list(registry)}; one of yours stands under "
            f"@{decorator}({name!r}) in a file that {LIB_KEY} names; it names {loaded or 'none'}."
        )


def check_accepts(key: str, name: str, function: Callable, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError unless the function that the setting `key` names accepts `kwargs`."""
    if unknown := sorted(argument for argument in kwargs if not accepts(function, argument)):
        raise ConfigError(f"{key}={name} takes no argument {unknown}: its kwargs are {dict(kwargs)}.")


def build_train_loader(
    config: Config, data: DataConfig, tokenizer: PreTrainedTokenizerBase, environment: Any | None
) -> PromptLoader:
    left_out = frozenset()
    if environment is None:
        dataset = create_rl_dataset(data.train_files or data.val_files, data, tokenizer, data.train_max_samples)
        left_out = overlong_rows(dataset, tokenizer, data)
    else:
        dataset = env_dataset(data, environment, tokenizer, size=config.env.train_size)
    sampler = create_rl_sampler(data, dataset, data.seed)
    batch_size = fitting_batch_size(data, epoch_rows(dataset, sampler, left_out))
    make_row = row_maker(dataset, tokenizer, data)
    drop_last = not config.trainer.val_only  # which trains on none
    return PromptLoader(dataset, batch_size, sampler, make_row=make_row, drop_last=drop_last, left_out=left_out)


def build_val_loader(
    config: Config, data: DataConfig, tokenizer: PreTrainedTokenizerBase, environment: Any | None
) -> PromptLoader | None:
    left_out = frozenset()
    if environment is not None and config.env.val_size:
        first = config.env.train_size  # states that no training epoch draws
        dataset = env_dataset(data, environment, tokenizer, size=config.env.val_size, first=first)
    elif environment is None and data.val_files:
        dataset = create_rl_dataset(data.val_files, data, tokenizer, data.val_max_samples)
        if not len(dataset):
            raise ConfigError(f"data.val_files={data.val_files}: {type(dataset).__name__} has no rows to validate on.")
        left_out = overlong_rows(dataset, tokenizer, data)
    else:
        return None
    sampler, make_row = SequentialSampler(dataset, data), row_maker(dataset, tokenizer, data)
    batch_size = data.val_batch_size or len(dataset)
    return PromptLoader(dataset, batch_size, sampler, make_row=make_row, drop_last=False, left_out=left_out)


def check_has_state(loader: PromptLoader) -> None:
    """Raises ConfigError if a row, as the dataset makes it, does not say with which state its episode begins."""
    if "state" not in (loader.row(0).get("extra_info") or {}):
        raise ConfigError(
            f"env.mode=episode: row 0 of {type(loader.dataset).__name__} has no extra_info['state'], with which its "
            "episode begins (CustomEnvDataset.columns)."
        )


def check_goes_on(config: Config, chat: ChatFormat, has_users: bool) -> None:
    """Raises ValueError if others speak after an answer, and the template drops what the answer thought."""
    env = config.env
    if has_users or (env.id is not None and env.mode == "episode" and env.history == "transcript"):
        chat.check_keeps_thoughts("user")


def check_rows(
    rollout: RolloutConfig, loader: PromptLoader, positions: Iterable[int], conversations: Any | None = None
) -> None:
    """Checks that rows ask for agents that exist, conversations only if there are some, and for such simulated users.

    Rows of files are all looked at, those that a dataset makes at these positions, and an environment's, which begin
    none, not at all.
    """
    agents, dataset = load_agents(rollout.agent), loader.dataset
    if isinstance(dataset, RLHFDataset) and dataset.rows and gives_rows_as_they_are(dataset):
        rows = enumerate(dataset.rows)
    else:
        rows = ((position, loader.row(position)) for position in positions if not isinstance(dataset, StateDataset))
    for position, row in rows:
        agent = row.get(AGENT_COLUMN, SINGLE_TURN)
        if agent not in (SINGLE_TURN, TOOL_AGENT, *agents):
            raise ConfigError(f"row {position} has {AGENT_COLUMN}={agent}; {known_names(agents)}")
        if agent == TOOL_AGENT and not rollout.multi_turn.enable:
            raise ConfigError(
                f"row {position} has {AGENT_COLUMN}={TOOL_AGENT}: set {MULTI_TURN}.enable=true, or drop the column."
            )
        try:
            if conversations is not None:
                conversations.check(row)
        except ValueError as error:
            raise ConfigError(f"row {position}: {error}") from error


def overlong_rows(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> frozenset[int]:
    """Finds the rows to leave out, as their prompts are longer than data.max_prompt_length; says so in a warning.

    All rows of a class of the user's are made once for it: those of files were measured when they were read, those that
    change by the step (`on_batch_end`) cannot be, and where prompts may be cut instead, nothing is measured.

    Raises:
        OverlongPrompt: the first such row, if data.filter_overlong_prompts is false and data.truncation "error".
        ValueError: all rows are too long, or a row cannot be used.
    """
    may_be_cut = not config.filter_overlong_prompts and config.truncation != "error"
    if gives_rows_as_they_are(dataset) or may_be_cut or isinstance(dataset, Dynamic):
        return frozenset()
    make_row = row_maker(dataset, tokenizer, replace(config, truncation="error"))
    total, overlong = len(dataset), dict[int, OverlongPrompt]()
    for position in track(range(total), "measuring prompts", disable=total < PROGRESS_BAR_FROM):
        try:
            make_row(dataset[position], position)
        except OverlongPrompt as error:
            if not config.filter_overlong_prompts:
                raise
            overlong[position] = error
    if overlong:
        report_overlong(list(overlong.values()), total, config.max_prompt_length)
    return frozenset(overlong)
