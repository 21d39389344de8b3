"""Builds the data and the reward of a run, and checks that they fit together, before any model is loaded."""

import time
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any

from rich.progress import track
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError, notice
from configs.import_utils import accepts, find
from configs.schema import AgentConfig, Config, DataConfig, RolloutConfig
from data.rl_dataset import (
    PROGRESS_BAR_FROM,
    OverlongPrompt,
    RLHFDataset,
    create_rl_dataset,
    has_default_getitem,
    report_overlong,
    row_maker,
)
from data.rows import report_overlap
from data.sampler import Dynamic, PromptLoader, SequentialSampler, create_rl_sampler, epoch_rows, fitting_batch_size
from data.types import Row
from training.environment import (
    AGENT_COLUMN,
    PROGRAM,
    SINGLE_TURN,
    TOOL_AGENT,
    EnvSetup,
    StateDataset,
    build_env_setup,
    env_dataset,
    known_names,
    load_agents,
)
from training.plan import Plan
from training.reward import ChecksRows, RewardManager, load_reward_manager

ROWS_LOOKED_AT = 32  # from all over the data set
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


@dataclass(frozen=True)
class Parts:
    """The parts of a run that fit together.

    Attributes:
        train_loader, val_loader: of its data sets; None: there is nothing to validate on.
        env_setup: the environment whose episodes are played; None: none are.
        total_steps: of the run.
        began: when they were ready, by time.monotonic().
    """

    reward: RewardManager
    train_loader: PromptLoader
    val_loader: PromptLoader | None
    env_setup: EnvSetup | None
    total_steps: int
    began: float = field(default_factory=time.monotonic)


def build_datasets(
    plan: Plan, environment: Any | None, train: Dataset | None = None, val: Dataset | None = None
) -> tuple[Dataset, Dataset | None]:
    """Builds the data sets of training and of validation (None: there is nothing to validate on), unless a caller has
    given them: by the classes that settings name, of states of `environment`, or of rows of files."""
    data, env, tokenizer = plan.data, plan.config.env, plan.tokenizer
    if environment is not None:
        train = env_dataset(data, environment, tokenizer, size=env.train_size) if train is None else train
        if val is None and env.val_size:  # states that no training epoch draws
            val = env_dataset(data, environment, tokenizer, size=env.val_size, first=env.train_size)
            if not accepts(type(val), "first"):
                notice(f"env.val_size={env.val_size}: {type(val).__name__} takes no `first`: it validates on its own.")
        return train, val
    if train is None:
        train = create_rl_dataset(data.train_files or data.val_files, data, tokenizer, data.train_max_samples)
    if val is None and data.val_files:
        val = create_rl_dataset(data.val_files, data, tokenizer, data.val_max_samples)
        if data.train_files and isinstance(train, RLHFDataset) and isinstance(val, RLHFDataset):
            report_overlap(train.prompt_ids_like(val), val.prompt_ids, tokenizer)
    return train, val


def build_reward(plan: Plan, environment: Any | None, reward: Callable | None = None) -> RewardManager:
    """Builds what scores responses: `reward`, a function or manager of a caller's, or what settings name."""
    config = plan.config
    if reward is not None:
        return find("reward", "object")(reward, config.reward, plan.tokenizer)
    return load_reward_manager(config.reward, plan.tokenizer, environment, config)


def prepare(
    plan: Plan, train_dataset: Dataset, reward: RewardManager, val_dataset: Dataset | None, environment: Any | None
) -> Parts:
    """Checks that the parts of a run fit together; raises ValueError, which names the row or the setting."""
    config = plan.config
    train_loader = build_train_loader(plan, train_dataset)
    val_loader = None if val_dataset is None else build_val_loader(plan, val_dataset)
    if config.env.mode == "episode":
        check_has_state(train_loader)
    for loader in filter(None, (train_loader, val_loader)):
        positions = rows_looked_at(loader)
        if isinstance(reward, ChecksRows):
            rows = {position: loader.row(position) for position in positions}
            agent = config.actor_rollout_ref.rollout.agent
            reward.check(rows if config.reward.source() else rows_to_score(agent, rows))
        check_rows(config.actor_rollout_ref.rollout, loader, positions, plan.conversations)
    if config.trainer.test_freq > 0 and val_loader is None and not (config.env.id and config.env.val_episodes):
        notice(f"trainer.test_freq={config.trainer.test_freq}: no validation rows are given, so nothing is validated.")
    total_steps = config.trainer.total_training_steps or len(train_loader) * config.trainer.total_epochs
    check_warmup(config, total_steps)
    plays_episodes = config.env.id is not None and (config.env.mode == "episode" or config.env.val_episodes > 0)
    env_setup = build_env_setup(config, environment, train_dataset, reward) if plays_episodes else None
    return Parts(reward, train_loader, val_loader, env_setup, total_steps)


