"""Finds the files that the config names, from any working directory, and those that ship with this repository."""

import glob
import math
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG_DIR = ROOT / "configs"
DATA_ENDINGS = (".parquet", ".json", ".jsonl", ".csv")
ENDINGS_OF_DATASETS = (".jsonl.gz", ".json.gz", ".csv.gz", ".tsv", ".arrow")  # which the package `datasets` reads
SAVED_TO_DISK = ("dataset_dict.json", "state.json")  # what datasets.save_to_disk leaves in a folder
SPLITS = {  # by the names that the hub's files and folders give them
    "train": "train(?:ing)?",
    "validation": "val(?:id(?:ation)?)?|dev",
    "test": "test(?:ing)?|eval(?:uation)?",
}

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_path(path: str | Path) -> Path:
    """Expands ~ in `path`, and looks for a relative one in the working directory, then beside main.py.

    So the defaults (custom/env_wrapper.py) work from any directory, and a user's file of the same name comes first.
    """
    expanded = Path(path).expanduser()
    shipped = ROOT / expanded
    return shipped if shipped.exists() and not expanded.exists() else expanded


def expand_home(value: object) -> object:
    """Replaces a leading ~/ in a text, or in each text of a list, by the user's home: shells do not after `key=`."""
    if isinstance(value, list):
        return [expand_home(item) for item in value]
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def source_files(source: str | Path) -> list[Path]:
    """Lists the data files of an entry of data.train_files, sorted by name.

    A folder stands for all files in it, at any depth, with one of `DATA_ENDINGS`, a glob (*, ?, [a-z]) for all files
    that it matches. In a folder, names that begin with a dot or an underscore are skipped.

    Raises:
        FileNotFoundError: no file is found; names the working directory.
        ValueError: a folder holds several splits of a data set (names a glob of one), or a file has an unknown ending.
    """
    path = find_path(source)
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in DATA_ENDINGS]
        files = [file for file in files if not re.search(r"(^|/)[._]", str(file.relative_to(path)))]  # hidden ones
        splits = [split for split in SPLITS if any(split_of(file.relative_to(path)) == split for file in files)]
        if len(splits) > 1:
            example = next(file for file in sorted(files) if split_of(file.relative_to(path)) == splits[0])
            word = re.search(f"(?i){SPLITS[splits[0]]}", str(example.relative_to(path)))[0]
            glob_of_one = path / (f"**/*{word}*" if word in example.name else f"**/{word}/**/*")
            raise ValueError(f"{source} holds {' and '.join(splits)}: name the files of one, as '{glob_of_one}'.")
        problem = f"no file in it ends in {', '.join(DATA_ENDINGS)}"
    else:
        endings = ENDINGS_OF_DATASETS if path.name.endswith(ENDINGS_OF_DATASETS) else DATA_ENDINGS
        matches = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
        files = [file for file in matches if file.is_file()]
        if unknown := next((file for file in files if not file.name.endswith(endings)), None):
            raise ValueError(f"{unknown}: unknown ending {unknown.suffix!r}, not of {', '.join(endings)}.")
        problem = "there is no such file" if not glob.has_magic(str(path)) else "no file matches it"
    if not files:
        raise FileNotFoundError(f"{source}: {problem} (looked in {Path.cwd()}).")
    return sorted(files)


def row_bound(file: Path, enough: int) -> float:
    """Returns an upper bound of a data file's rows, or `enough` or more if there are so many; infinity: unknown.

    Nothing is parsed: an object in an array begins with a brace, and any other row has a line of its own."""
    if file.suffix == ".parquet":
        from pyarrow import ArrowException, parquet  # takes a while, and no other check needs it

        with suppress(ArrowException, OSError):
            return parquet.read_metadata(file).num_rows
    if file.suffix not in DATA_ENDINGS[1:] or file.name in SAVED_TO_DISK:
        return math.inf
    with file.open(encoding="utf-8-sig", errors="replace") as text:
        is_csv = file.suffix == ".csv"  # where a line of blanks is a row
        lines = (line for line in text if line.strip("\n" if is_csv else " \t\n"))
        first = next(lines, "")
        if not is_csv and first.lstrip().startswith("["):
            return sum(line.count("{") for line in (first, *lines))
        return len([*islice(lines, enough)]) + (first != "" and not is_csv)


def options(kind: str, folder: Path = CONFIG_DIR) -> list[str]:
    """Lists the yaml files of the config group `kind`, in `folder` and in the shipped configs."""
    return sorted({path.stem for root in (folder, CONFIG_DIR) for path in (root / kind).glob("*.yaml")})


def split_of(path: Path) -> str | None:
    """Returns the split that the name of a data file, or of one of its folders, names; None: none does."""
    for part in (path.stem, *reversed(path.parts[:-1])):
        words = re.split(r"[-_.\s]+", part.lower())
        for split, names in SPLITS.items():
            if any(re.fullmatch(names, word) for word in words):
                return split
    return None


def check_model_path(path: str | None, key: str) -> str:
    """Returns `path` if it can be a model: a folder with a config.json, or a name of the hub's form."""
    remedy = (
        "Give a folder written by save_pretrained; `python -m custom.tiny_model DIR` makes a small one to try with, "
        "`make quickstart` makes outputs/quickstart/warm_start."
    )
    if not path:
        raise ValueError(f"{key} is not set. {remedy}")
    folder = find_path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            patterns = ("", "actor/", "global_step_*/", "global_step_*/actor/")  # of a checkpoint, and of a run
            files = [file for pattern in patterns for file in folder.glob(f"{pattern}huggingface/config.json")]
            if files:
                remedy = f"It holds one: {max(files, key=lambda file: file.stat().st_mtime).parent}"
            raise ValueError(f"{key}={path}: the folder has no config.json, so it is not a model. {remedy}")
        return str(folder)
    if folder.is_absolute() or path.startswith((".", "~")) or not HUB_NAME.fullmatch(path) or folder.parent.is_dir():
        raise ValueError(f"{key}={path}: there is no such folder (looked in {Path.cwd()}). {remedy}")
    return path
