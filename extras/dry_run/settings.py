"""The switch of a dry run, and the settings by which it acts."""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    dry_run: bool = setting(
        False, "Do one step on two prompts, change no weight or file, and show everything and what looks wrong."
    )

    @property
    def action(self) -> str:
        return "dry_run" if self.dry_run else super().action