def build_train_loader(plan: Plan, dataset: Dataset) -> PromptLoader:
    left_out, make_row = usable_rows(plan, dataset, "data.train_files")
    sampler = create_rl_sampler(plan.data, dataset, plan.data.seed)
    batch_size = fitting_batch_size(plan.data, epoch_rows(dataset, sampler, left_out))
    drop_last = not plan.config.trainer.val_only  # which trains on none
    return PromptLoader(dataset, batch_size, sampler, make_row=make_row, drop_last=drop_last, left_out=left_out)


def build_val_loader(plan: Plan, dataset: Dataset) -> PromptLoader:
    left_out, make_row = usable_rows(plan, dataset, "data.val_files")
    batch_size, sampler = plan.data.val_batch_size or len(dataset), SequentialSampler(dataset, plan.data)
    return PromptLoader(dataset, batch_size, sampler, make_row=make_row, drop_last=False, left_out=left_out)


def usable_rows(plan: Plan, dataset: Dataset, key: str) -> tuple[frozenset[int], Callable[[Row, int], Row]]:
    """Returns the rows of a data set to leave out, and what completes the others; one that was made without a tokenizer
    or a data section gets the run's. Raises ConfigError for one that has no rows; `key` names its files."""
    if isinstance(dataset, DataLoader):
        settings = "data.train_batch_size and data.shuffle say how its rows are drawn"
        raise ConfigError(f"a DataLoader is given for {key}: give its `dataset`; {settings}.", key)
    if isinstance(dataset, RLHFDataset) and not dataset.is_set_up:
        dataset.setup(dataset.tokenizer or plan.tokenizer, plan.data)
    name, files = type(dataset).__name__, plan.data[key.removeprefix("data.")]
    if not isinstance(dataset, Sized):
        raise ConfigError(f"{key}={files}: {name} has no __len__: define it, to return the number of rows.")
    if not len(dataset):
        listed = f" For a class that expects a list of files: {key}=[{files}]." if isinstance(files, str) else ""
        raise ConfigError(f"{key}={files}: {name} has no rows, its __len__ returns 0.{listed}")
    makes_states = plan.config.env.id is not None or isinstance(dataset, StateDataset)  # any number of them
    left_out = frozenset() if makes_states else overlong_rows(dataset, plan.tokenizer, plan.data)
    return left_out, row_maker(dataset, plan.tokenizer, plan.data)


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


def rows_to_score(config: AgentConfig, rows: Mapping[int, Row]) -> dict[int, Row]:
    """Returns the rows that bring no score of their own, as those of programs and of agent loops may."""
    kinds, default = {name: agent.kind for name, agent in load_agents(config).items()}, config.default_agent_loop
    agents = {position: row.get(AGENT_COLUMN, PROGRAM if config.program else default) for position, row in rows.items()}
    return {position: row for position, row in rows.items() if kinds.get(agents[position], "class") == "class"}


def check_has_state(loader: PromptLoader) -> None:
    """Raises ConfigError if a row, as the dataset makes it, does not say with which state its episode begins."""
    if "state" not in (loader.row(0).get("extra_info") or {}):
        raise ConfigError(
            f"env.mode=episode: row 0 of {type(loader.dataset).__name__} has no extra_info['state'], with which its "
            "episode begins (CustomEnvDataset.columns)."
        )


def check_rows(
    rollout: RolloutConfig, loader: PromptLoader, positions: Iterable[int], conversations: Any | None = None
) -> None:
    """Checks that rows ask for agents that exist, conversations only if there are some, and for such simulated users.

    Rows of files are all looked at, those that a dataset makes at these positions, and an environment's, which begin
    none, not at all.
    """
    agents, dataset = load_agents(rollout.agent), loader.dataset
    if isinstance(dataset, RLHFDataset) and dataset.rows and has_default_getitem(dataset):
        if conversations is None and AGENT_COLUMN not in dataset.column_names:
            return
        rows = enumerate({"raw_prompt": row.get(dataset.prompt_key), **row} for row in dataset.rows)
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
    if has_default_getitem(dataset) or may_be_cut or isinstance(dataset, Dynamic):
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
