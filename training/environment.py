"""Builds the environment, its prompts and its action parser, for training and validation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError, notice
from configs.extras import has
from configs.import_utils import bind, find, load_extern_object
from configs.schema import AgentConfig, Config, DataConfig, EnvConfig, SuccessConfig
from data.protocol import DataProto
from data.rl_dataset import get_dataset_class
from data.seeding import derive_seed
from data.types import Message
from training.reward import RewardManager, load_reward_manager, reward_name

STARTS_CHECKED = 64  # validation episodes whose first prompts are measured before anything expensive
AGENT_KEY = "actor_rollout_ref.rollout.agent"
AGENT_COLUMN = "agent_name"  # verl's: what begins with a row
SINGLE_TURN, TOOL_AGENT, ENVIRONMENT, PROGRAM = "single_turn_agent", "tool_agent", "environment", "program"


@runtime_checkable
class ActionReader(Protocol):
    """Reads the action out of an answer: a reward manager of an environment, or the environment itself."""

    def extract_action(self, text: str) -> Any | None:
        """Reads the action; None if `text` names none that is legal."""


class Environment(ActionReader, Protocol):
    """An environment as episodes use it (custom/env_wrapper.py: TextEnv)."""

    env_id: str
    repeatable: bool  # whether a reset to the same seed leads to the same state
    state: Any  # where the running episode is

    def reset(self, seed: int, actions: Any = ()) -> str:
        """Starts an episode, with these actions played already."""

    def act(self, action: Any | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays an action: observation, reward, terminated, truncated, info with `success` (None: unknown), `invalid`
        (actions so far that were not legal) and `end_reason`."""

    def start_state(self, seed: int) -> Any:
        """Returns the state in which the episode of this reset seed starts."""

    def clone(self) -> "Environment":
        """Returns an independent environment with the same settings."""

    def close(self) -> None:
        """Gives back what it holds."""


@runtime_checkable
class StateDataset(Protocol):
    """Shows states to the policy (custom/env_dataset.py: CustomEnvDataset)."""

    def encode_state(self, state: Any) -> list[int] | None:
        """Returns the token ids of the prompt that shows `state`; None if it is too long to be shown."""

    def turn_messages(self, state: Any) -> list[Message]:
        """Returns the messages that show `state` to the policy after an action, in a transcript."""

    def check_sizes(self, states: Iterable[Any], label: str) -> None:
        """Raises ValueError for prompts that are too long and may not be cut."""


@dataclass(frozen=True)
class EnvSetup:
    """An environment, who shows its states to the policy, and who reads the policy's answers, as in training."""

    environment: Environment
    dataset: StateDataset
    reader: ActionReader


def build_environment(config: Config) -> Any | None:
    """Returns the environment that env.id names, by its factory; None: there is none."""
    settings = config.env
    if settings.id is None:
        return None
    if agent := config.actor_rollout_ref.rollout.agent.default_agent_loop:
        raise ConfigError(f"{AGENT_KEY}.default_agent_loop={agent} plays rows, and env.id={settings.id} is set too.")
    factory = load_extern_object(settings.path, settings.name, "env.path")
    seed = derive_seed(config.trainer.seed, "environment")
    arguments = {"seed": seed, "max_turns": settings.max_turns, "exclude_seeds": episode_seeds(settings)}
    optional = {  # which a factory need not know
        "max_walk": settings.max_walk,
        "invalid_action": settings.invalid_action,
        "from_start": True if settings.mode == "episode" else None,
        "timeout": settings.timeout if settings.in_processes or settings.timeout != EnvConfig().timeout else None,
        "success": settings.success if settings.success != SuccessConfig() else None,
        **{item.name: settings[item.name] or None for item in fields(settings) if "factory" in item.metadata},
    }
    arguments |= {key: value for key, value in optional.items() if value is not None}
    try:
        return factory(settings.id, **arguments, **settings.kwargs)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"env.id={settings.id} with env.kwargs={settings.kwargs}: {error}") from error


def data_settings(config: Config, tools: Mapping[str, Any] | None = None) -> DataConfig:
    """Returns the data section with its seed, by default of trainer.seed, and with the arguments that describe `tools`
    in every prompt (extras/tools/parsers.py)."""
    data = config.data
    template = {**(tools or {}), **data.apply_chat_template_kwargs}
    seed = derive_seed(config.trainer.seed, "data") if data.seed is None else data.seed
    return replace(data, seed=seed, apply_chat_template_kwargs=template)


def env_dataset(data: DataConfig, environment: Any, tokenizer: PreTrainedTokenizerBase, **sizes: int) -> Any:
    """Returns the dataset around an environment, of the class data.custom_cls, or that of custom/env_dataset.py. It is
    given the environment by position, and of all else what it names."""
    cls = env_dataset_class(data)
    offered, key = {"tokenizer": tokenizer, "config": data, **sizes}, f"data.custom_cls.name={cls.__name__}"
    return bind(cls, offered, data.custom_cls.kwargs, key, positional={"environment": environment})()


def env_dataset_class(data: DataConfig) -> type:
    is_ours = data.custom_cls.path is None
    return load_extern_object("custom/env_dataset.py", "CustomEnvDataset") if is_ours else get_dataset_class(data)


