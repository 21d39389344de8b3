"""Declares the settings of rows that are made as a run goes."""

from dataclasses import dataclass
from typing import Any

from configs.settings import Frozen, Open, group, own_keys, setting


@dataclass
class DatagenConfig(Open):
    switches = "path: name"
    path: str | None = setting(None, "File or module of your generator, which adds rows during a run; null: none.")
    name: str | None = setting(None, "Class in that file, a subclass of extras.datagen.dataset.AbstractDataGenerator.")
    extras: dict[str, Any] = own_keys("data.datagen", "path")


@dataclass
class Settings(Frozen):
    datagen: DatagenConfig = group(DatagenConfig, "Rows that are made as the run goes (verl's DynamicGenDataset).")

    @property
    def dataset(self) -> str:
        """Names the dataset of a run in configs/extras.py."""
        return "files" if self.datagen.path is None else "datagen"
