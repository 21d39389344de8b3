"""Writes objects of a caller as a run's settings: names of their own, rows of any kind, an environment."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from configs.errors import ConfigError
from data.files import dump_jsonl
from data.rows import rows_of

ACTOR = "actor_rollout_ref.actor"
SHORT = {
    "total_epochs": "trainer.total_epochs",
    "batch_size": "data.train_batch_size",
    "learning_rate": f"{ACTOR}.optim.lr",
    "ppo_epochs": f"{ACTOR}.ppo_epochs",
    "clip_range": f"{ACTOR}.clip_ratio",
    "kl_coef": f"{ACTOR}.kl_loss_coef",
}


class TrainingConfig(dict):
    """Holds settings by their path, and some by a name in `SHORT`: TrainingConfig({"trainer.seed": 1}, kl_coef=0.1)."""

    def __init__(self, settings: Mapping[str, Any] | None = None, **short: Any) -> None:
        for name, value in {**(settings or {}), **short}.items():
            self[SHORT.get(name, name)] = value
            if name == "kl_coef":
                self.setdefault(f"{ACTOR}.use_kl_loss", value > 0)


def as_override(key: str, value: Any) -> str:
    """Writes a setting as an override, key=value, in Hydra's grammar."""
    try:
        return f"{key}={in_hydras_grammar(value)}"
    except TypeError as error:
        raise ConfigError(f"{key}={value!r}: a setting is a text, a number, a list or a dict.", key) from error


def in_hydras_grammar(value: Any) -> str:
    if isinstance(value, str | Path):
        return "'" + str(value).replace("'", r"\'") + "'"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(in_hydras_grammar, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{in_hydras_grammar(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)


def settings_of_environment(environment: Any) -> dict[str, Any]:
    """Returns the settings that name a gymnasium id, class, or environment; a class is registered in this process.

    Raises:
        ConfigError: it is none of these.
    """
    match environment:
        case None:
            return {}
        case str(name) | object(env_id=str(name)):  # the latter is a text environment
            return {"env.id": name}
        case type(__name__=name):
            import gymnasium  # for a notebook alone

            gymnasium.registry.pop(f"{name}-v0", None)
            gymnasium.register(f"{name}-v0", environment)
            return {"env.id": f"{name}-v0"}
        case object(spec=object(id=str(name), kwargs=dict(kwargs))):
            return {"env.id": name, "env.kwargs": kwargs}
    raise ConfigError(f"environment={environment!r}: give a gymnasium id, a class, or what gymnasium.make returns.")


def as_dataset(rows: Any) -> Dataset | None:
    """Returns the data set that gives rows as dicts when they are asked for; None: it is none, or of prompts alone."""
    rows = rows.dataset if isinstance(rows, DataLoader) else rows
    return rows if isinstance(rows, Dataset) and len(rows) and isinstance(rows[0], Mapping) else None


def write_rows(rows: Any, path: Path) -> str:
    """Writes rows as JSON lines, and returns the path; rows that are the path of a file stay where they are.

    Raises:
        ValueError: they are no rows, or one holds what is not JSON; names row and column.
    """
    if isinstance(rows, str | Path):
        return str(rows)
    if isinstance(rows, DataLoader):
        rows = rows.dataset
    if isinstance(rows, Sequence | Dataset):
        rows = [rows[index] for index in range(len(rows))]
        rows = [{"prompt": row} if isinstance(row, str | list) else row for row in rows]
    if not isinstance(rows, Iterable):
        raise ValueError(f"rows={rows!r}: give a list, a data frame, a data set, a DataLoader, or the path of a file.")
    table = rows_of(rows, "rows")
    for number, row in enumerate(table):
        for column, value in row.items():
            try:
                json.dumps(value, default=lambda item: item.tolist())  # of tensors, arrays and numpy's numbers
            except (TypeError, ValueError, AttributeError) as error:
                rule = "rows are kept as JSON: texts, numbers, lists and dicts"
                raise ValueError(f"rows[{number}][{column!r}] is {value!r}; {rule}.") from error
    dump_jsonl(path, table)
    return str(path)
