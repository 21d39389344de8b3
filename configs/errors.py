"""How a run refuses to start, and how it says where in the user's own code something broke.

Before workers start, a mistake of the user's ends in one line that names cause and remedy; HYDRA_FULL_ERROR=1 shows its
traceback. A bug of ours keeps it, and so does everything that happens in training. Nothing here knows what a config
holds.
"""

import difflib
import sys
import sysconfig
import traceback
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from configs.paths import ROOT
from configs.process import shows_tracebacks

FRAMEWORK = ("configs", "data", "training", "workers", "scripts", "main.py")
STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
noticed: set[Hashable] = set()


class ConfigError(ValueError):
    """What the user set cannot work; the message says which key, why, and what to do instead."""


@contextmanager
def refusals() -> Iterator[None]:
    """Makes mistakes of the user's one line on stderr, `error: …`, and exit code 2; for all before the expensive part.

    Mistakes are what our own code raised on purpose, and whatever came out of the user's files, whose line is added.
    """
    try:
        yield
    except Exception as error:  # everything else is raised on
        place, on_purpose = users_line(error), is_on_purpose(error)
        if (place is None and not on_purpose) or shows_tracebacks():
            raise
        message = str(error) if on_purpose else f"{type(error).__name__}: {error}"
        where = f" ({place})" if place and place not in message else ""
        refuse(f"{message}{where}", error)


@contextmanager
def late_refusals() -> Iterator[None]:
    """Ends the command in one line at a ConfigError, whenever it comes: settings may prove wrong once workers run."""
    try:
        yield
    except ConfigError as error:
        if shows_tracebacks():
            raise
        refuse(str(error), error)


def refuse(message: str, error: Exception) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2) from error


@contextmanager
def users_line_noted() -> Iterator[None]:
    """Adds a last line to a traceback that began in the user's files, saying where; for training."""
    try:
        yield
    except Exception as error:
        place = users_line(error)
        if place and place not in str(error):
            error.add_note(f"raised at {place}")
        raise


def users_line(error: BaseException) -> str | None:
    """file:line of the user's code that is nearest to the first cause of `error`; None if none took part."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for cause in reversed(chain):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if is_users(frame.filename):
                return f"{frame.filename}:{frame.lineno}"
    return None


def is_on_purpose(error: BaseException) -> bool:
    """Whether a `raise` or `assert` of this repository made `error`: a slip such as None.name has neither."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(frame.filename).is_relative_to(ROOT) and not is_library(frame.filename)
    return ours and (frame.line or "").startswith(("raise", "assert"))


def is_users(file: str) -> bool:
    """Whether `file` belongs to neither a library nor the framework; custom/ is the user's to edit."""
    path = Path(file)
    framework = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FRAMEWORK
    return path.is_file() and not framework and not is_library(file)  # compiled libraries name files that are absent


def is_library(file: str) -> bool:
    path = Path(file)
    return file.startswith("<") or "site-packages" in path.parts or path.is_relative_to(STDLIB)


def notice(text: str) -> None:
    print(f"notice: {text}", file=sys.stderr)


def notice_once(text: str, about: Hashable = None) -> None:
    """A notice, unless this process has given one `about` the same (None: in the same words)."""
    if (key := about or text) not in noticed:
        noticed.add(key)
        notice(text)


def did_you_mean(name: str, known: list[str]) -> str:
    """' Did you mean …?' naming the nearest key: by its full spelling, else by its last part."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if not close:
        last = name.rpartition(".")[2]
        by_last = {key.rpartition(".")[2]: key for key in reversed(known)}
        close = [by_last[match] for match in difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.6)]
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f" Did you mean '{close[0]}'?" if close else ""


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
