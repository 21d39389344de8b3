"""Settings of the sandbox."""

from dataclasses import dataclass
from typing import Any

from configs.errors import notice_once
from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    """Stand in the section `reward`."""

    sandbox: str = setting(
        "closed",
        "Programs that a policy writes run where the system's fences hold them; required: no run without Landlock "
        "either, which keeps your files from being read; open: they run anywhere.",
        choices=("closed", "required", "open"),
    )

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.sandbox == "required":
            from extras.sandbox.run import check_fences

            notice_once(check_fences("required"))
