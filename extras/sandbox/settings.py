"""Settings of the sandbox."""

from dataclasses import dataclass
from typing import Any

from configs.errors import notice_once
from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    """Stand in the section `reward`."""

    sandbox: str = setting(
        "available",
        "Fences around programs that a policy writes: those that the system has, or no run where they do not suffice.",
        choices=("available", "required"),
    )

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.sandbox == "required":
            from extras.sandbox.run import check_fences

            notice_once(check_fences(required=True))
