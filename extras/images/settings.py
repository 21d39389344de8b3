"""Declares the settings of rows with images."""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    image_key: str = setting("images", "Column with the images of a row, one for each <image> of its prompt.")


@dataclass
class ActorSettings(Frozen):
    freeze_vision_tower: bool = setting(False, "Leave the weights that read images as they are.")
