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
    switches = "program: program_timeout program_serves program_sandbox"
    program: str | None = setting(
        None,
        "A command, or file.py:function, that plays each row as a client of the policy by OpenAI's API.",
        filled=True,
    )
    program_timeout: float = setting(300.0, "Seconds of its own that a program may take for an episode.", gt=0)
    program_serves: bool = setting(
        False, "One process of the command a worker plays all episodes: a line on stdin each, a reward posted for each."
    )
    program_sandbox: bool = setting(
        False, "The command runs in the sandbox: it reads its own files, writes to TMPDIR, and reaches only the policy."
    )

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.program is None:
            return
        if config.env.id is not None:
            raise ConfigError(f"{key}.program={self.program} plays rows, and env.id={config.env.id} is set too.")
        if self.get("default_agent_loop"):
            raise ConfigError(f"{key}.program and {key}.default_agent_loop are both set: one of them plays the rows.")
        chosen = [name for name in ("program_serves", "program_sandbox") if self.get(name)]
        if chosen and FUNCTION.fullmatch(self.program):
            raise ConfigError(f"{key}.{chosen[0]}=true: {self.program} is a function; it takes a command.")
        if self.program_sandbox:
            from extras.sandbox.run import check_command_fences

            check_command_fences(f"{key}.program_sandbox")
        try:
            shlex.split(self.program)
        except ValueError as error:
            raise ConfigError(f"{key}.program={self.program}: {error}.") from error
