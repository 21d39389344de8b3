"""Where a path of the config leads: what is shipped is found from every working directory."""

import glob
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA_ENDINGS = (".parquet", ".json", ".jsonl", ".csv")
SOURCE_SCHEMES = ("datasets", "reasoning_gym")


def find_path(path: str | Path) -> Path:
    """`path` with ~ spelt out; if it is relative and not in the working directory, but beside main.py, that one.

    So the defaults (custom/env_wrapper.py) work from everywhere, and a user's own file of that name goes before.
    """
    found = Path(path).expanduser()
    shipped = ROOT / found
    return shipped if shipped.exists() and not found.exists() else found


def home_spelt_out(value: object) -> object:
    """A setting whose text, or texts, begin with ~/ has the user's home there: no shell does that behind `key=`."""
    if isinstance(value, list):
        return [home_spelt_out(item) for item in value]
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def source_files(source: str | Path) -> list[Path]:
    """The data files that an entry of data.train_files means, in the order of their names.

    A file is itself; a folder means all files in it, at any depth, with one of `DATA_ENDINGS`; a glob (*, ?, [a-z]) all
    that it matches. What begins with a dot or an underscore is not looked at.

    Raises:
        FileNotFoundError: there is none; names the working directory.
    """
    path = find_path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [file for file in path.rglob("*") if file.suffix in DATA_ENDINGS and is_shown(file.relative_to(path))]
        wanted = f"no file in it ends in {', '.join(DATA_ENDINGS)}"
    else:
        found = [file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()]
        wanted = "there is no such file" if not glob.has_magic(str(path)) else "no file matches it"
    if not found:
        raise FileNotFoundError(f"{source}: {wanted} (looked in {Path.cwd()}).")
    return sorted(found)


def is_shown(path: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in path.parts)


def is_named_source(source: str | Path) -> bool:
    """Whether an entry of data.train_files names what a package brings, and no file: datasets:…, reasoning_gym:…"""
    return str(source).partition(":")[0] in SOURCE_SCHEMES
