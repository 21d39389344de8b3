"""Where a path of the config leads: what is shipped is found from every working directory."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
