"""Reads rows of two optional packages, which are imported when an entry of data.train_files names them.

- `datasets:NAME?split=train&name=CONFIGURATION`, of the Hugging Face hub, or a folder that `save_to_disk` wrote; and
  files that end in .jsonl.gz, .json.gz or .arrow, and without that package .csv.gz and .tsv, as .csv is read,
- `reasoning_gym:TASK?size=500&seed=0&…`, tasks made as they are asked for, each with a scorer of its own.
"""

import csv
import gzip
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import yaml

from configs.paths import find_path
from data.rows import SAVED_TO_DISK, Found, Origin, read_csv, without_nulls

KINDS = {".jsonl.gz": "json", ".json.gz": "json", ".arrow": "arrow"}  # by the ending
ANSWER_FORMAT = "Give the final answer between <answer> and </answer>."


def read_datasets(source: str, name: str, settings: dict[str, str]) -> Iterator[Found]:
    """Reads the rows of a data set of the Hugging Face hub, of a folder or a file; of its split `split` (train)."""
    settings, folder = {"split": "train"} | settings, find_path(name)
    if name.endswith((".csv.gz", ".tsv")):
        return iter(read_separate(folder, source))
    datasets = optional_package("datasets", source)
    try:
        if any((folder / file).is_file() for file in SAVED_TO_DISK):
            dataset = datasets.load_from_disk(str(folder))
            dataset = dataset[settings["split"]] if isinstance(dataset, datasets.DatasetDict) else dataset
        elif folder.is_file():
            kind = next(kind for ending, kind in KINDS.items() if folder.name.endswith(ending))
            dataset = datasets.load_dataset(kind, data_files=str(folder), **settings)
        else:
            dataset = datasets.load_dataset(name, **settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{source} cannot be loaded: {type(error).__name__}: {error}. The form is datasets:NAME?split=train&"
            "name=CONFIGURATION; without a network, save it by save_to_disk and name the folder."
        ) from error
    return ((Origin(source, number), without_nulls(dict(row))) for number, row in enumerate(dataset))


def read_separate(path: Path, source: str) -> list[Found]:
    """Reads the rows of a file of texts, whose numbers stay texts: `datasets` would make 7 of 007, and null of NA."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            return [*read_csv(str(path), file.read(), "\t" if path.suffix == ".tsv" else ",")]
    except (OSError, EOFError, ValueError, csv.Error) as error:
        raise ValueError(f"{source} cannot be read: {error}") from error


def read_reasoning_gym(source: str, name: str, settings: dict[str, str]) -> Iterator[Found]:
    """Tasks of reasoning-gym in verl's form; extras/rules/reasoning_gym.py scores them.

    `settings`: `size` (tasks), `seed`, and whatever the task's own configuration has.
    """
    package = optional_package("reasoning_gym", source)
    try:
        tasks = package.create_dataset(name, **{key: yaml.safe_load(text) for key, text in settings.items()})
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"{source}: {error}. The form is reasoning_gym:TASK?size=500&seed=0&SETTING=…") from error
    for number, entry in enumerate(tasks):
        yield (
            Origin(source, number),
            {
                "data_source": f"reasoning_gym/{name}",
                "prompt": [{"role": "user", "content": f"{entry['question']}\n\n{ANSWER_FORMAT}"}],
                "ability": "reasoning",
                "reward_model": {"style": "rule", "ground_truth": dict(entry)},
                "extra_info": {"index": number, "answer": entry["answer"]},
            },
        )


def optional_package(name: str, source: str) -> ModuleType:
    """Raises ValueError, with the command that installs it, where the package is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"{source} needs the package {name.replace('_', '-')}, which is not installed: "
            "pip install -c constraints.txt -r requirements-sources.txt."
        ) from error
