"""Reads rows of two optional packages, which are imported when an entry of data.train_files names them.

- `datasets:NAME?split=train&name=CONFIGURATION`, of the Hugging Face hub, or a folder that `save_to_disk` wrote; and
  files that end in .jsonl.gz, .json.gz, .csv.gz, .tsv or .arrow,
- `reasoning_gym:TASK?size=500&seed=0&…`, tasks made as they are asked for, each with a scorer of its own.
"""

import importlib
from collections.abc import Iterator
from types import ModuleType

import yaml

from configs.paths import find_path
from data.rows import SAVED_TO_DISK, Found, Origin, without_nulls

KINDS = {".jsonl.gz": "json", ".json.gz": "json", ".csv.gz": "csv", ".tsv": "csv", ".arrow": "arrow"}  # by the ending
ANSWER_FORMAT = "Give the final answer between <answer> and </answer>."


def read_datasets(source: str, name: str, settings: dict[str, str]) -> Iterator[Found]:
    """Reads the rows of a data set of the Hugging Face hub, of a folder or a file; of its split `split` (train)."""
    datasets = optional_package("datasets", source)
    settings = {"split": "train"} | settings
    folder = find_path(name)
    try:
        if any((folder / file).is_file() for file in SAVED_TO_DISK):
            dataset = datasets.load_from_disk(str(folder))
            dataset = dataset[settings["split"]] if isinstance(dataset, datasets.DatasetDict) else dataset
        elif folder.is_file():
            kind = next(kind for ending, kind in KINDS.items() if folder.name.endswith(ending))
            separated = {"sep": "\t"} if folder.suffix == ".tsv" else {}
            dataset = datasets.load_dataset(kind, data_files=str(folder), **separated, **settings)
        else:
            dataset = datasets.load_dataset(name, **settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{source} cannot be loaded: {type(error).__name__}: {error}. The form is datasets:NAME?split=train&"
            "name=CONFIGURATION; without a network, save it by save_to_disk and name the folder."
        ) from error
    return ((Origin(source, number), without_nulls(dict(row))) for number, row in enumerate(dataset))


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
            "pip install -r requirements-sources.txt."
        ) from error
