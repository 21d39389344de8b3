"""Turns mistakes of the user into one line, names the line of the user's code that raised, and prints notices.

HYDRA_FULL_ERROR=1 shows the traceback; bugs of this repository keep theirs.
"""

import difflib
import logging
import re
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from configs.paths import ROOT
from configs.process import shows_tracebacks

FOLDERS = ("configs", "data", "training", "workers", "extras", "scripts", "custom/gym", "main.py", "verl.py")
FRAMEWORK = [ROOT / part for part in FOLDERS]
ENTRANCES = [(str(ROOT / "custom/env_wrapper.py"), name) for name in ("make_env", "make_text_env")]  # into custom/gym
STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
REFUSED, TEMPORARY = 2, 75  # exit codes; after another error it is 1; 75 is EX_TEMPFAIL of sysexits.h
NOTICE = (logging.INFO + logging.WARNING) // 2  # the level of notices
logger = logging.getLogger(__name__)
notices = logging.getLogger("notice")
noticed: set[Hashable] = set()
latest: deque[logging.LogRecord] = deque(maxlen=100)  # notices, for observers that keep them once there is a run
ELSEWHERE = {  # name in other frameworks → ours
    "batch_size": "train_batch_size", "beta": "kl_loss_coef", "epochs": "total_epochs", "epsilon": "clip_ratio",
    "epsilon_high": "clip_ratio_high", "eval_steps": "test_freq", "grad_clip": "clip_grad",
    "group_size": "n", "learning_rate": "lr", "max_completion_length": "max_response_length",
    "max_grad_norm": "clip_grad", "max_new_tokens": "max_response_length", "max_steps": "total_training_steps",
    "num_epochs": "total_epochs", "num_generations": "n", "num_samples": "n", "num_train_epochs": "total_epochs",
    "output_dir": "default_local_dir", "reinforce++": "reinforce_plus_plus", "rollout_n": "n",
    "run_name": "experiment_name", "save_steps": "save_freq", "seed": "trainer.seed", "steps": "total_training_steps",
    "total_step": "total_training_steps", "total_steps": "total_training_steps",
    "val_freq": "test_freq", **dict.fromkeys(("model", "model_name", "model_name_or_path", "model_path"), "model.path"),
}  # fmt: skip
FRAME = re.compile(r'^ *File "([^"]+)", line \d+(?:, in (\S+))?', re.MULTILINE)
AROUND = ("Traceback (", "The above exc", "During handling", "ray::", "\x1b[36mray::", "raised at ")  # frames
ALIKE = 0.65  # of difflib's ratio: lam is like lambda, and rloo not like retool
FEW = 3  # keys of one last part: path, name and enable say nothing without their section
notices.setLevel(NOTICE)
notices.propagate = False
logging.addLevelName(NOTICE, "NOTICE")


class ConfigError(ValueError):
    """Raised for settings that cannot work; the message says which key, why, and what to do instead.

    Attributes:
        key: the setting that is refused; unless it is given, what the message begins with, as in `data.seed=x: …`.
    """

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key or re.split("[=: ]", message, maxsplit=1)[0]

    def _render_traceback_(self) -> list[str]:
        """Returns what a notebook shows of it: IPython looks for this method."""
        return traceback.format_exception(self) if shows_tracebacks() else [f"{type(self).__name__}: {self}"]


class MayPass(RuntimeError):
    """An error whose cause may pass, so that the same command may succeed when it is run again."""


class WorkerError(RuntimeError):
    """A worker in another process failed; the message carries its rank and traceback."""


class WorkerLost(WorkerError, MayPass):
    """A worker died, is stuck, or waited for another in vain: it would not answer another call either."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turns a mistake of the user into one line on stderr, `error: …`, and ends; used before workers start.

    Mistakes are errors that this repository raises on purpose, and all errors from the user's files, with their line.
    """
    try:
        yield
    except Exception as error:  # everything else is raised again
        location, on_purpose = users_line(error), is_on_purpose(error)
        if (location is None and not on_purpose) or shows_tracebacks():
            raise
        message = str(error) if on_purpose else f"{type(error).__name__}: {error}"
        suffix = f" ({location})" if location and location not in message else ""
        refuse(f"{message}{suffix}", error)


@contextmanager
def late_refusals() -> Iterator[None]:
    """Ends the command with one line at a ConfigError, also of a worker's, and with the user's part of another error;
    says by its exit code what may pass."""
    try:
        yield
    except ConfigError as error:
        if shows_tracebacks():
            raise
        refuse(str(error), error)
    except MayPass as error:
        if is_on_purpose(error) and users_line(error) is None and not shows_tracebacks():
            refuse(str(error), error)
        sys.excepthook(*sys.exc_info())
        raise SystemExit(TEMPORARY) from error
    except Exception as error:  # everything else is raised again
        if shows_tracebacks() or not (text := users_part(error)):
            raise
        print(text, file=sys.stderr)
        raise SystemExit(1) from error


def refuse(message: str, error: Exception) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(TEMPORARY if isinstance(error, MayPass) else REFUSED) from error


@contextmanager
def users_line_noted() -> Iterator[None]:
    """Adds the file and line of the user's code to an error that came from it; for training."""
    try:
        yield
    except Exception as error:  # raised again, whatever it is
        location = users_line(error)
        if location and location not in str(error):
            error.add_note(f"raised at {location}")
        raise


