"""Draws the rows of each batch: samplers, and a loader that resumes exactly where it stopped.

The order of an epoch is a function of (seed, epoch), so a run's position is two numbers. Nothing is prefetched: what a
curriculum learns from a step counts for the next row.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sized
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from configs.checks import no_batch_error
from configs.errors import ConfigError, notice
from configs.extras import check_present
from configs.import_utils import asked_for, bind, check_reads, find, load_subclass, required_arguments
from configs.schema import DataConfig
from data.protocol import DataProto
from data.rl_dataset import collate_fn
from data.seeding import numpy_generator
from data.types import Row

LATER = ("advantages", "returns")  # columns that are computed after rows were left out


@runtime_checkable
class Stateful(Protocol):
    """A dataset or sampler with state of its own, which checkpoints then hold.

    Such a sampler counts a row before yielding it, and after `load_state_dict` yields the rest of the epoch. Any other
    is iterated from the start, and the rows it had yielded are skipped.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Dynamic(Protocol):
    """A dataset that receives every step's batch, and may change its rows."""

    def on_batch_end(self, batch: DataProto) -> None: ...


class AbstractSampler(Sampler[int], ABC):
    """Base of all samplers: `__iter__` yields the row positions of one epoch, `__len__` says how many.

    `self.epoch` and `self.num_rows` (the dataset's rows as the epoch began) are set before `__iter__`: an order that is
    a function of a seed and these two resumes without a state.
    """

    epoch = 0
    num_rows: int | None = None  # None: all rows

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        self.data_source = data_source
        self.data_config = data_config

    @abstractmethod
    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int:
        return len(self.data_source)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def rows_of_epoch(self) -> int:
        return len(self.data_source) if self.num_rows is None else self.num_rows

    def update(self, batch: DataProto) -> None:
        """Is called with the batch of each training step; a subclass may take `(indices, metrics)` instead.

        A curriculum's `state_dict` must hold what it has learnt. extras/curriculum/curriculum.py has two examples.
        """


class PlainSampler(AbstractSampler):
    """Wraps a PyTorch sampler, which knows neither epochs nor steps. To resume, it must yield the same order again."""

    def __init__(self, data_source: Sized, data_config: DataConfig, sampler: Sampler[int]) -> None:
        super().__init__(data_source, data_config)
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def takes_metrics(sampler: AbstractSampler) -> bool:
    """Says whether a sampler's `update` takes (indices, metrics) instead of (batch)."""
    signature, required = inspect.signature(sampler.update), required_arguments(sampler.update)
    if "metrics" in signature.parameters or len(required) == 2:
        return True
    if len(required) != 1:
        name = type(sampler).__qualname__
        raise ValueError(f"{name}.update{signature}: it must be update(batch) or update(indices, metrics).")
    return False


