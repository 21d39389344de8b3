"""Calls all that watch a run (data/types.py: Observer): its record, then the extras' and those of trainer.logger."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from configs.errors import ConfigError
from configs.extras import TABLE, find, present
from data.protocol import DataProto
from data.types import Observer
from training.tracking import Record

logger = logging.getLogger(__name__)


class Observers(Observer):
    """The observers of a run, which are called as one; closed as a context manager, even if one of them raises."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.record = Record(run)
        self.others = [kind(run) for kind in observers_of(run.config)]

    def started(self, step: int) -> None:
        for observer in (self.record, *self.others):
            observer.started(step)

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        numbers = {name: as_float(name, value) for name, value in metrics.items()}
        self.record.stepped(step, batch, numbers)
        for observer in [*self.others]:
            try:
                observer.stepped(step, batch, numbers)
            except OSError as error:  # a full disk, for one: the numbers are in the record
                logger.warning("%s ends before step %d: %s", type(observer).__name__, step, error)
                self.others.remove(observer)

    def validated(self, step: int, batches: Sequence[DataProto], metrics: Mapping[str, float]) -> None:
        for observer in self.others:
            observer.validated(step, batches, metrics)

    def ended(self, error: BaseException | None) -> None:
        with ExitStack() as stack:
            for observer in (self.record, *self.others):
                stack.callback(observer.ended, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        self.ended(error)


def observers_of(config: Any) -> list[type[Observer]]:
    """Finds the observers of a run beside its record; verl's logger "file" is the record, which is always written.

    Raises:
        ConfigError: trainer.logger names none, or one of an extra that is not in this copy.
    """
    names = config.trainer.logger
    names = dict.fromkeys([names] if isinstance(names, str) else names or ())
    names.pop("file", None)
    for name in names:
        if name not in TABLE["logger"] and ":" not in name:
            known = ", ".join([*TABLE["logger"], "file"])
            raise ConfigError(f"trainer.logger has {name!r}: choose from {known}, or name file.py:Class of yours.")
    loggers = [find("logger", name, "trainer.logger") for name in names]
    return [*(find("observer", name) for name in present("observer")), *loggers]


def check_observers(config: Any) -> None:
    """Raises ConfigError for observers that cannot work: a package or a folder is missing."""
    for observer in observers_of(config):
        observer.check(config)


def as_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name!r} is {value!r}: log one number a name") from error