def build_env_setup(config: Config, environment: Any, dataset: Any, reward: RewardManager) -> EnvSetup:
    """Puts an environment together with its dataset; the reward manager reads the answers, if it can."""
    setting = f"env.val_episodes={config.env.val_episodes}" if config.env.mode == "step" else "env.mode=episode"
    if type(dataset) is not (cls := env_dataset_class(config.data)):
        raise ConfigError(
            f"{setting}: workers play the episodes, with data.custom_cls.name={cls.__name__}, and {type(dataset)} is "
            "given: name its class there, or set env.mode=step and env.val_episodes=0."
        )
    if not isinstance(dataset, StateDataset):
        raise ConfigError(
            f"{setting}: data.custom_cls.name={config.data.custom_cls.name} has no encode_state(state) and "
            "turn_messages(state): make it a subclass of CustomEnvDataset, or set env.mode=step and env.val_episodes=0."
        )
    classes = [cls for cls in type(reward).__mro__ if cls.__module__ != "custom.reward_manager"]
    unused = [name for name in ("__call__", "score") if any(name in vars(cls) for cls in classes)]
    if config.env.mode == "episode" and unused:
        notice(
            f"{reward_name(reward)}: env.mode=episode does not call its {' and '.join(unused)}: the environment pays. "
            "Put the reward into a gymnasium wrapper, or set env.mode=step."
        )
    if seeds := episode_seeds(config.env)[:STARTS_CHECKED]:
        dataset.check_sizes(map(environment.start_state, seeds), "validation episodes")
    return EnvSetup(environment, dataset, reward if isinstance(reward, ActionReader) else environment)


def worker_env_setup(config: Config, tokenizer: PreTrainedTokenizerBase) -> EnvSetup:
    """Builds the setup that the driver has checked anew from the config, where episodes are played."""
    environment = build_environment(config)
    dataset = env_dataset(load_conversations(config, tokenizer)[1], environment, tokenizer, size=1)
    reward = load_reward_manager(config.reward, tokenizer, environment, config)
    return EnvSetup(environment, dataset, reward if isinstance(reward, ActionReader) else environment)


def load_conversations(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[Any | None, DataConfig]:
    """Loads what rows talk to, tools and simulated users (extras/tools/conversations.py; None: rows are answered), and
    the data section whose prompts describe them."""
    settings = config.actor_rollout_ref.rollout.multi_turn
    conversations = find("source", "conversations")(settings, tokenizer) if settings.enable else None
    return conversations, data_settings(config, conversations and conversations.template_kwargs(tokenizer))


def load_agents(config: AgentConfig) -> dict[str, Any]:
    """Loads the user's classes that play episodes (extras/tools/shared_loop.py), by name, if any is named."""
    if config == AgentConfig() and not has("optional", "agents"):
        return {}
    return find("optional", "agents", AGENT_KEY)(config)


def known_names(agents: Iterable[str]) -> str:
    """Says which names there are, and how others come to be."""
    return (
        f"the agents are {', '.join([SINGLE_TURN, TOOL_AGENT, *agents])}. Yours is file.py:Class in "
        f"{AGENT_KEY}.default_agent_loop, or has @register(name) in a file of actor_rollout_ref.model.external_lib."
    )


def begin_episodes(prompts: DataProto, agent: str) -> DataProto:
    """Returns `prompts` as rows that each begin an episode of this kind, unless they say what they begin."""
    if AGENT_COLUMN in prompts:
        return prompts
    return prompts.union(DataProto.from_single_dict({AGENT_COLUMN: [agent] * len(prompts)}))


def assign_agents(prompts: DataProto, config: Config) -> DataProto:
    """Says of each row what it begins: an episode of the environment, a conversation, or a single answer."""
    rollout = config.actor_rollout_ref.rollout
    agent = rollout.agent.default_agent_loop or (TOOL_AGENT if rollout.multi_turn.enable else SINGLE_TURN)
    agent = PROGRAM if rollout.agent.program else agent
    if config.env.id is not None:
        agent = ENVIRONMENT if config.env.mode == "episode" else SINGLE_TURN
    return prompts if agent == SINGLE_TURN else begin_episodes(prompts, agent)


def are_episodes(prompts: DataProto) -> bool:
    """Says whether any row begins more than a single answer."""
    return AGENT_COLUMN in prompts and any(agent != SINGLE_TURN for agent in prompts.non_tensor_batch[AGENT_COLUMN])


def episode_seeds(config: EnvConfig) -> range:
    """Returns the reset seeds of the validation episodes."""
    return range(config.val_seed, config.val_seed + config.val_episodes)


def episode_prompts(env_setup: EnvSetup, seeds: Iterable[int]) -> DataProto:
    """Starts the episodes of these reset seeds, except those whose prompts are too long to be shown."""
    states = [env_setup.environment.start_state(seed) for seed in seeds]
    starts = [(state, ids) for state in states if (ids := env_setup.dataset.encode_state(state)) is not None]
    if not starts:
        raise ValueError(
            f"none of {len(states)} validation episodes can be shown: their prompts are longer than "
            "data.max_prompt_length. Raise it, or cut them by data.filter_overlong_prompts=false data.truncation=left."
        )
    rows = {
        "raw_prompt_ids": [ids for _, ids in starts],
        "extra_info": [{"state": state} for state, _ in starts],
        "data_source": [env_setup.environment.env_id] * len(starts),
        "uid": [str(state.seed) for state, _ in starts],
    }
    return begin_episodes(DataProto.from_single_dict(rows), ENVIRONMENT)