class SequentialSampler(AbstractSampler):
    """Draws rows in the order of the files."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rows_of_epoch()))


class RandomSampler(SequentialSampler):
    """Draws every row once an epoch, in an order that depends on (seed, epoch) alone."""

    def __init__(self, data_source: Sized, data_config: DataConfig, seed: int) -> None:
        super().__init__(data_source, data_config)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        return map(int, numpy_generator(self.seed, "row order", self.epoch).permutation(self.rows_of_epoch()))


def create_rl_sampler(data_config: DataConfig, dataset: Sized, seed: int) -> AbstractSampler:
    """Makes the sampler that data.sampler names, or an extra's if its setting is on, or a random or sequential one.

    Args:
        seed: trainer.seed, used unless data.seed is set.
    """
    chosen, seed = data_config.sampler, seed if data_config.seed is None else data_config.seed
    if chosen.class_path is not None:
        key = "data.sampler.class_name"
        sampler_class = load_subclass(chosen.class_path, chosen.class_name, Sampler, key)
        check_reads(sampler_class, "data_config", "data.sampler", chosen.extras)
        arguments = {"data_source": dataset, "data_config": data_config}
        sampler = bind(sampler_class, arguments, chosen.kwargs, f"{key}={chosen.class_name}")()
        if not isinstance(sampler, AbstractSampler):
            return PlainSampler(dataset, data_config, sampler)
        if takes_metrics(sampler):  # or raises
            check_present("optional", "positions_and_metrics")
        return sampler
    for sampler_class in asked_for("sampler", data_config):
        return sampler_class(dataset, data_config, seed)
    if data_config.shuffle:
        return RandomSampler(dataset, data_config, seed)
    return SequentialSampler(dataset, data_config)


class PromptLoader:
    """Returns batches of prompts, endlessly by `next_batch()`, or one epoch by iteration.

    `epoch` is the epoch of the last batch, `index` the number of its rows returned so far. `make_row` completes a row
    of the dataset, given its position, which the column dataset_position holds. Positions in `left_out` are skipped.
    `length_key` names, for messages, the setting that drops long rows.

    Raises:
        ValueError: an epoch has no full batch and `drop_last` drops the rest.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        sampler: AbstractSampler,
        *,
        make_row: Callable[[Row, int], Row] = lambda row, position: row,
        drop_last: bool = True,
        left_out: Collection[int] = frozenset(),
        length_key: str = "data.max_prompt_length",
    ) -> None:
        self.dataset, self.sampler, self.make_row, self.left_out = dataset, sampler, make_row, left_out
        self.batch_size, self.drop_last, self.length_key = batch_size, drop_last, length_key
        self.epoch = self.index = 0
        self.num_rows = len(dataset)  # as the epoch began
        if len(self) == 0:
            raise self._no_batch_error()
        self._rest = self._positions(self.num_rows)

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        full, rest = divmod(epoch_rows(self.dataset, self.sampler, self.left_out), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def next_batch(self) -> dict[str, torch.Tensor | np.ndarray]:
        """Returns the next batch; at the end of an epoch, the first of the next."""
        positions = self._take(self._rest)
        if not positions:
            self.epoch, self.index, self.num_rows = self.epoch + 1, 0, len(self.dataset)
            self._rest = self._positions(self.num_rows)
            positions = self._take(self._rest)
        if not positions:
            raise self._no_batch_error()
        self.index += len(positions)
        return self.batch_of(positions)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor | np.ndarray]]:
        """Yields one epoch from its start; `next_batch` continues where it was, unless the sampler is Stateful."""
        epoch = self._positions(len(self.dataset))
        while positions := self._take(epoch):
            yield self.batch_of(positions)

    def row(self, position: int) -> Row:
        """Returns a row of the dataset, as batches hold it."""
        if position >= len(self.dataset):
            raise ValueError(f"row {position} of {len(self.dataset)}: a dataset may grow in a run, but not shrink.")
        return self.make_row(self.dataset[position], position)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and the states of a dataset and a sampler that have their own."""
        parts = {"dataset": self.dataset, "sampler": self.sampler}
        states = {name: part.state_dict() for name, part in parts.items() if isinstance(part, Stateful)}
        return {"epoch": self.epoch, "index": self.index, "num_rows": self.num_rows, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the loader that gave `state` stood.

        Raises:
            ValueError: the dataset or the sampler has a state of its own and `state` has none, or the reverse.
        """
        for name, part in (("dataset", self.dataset), ("sampler", self.sampler)):
            if isinstance(part, Stateful) != (name in state):
                problem = f"the checkpoint holds {'a' if name in state else 'no'} state of the {name}, but"
                remedy = f"resume with the {name} of the interrupted run"
                raise ValueError(f"{problem} {type(part).__name__} has {'none' if name in state else 'one'}: {remedy}.")
            if isinstance(part, Stateful):
                part.load_state_dict(state[name])
        self.epoch, self.index, self.num_rows = state["epoch"], state["index"], state["num_rows"]
        num_seen = 0 if isinstance(self.sampler, Stateful) else self.index
        self._rest = islice(self._positions(self.num_rows), num_seen, None)

    def _positions(self, num_rows: int) -> Iterator[int]:
        """Yields the row positions of an epoch that begins with `num_rows` rows."""
        self.sampler.num_rows = num_rows
        self.sampler.set_epoch(self.epoch)
        return (position for position in self.sampler if position not in self.left_out)

    def _take(self, positions: Iterator[int]) -> list[int]:
        """Returns the positions of the next batch; [] at the end of the epoch."""
        batch = list(islice(positions, self.batch_size))
        return [] if self.drop_last and len(batch) < self.batch_size else batch

    def batch_of(self, positions: list[int]) -> dict[str, torch.Tensor | np.ndarray]:
        """Returns the rows at these positions as a batch."""
        return collate_fn([{**self.row(position), "dataset_position": position} for position in positions])

    def _no_batch_error(self) -> ConfigError:
        rows = epoch_rows(self.dataset, self.sampler, self.left_out)
        return no_batch_error(self.batch_size, rows, self.length_key)


def epoch_rows(dataset: Sized, sampler: AbstractSampler, left_out: Collection[int]) -> int:
    """Counts the rows of an epoch; an upper bound if the sampler does not yield every row once."""
    return len(sampler) - (len(left_out) if len(sampler) == len(dataset) else 0)


def fitting_batch_size(settings: DataConfig, rows: int) -> int:
    """Returns data.train_batch_size; if that is the default, at most the `rows` of an epoch."""
    size = settings.train_batch_size
    if not 0 < rows < size == type(settings).train_batch_size:
        return size
    notice(f"data.train_batch_size={size}, the default, is above the {rows} rows of an epoch: a batch has {rows}.")
    return rows


def update_sampler(loader: PromptLoader, batch: DataProto, left_out: DataProto | None) -> None:
    """Updates the sampler and the dataset after a step, by its `batch` and the rows that it has left out.

    A sampler is called as `update(batch)`, with the rows left out last (`with_left_out`), or as
    `update(indices, metrics)`: the positions of the samples that did not fail in the dataset, [E] int64, and numbers of
    each (extras/curriculum/curriculum.py). A dataset that has `on_batch_end` is called as `on_batch_end(batch)`.
    """
    rows = with_left_out(batch, left_out)
    if takes_metrics(loader.sampler):
        loader.sampler.update(*find("optional", "positions_and_metrics")(rows))
    else:
        loader.sampler.update(rows)
    if isinstance(loader.dataset, Dynamic):
        loader.dataset.on_batch_end(rows)


def with_left_out(batch: DataProto, left_out: DataProto | None) -> DataProto:
    """Returns `batch`, and below it the rows that were left out, with advantages and returns of 0: nothing was learnt.

    Columns that only the rows of `batch` have, such as old_log_probs, are left out then.
    """
    if left_out is None:
        return batch
    zeros = {name: torch.zeros_like(left_out.batch["token_level_scores"]) for name in LATER}
    below = DataProto.from_dict({**left_out.tensors, **zeros}, left_out.non_tensor_batch, left_out.meta_info)
    above = batch.select(below.tensors, below.non_tensor_batch)
    return DataProto.concat([above, below])
