"""Settings of rollouts that are saved, and learnt from again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    save_rollouts: str | None = setting(None, "Folder that gets each step's scored rows, for replay_rollouts.")
    replay_rollouts: str | None = setting(None, "Folder of such rows: learn from them again, and generate none.")

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        saves, replays = self.save_rollouts, self.replay_rollouts
        if (saves or replays) and self.async_mode:
            name = "save_rollouts" if saves else "replay_rollouts"
            raise ConfigError(f"{key}.{name}: it is for runs that take turns; leave out {key}.async_mode.")
        if saves and replays and Path(saves).resolve() == Path(replays).resolve():
            raise ConfigError(f"{key}.save_rollouts={saves} is what is replayed: name another folder, or none.")
        if replays and not (Path(replays) / "1.pkl").exists():
            raise ConfigError(f"{key}.replay_rollouts={replays} has no 1.pkl: name what trainer.save_rollouts filled.")