@contextmanager
def warns_of_close(name: str) -> Iterator[None]:
    """Turns an error of closing `name` into a warning: nothing depends on it any more."""
    try:
        yield
    except Exception as error:  # of the user's environment or agent, or of an engine: whatever they raise
        location = users_line(error)
        logger.warning(
            "%s could not be closed: %s: %s%s", name, type(error).__name__, error, f" ({location})" if location else ""
        )


def users_line(error: BaseException) -> str | None:
    """Returns file:line of the user's code nearest to the first cause of `error`, or a line of its cell, or None."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for cause in reversed(chain):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if Path(frame.filename).parent.name.startswith("ipykernel_"):
                return f"line {frame.lineno} of its cell"
            if is_users(frame.filename) and (frame.filename, frame.name) not in ENTRANCES:
                return f"{frame.filename}:{frame.lineno}"
    return None


def users_part(error: BaseException) -> str:
    """Returns what is printed of an error, and of those that caused it, without frames of ours and of libraries; "" if
    no frame is the user's, and no `raise` of ours says it all.

    A message may hold the traceback of another process, so all is read as text."""
    text, lines, is_kept = "".join(traceback.format_exception(error)), list[str](), True
    for line in text.splitlines():
        if frame := FRAME.match(line):
            is_kept = is_users(frame[1]) and (frame[1], frame[2]) not in ENTRANCES
        elif not line.startswith("  "):
            is_kept = not line.startswith(AROUND)
        lines += [line] if is_kept and line.strip() else []
    is_ours = isinstance(error, AssertionError) or not is_on_purpose(error) or FRAME.search(str(error))
    return "" if is_ours and not any(map(FRAME.match, lines)) else "\n".join(lines)


def is_on_purpose(error: BaseException) -> bool:
    """Says whether a `raise` or `assert` of this repository made `error`: a slip such as None.name has neither."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(frame.filename).is_relative_to(ROOT) and not is_library(frame.filename)
    return ours and (frame.line or "").startswith(("raise", "assert"))


def is_users(file: str) -> bool:
    """Says whether `file` is neither a library's nor this repository's; custom/, but custom/gym, is the user's."""
    path = Path(file)
    framework = any(map(path.is_relative_to, FRAMEWORK))
    return path.is_file() and not framework and not is_library(file)  # compiled libraries name files that are absent


def is_library(file: str) -> bool:
    path = Path(file.removeprefix(f"{ROOT}/"))  # ROOT itself may be in site-packages
    return file.startswith("<") or "site-packages" in path.parts or path.is_relative_to(STDLIB)


def notice(text: str) -> None:
    """Prints on stderr what a user should know, and gives it to the logger "notice"."""
    print(f"notice: {text}", file=sys.stderr)
    notices.disabled = False  # logging.config disables loggers that it does not know
    latest.append(notices.makeRecord(notices.name, NOTICE, "", 0, text, (), None))
    notices.handle(latest[-1])


def notice_once(text: str, topic: Hashable = None) -> None:
    """Prints a notice, unless this process has printed one with the same `topic` (None: the same text)."""
    if (key := topic or text) not in noticed:
        noticed.add(key)
        notice(text)


def printable(text: str) -> str:
    """Spells out what has no UTF-8: half a character, as in a text that was decoded wrongly."""
    return text.encode("utf-8", "backslashreplace").decode()


def did_you_mean(name: str, known: list[str]) -> str:
    """Returns " Did you mean …?" with the nearest key, or an empty text if none is near; first those of the section.

    A name of other frameworks is read as ours."""
    section, dot, last = name.rpartition(".")
    name = section + dot + ELSEWHERE.get(last, last)
    section, _, last = name.rpartition(".")
    close = nearest_by_last_part(last, [key for key in known if key.rpartition(".")[0] == section])
    close = close or [key for key in known if key.startswith(name)]
    close = close or difflib.get_close_matches(name, [key for key in known if is_alike(key, name)], n=1, cutoff=0)
    namesakes = [key for key in known if key.rpartition(".")[2] == last]
    below = [key for key in known if f".{section}." in f".{key}"]
    close = close or [key for key in namesakes if key in below] or nearest_by_last_part(last, below)
    elsewhere = namesakes or nearest_by_last_part(last, known, cutoff=0.85)
    close = close or (elsewhere if len(elsewhere) <= FEW else [])
    return f" Did you mean '{close[0]}'?" if close else ""


def is_alike(key: str, name: str) -> bool:
    """Says whether each part of `key` is close to that of `name`, which may go on below a setting without parts."""
    parts, names = key.split("."), name.split(".")
    pairs = zip(parts, names, strict=False)
    return len(parts) <= len(names) and all(difflib.get_close_matches(part, [typed], 1, ALIKE) for part, typed in pairs)


def nearest_by_last_part(last: str, keys: list[str], cutoff: float = ALIKE) -> list[str]:
    by_last = {key.rpartition(".")[2]: key for key in reversed(keys)}
    return [by_last[match] for match in difflib.get_close_matches(last, [*by_last], n=1, cutoff=cutoff)]


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
