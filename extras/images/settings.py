"""Declares the settings of rows with images."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    image_key: str = setting("images", "Column with the images of a row, one for each <image> of its prompt.")

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        env, name = config.env, self.custom_cls.name
        if name == "PictureDataset" and (env.mode, env.history) == ("episode", "transcript"):
            raise ConfigError(f"env.history=transcript: {name} shows a state in a prompt: set env.history=turns.")


@dataclass
class ActorSettings(Frozen):
    freeze_vision_tower: bool = setting(False, "Leave the weights that read images as they are.")
