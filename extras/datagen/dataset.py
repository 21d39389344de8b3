"""A dataset that grows in a run: rows of files, and those that a generator of yours makes after every step.

verl's contract: `data.datagen.path` and `data.datagen.name` name a subclass of `AbstractDataGenerator`, which is asked
once at the start and then after every training step. New rows are drawn from the next epoch on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import wraps
from typing import Any

from configs.import_utils import bind, load_subclass
from configs.settings import Readable
from data.protocol import DataProto
from data.rl_dataset import OverlongPrompt, RLHFDataset
from data.rows import Entry, Origin, rows_of
from data.types import Row


class Settings(Readable):
    """Holds the attributes that it is given."""

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


class AbstractDataGenerator(ABC):
    """Makes rows; `config` has the keys of data.datagen, and those of the data section that it lacks."""

    def __init__(self, config: Readable) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: "DynamicGenDataset") -> Iterable[Row]:
        """Returns new rows as they would stand in a file, [] if there are none; `dataset.rows` are all so far, and
        `dataset.dataframe` as verl has them. A datasets.Dataset or a data frame will do.

        It may be `generate(self, dataset, batch)`: `batch` is the finished step's (None at the start), with what
        dynamic sampling left out at its end.
        """


class DynamicGenDataset(RLHFDataset):
    """The rows of files, and below them those that the generator made. Too long prompts among these are left out."""

    @wraps(RLHFDataset.__init__)
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        chosen = self.config.datagen
        generator = load_subclass(chosen.path, chosen.name, AbstractDataGenerator, "data.datagen.name")
        self.generator = generator(Settings(**self.config.settings() | chosen.settings()))
        self.num_of_files = len(self.rows)
        self.made: list[Row] = []  # as the generator gave them
        self.on_batch_end(None)

    def on_batch_end(self, batch: DataProto | None) -> None:
        key, dataset = f"data.datagen.name={self.config.datagen.name}", {"dataset": self}
        self.add(bind(self.generator.generate, {"batch": batch}, key=key, positional=dataset)())

    def add(self, rows: Any) -> None:
        """Adds `rows`, which count from the first that was made; what some lack of the columns of others is None."""
        entries, name = self.entries, self.config.datagen.name
        for row in rows_of(rows, name):
            known, origin = (entries[0].columns if entries else {}), Origin(name, len(self.made))
            entry = Entry(origin, dict.fromkeys(known) | row)
            self.made.append(row)
            try:
                entry = self._read(entry)
            except OverlongPrompt:
                if not self.filter_overlong_prompts:
                    raise
                self.num_filtered += 1
                continue
            for old in self.rows:
                old |= dict.fromkeys(entry.columns.keys() - known.keys())
            entries.append(entry)

    append_dataframe = add  # verl's name

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The rows of the files, and those that the interrupted run had made in place of this one's."""
        made, self.made = state["made"], []
        del self.entries[self.num_of_files :]
        self.add(made)
