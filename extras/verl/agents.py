"""Classes of the user's that play episodes, by the names that rows and settings call them.

A row's agent_name says what begins with it, else actor_rollout_ref.rollout.agent.default_agent_loop: a name under
`@register`, one of the list in agent.agent_loop_config_path, or a class as file.py:Class. The class is an agent loop in
verl's form (extras/verl/users_loop.py) or an `Episode` (workers/agents/episode.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml

from configs.errors import ConfigError, first_line
from configs.paths import find_path
from configs.schema import AgentConfig
from extras.tools.files import load_named
from training.environment import SINGLE_TURN, TOOL_AGENT

KEY = "actor_rollout_ref.rollout.agent"


@runtime_checkable
class Runs(Protocol):
    def run(self, sampling_params: dict[str, Any]) -> Any:
        """Plays an episode whole."""


@runtime_checkable
class Steps(Protocol):
    def step(self, answer: str) -> Any:
        """Replies to an answer."""


@dataclass(eq=False)
class Agent:
    """A class that plays episodes, under the name that rows call it by.

    Attributes:
        settings: arguments of its constructor.
        is_ready: whether its `init_class` was called, which prepares what its episodes share.
        blocks: whether it computes or waits without `await`; an episode then has a thread of its own.
    """

    name: str
    cls: Any
    settings: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = False

    def __post_init__(self) -> None:
        self.blocks: bool = "blocks" in dir(self.cls) and self.cls.blocks
        if not isinstance(self.cls, type) or not issubclass(self.cls, Runs | Steps):
            raise ConfigError(
                f"{KEY}: {self.name} is {self.cls!r}, which plays no episodes: give a subclass of AgentLoopBase "
                "(extras/verl/users_loop.py), with a coroutine `run`, or of Episode (workers/agents/episode.py)."
            )


_agent_loop_registry: dict[str, Agent] = {}  # verl's name


def register(agent_name: str) -> Callable[[type], type]:
    """Registers a class that plays the episodes of rows whose agent_name is this."""

    def mark(found: type) -> type:
        _agent_loop_registry[agent_name] = Agent(agent_name, found)
        return found

    return mark


def load_agents(config: AgentConfig) -> dict[str, Agent]:
    """The user's agents by name: those of the yaml or json, of default_agent_loop, and what is registered.

    Raises:
        ConfigError, ValueError, FileNotFoundError: a file or class that cannot be used, or a default that is none.
    """
    agents = {**_agent_loop_registry, **agents_of(config.agent_loop_config_path)}
    default = config.default_agent_loop
    if default is not None and default not in agents:
        if "." not in default and ":" not in default:
            raise ConfigError(f"{KEY}.default_agent_loop={default}: {known_names(agents)}")
        agents[default] = Agent(default, load_named(default, f"{KEY}.default_agent_loop"))
    return agents


def known_names(agents: dict[str, Agent]) -> str:
    """Says which names there are, and how others come to be."""
    return (
        f"the agents are {', '.join([SINGLE_TURN, TOOL_AGENT, *agents])}. Register yours with @register(name) in a "
        f"file that actor_rollout_ref.model.external_lib names, or list it in {KEY}.agent_loop_config_path."
    )


def agents_of(path: str | None) -> dict[str, Agent]:
    """Returns those of a yaml or json: a list of {name, _target_, and settings}. A module beside the file is found.

    Or those of a function, which returns classes by name; of None, none."""
    if path is None:
        return {}
    file = find_path(path)
    if file.suffix not in (".yaml", ".yml", ".json"):
        classes = load_named(path, f"{KEY}.agent_loop_config_path")()
        return {name: Agent(name, found) for name, found in classes.items()}
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{KEY}.agent_loop_config_path={path} cannot be read: {first_line(error)}.") from error
    agents = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case {"name": str(name), "_target_": str(target), **settings}:
                agents[name] = Agent(
                    name, load_named(beside(file.parent, target), f"{path}: {name}._target_"), settings
                )
            case _:
                raise ConfigError(
                    f"{KEY}.agent_loop_config_path={path} holds {entry!r}; it must be a list of mappings with `name` "
                    "and `_target_` (package.module.Class), and settings for the constructor beside them."
                )
    return agents


def beside(folder: Path, target: str) -> str:
    """`target` as file.py:Class, where its module is a file in `folder`."""
    module, _, name = target.rpartition(".")
    file = folder / f"{module.replace('.', '/')}.py"
    return f"{file}:{name}" if file.is_file() else target
