"""Lists classes of the user's that play episodes: of default_agent_loop, of a program, and those of extras/verl."""

from dataclasses import dataclass, field
from typing import Any

from configs.errors import ConfigError
from configs.extras import has
from configs.import_utils import find, load_named
from configs.schema import AgentConfig
from training.environment import AGENT_KEY, PROGRAM, known_names


@dataclass(eq=False)
class Agent:
    """A class that plays episodes, an `Episode` or an agent loop, under the name that rows call it by.

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
        if not isinstance(self.cls, type) or not {"run", "step"} & {*dir(self.cls)}:
            raise ConfigError(f"{AGENT_KEY}: {self.name} is {self.cls!r}, which plays no episodes: define step or run.")

    @property
    def kind(self) -> str:
        """The kind of its episodes in the table of extras."""
        return "agent_loop" if "run" in dir(self.cls) else "class"


def load_agents(config: AgentConfig) -> dict[str, Agent]:
    """Loads the user's agents by name: an extra's, default_agent_loop as file.py:Class, and agent.program."""
    agents = find("source", "agents")(config) if has("source", "agents") else {}
    default = config.default_agent_loop
    if default is not None and default not in agents:
        if "." not in default and ":" not in default:
            raise ConfigError(f"{AGENT_KEY}.default_agent_loop={default}: {known_names(agents)}")
        agents[default] = Agent(default, load_named(default, f"{AGENT_KEY}.default_agent_loop"))
    if config.program:
        agents[PROGRAM] = find("source", PROGRAM)(config)
    return agents
