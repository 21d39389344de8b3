"""Settings of programs that play episodes: actor_rollout_ref.rollout.agent.program…"""

import re
import shlex
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting

FUNCTION = re.compile(r"\S+\.py:\w+")


@dataclass
class Settings(Frozen):
    program: str | None = setting(
        None,
        "A command, or file.py:function, that plays each row as a client of the policy by OpenAI's API.",
        filled=True,
    )
    program_timeout: float = setting(300.0, "Seconds of its own that a program may take for an episode.", gt=0)
    program_serves: bool = setting(
        False, "One process of the command a worker plays all episodes: a line on stdin each, a reward posted for each."
    )

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.program is None:
            return
        if config.env.id is not None:
            raise ConfigError(f"{key}.program={self.program} plays rows, and env.id={config.env.id} is set too.")
        if self.get("default_agent_loop"):
            raise ConfigError(f"{key}.program and {key}.default_agent_loop are both set: one of them plays the rows.")
        if self.program_serves and FUNCTION.fullmatch(self.program):
            raise ConfigError(f"{key}.program_serves=true: {self.program} is a function; only a command can serve.")
        try:
            shlex.split(self.program)
        except ValueError as error:
            raise ConfigError(f"{key}.program={self.program}: {error}.") from error
