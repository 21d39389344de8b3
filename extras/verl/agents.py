"""Names of classes that play episodes: those under `@register`, and those that agent.agent_loop_config_path lists.

A class is an agent loop in verl's form (extras/verl/users_loop.py) or an `Episode` (workers/agents/episode.py).
"""

from collections.abc import Callable
from pathlib import Path

import yaml

from configs.errors import ConfigError, first_line
from configs.import_utils import load_named
from configs.paths import find_path
from configs.schema import AgentConfig
from extras.tools.shared_loop import Agent
from training.environment import AGENT_KEY

_agent_loop_registry: dict[str, Agent] = {}  # verl's name


def register(agent_name: str) -> Callable[[type], type]:
    """Registers a class that plays the episodes of rows whose agent_name is this."""

    def add(agent_class: type) -> type:
        _agent_loop_registry[agent_name] = Agent(agent_name, agent_class)
        return agent_class

    return add


def load_agents(config: AgentConfig) -> dict[str, Agent]:
    """Returns the agents that are registered, and those of agent_loop_config_path, by name."""
    return {**_agent_loop_registry, **agents_of(config.agent_loop_config_path)}


def agents_of(path: str | None) -> dict[str, Agent]:
    """Returns those of a yaml or json, a list of {name, _target_, and settings}, or of a function that returns classes
    by name; of None, none. A module beside the yaml is found."""
    if path is None:
        return {}
    key, file = f"{AGENT_KEY}.agent_loop_config_path", find_path(path)
    if file.suffix not in (".yaml", ".yml", ".json"):
        return {name: Agent(name, agent_class) for name, agent_class in load_named(path, key)().items()}
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}={path} cannot be read: {first_line(error)}.") from error
    agents = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case {"name": str(name), "_target_": str(target), **settings}:
                agent_class = load_named(beside(file.parent, target), f"{path}: {name}._target_")
                agents[name] = Agent(name, agent_class, settings)
            case _:
                raise ConfigError(f"{key}={path} holds {entry!r}; it must be a list of {{name, _target_, settings …}}.")
    return agents


def beside(folder: Path, target: str) -> str:
    """Returns `target` as file.py:Class, where its module is a file in `folder`."""
    module, _, name = target.rpartition(".")
    file = folder / f"{module.replace('.', '/')}.py"
    return f"{file}:{name}" if file.is_file() else target
