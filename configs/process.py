"""Sets the environment variables that torch reads, chooses numbers of threads, and answers signals to a command.

A thread that waits for work spins before it sleeps. Without spinning a small model generates at 0.6 of the speed
(1 M parameters, 2 cores); for milliseconds, libgomp's default, it is up to 5 times slower beside another busy process.
"""

import atexit
import io
import logging
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from configs.paths import ROOT

if find_spec("omegaconf") is None:  # checked here, as every command imports this file first
    raise SystemExit(
        f"error: {sys.executable} has none of the packages that are needed here: run {ROOT}/.venv/bin/python instead, "
        "or `source .venv/bin/activate` first. `make setup` makes .venv."
    )

VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",  # for other OpenMP runtimes
    "GOMP_SPINCOUNT": "4000",  # for libgomp, which comes with torch on Linux; it overrides the policy
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for large pages, 512 times fewer of them
    "TOKENIZERS_PARALLELISM": "false",
}
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal is closed
THREADS = "OMP_NUM_THREADS"
GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
SAVING = signal.SIGUSR1  # job schedulers send it before a time limit
UNANSWERED = (signal.SIG_DFL, signal.default_int_handler)  # else ignored, as under nohup
STOPPED = "stopped by {}; once more kills the process. HYDRA_FULL_ERROR=1 shows where it was."

ended_by: list[int] = []  # the signal that is ending this process, if one is


class LeavablePipe(io.FileIO):
    """A pipe whose reader may leave, as `head` does: what is written then goes nowhere, and the command continues."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())  # processes that are started later inherit it
            return super().write(data)


def let_readers_leave() -> None:
    """Makes pipes at stdout and stderr leavable; commands call it by importing this module."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # a test or a notebook has put another there
        if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            pipe = LeavablePipe(stream.fileno(), "w", closefd=False)
            buffer = pipe if stream.write_through else io.BufferedWriter(pipe)
            as_before = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            setattr(sys, name, io.TextIOWrapper(buffer, **as_before))


def prepare_process() -> None:
    """Prepares the process of a command before its slow imports: signals, and the variables that torch reads."""
    end_on_interrupt()
    set_environment()


def in_notebook() -> bool:
    """Says whether this process is the kernel of a notebook."""
    return "ipykernel.zmqshell" in sys.modules


def prepare_kernel() -> None:
    """Prepares the kernel of a notebook before our slow imports, of which two would tell to install ipywidgets."""
    warnings.filterwarnings("ignore", "IProgress not found")
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    set_environment()


def set_environment() -> None:
    """Sets the variables that the user has not set; for commands and kernels, before they load torch."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


def read_key(settings: Mapping[str, Any], where: str) -> str | None:
    """Returns the key to a server: `api_key` of its settings, or what the variable holds that `api_key_env` names.

    Raises ValueError, which begins with `where`, if the environment has no such variable.
    """
    name = settings.get("api_key_env")
    if name is not None and name not in os.environ:
        raise ValueError(f"{where}.api_key_env={name}: the environment has no such variable. Export it.")
    return settings.get("api_key") if name is None else os.environ[name]


def shows_tracebacks() -> bool:
    """Says whether a command that fails shows its traceback: Hydra's switch, HYDRA_FULL_ERROR=1."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")


def end_on_interrupt() -> None:
    """Makes Ctrl-C, SIGTERM and SIGHUP end this process with one line, printed at once.

    What is open is closed first, unless there is a second signal; then the process ends by the signal itself, so that a
    shell's loop ends too.
    """
    unanswered = [number for number in ENDING if signal.getsignal(number) in UNANSWERED]
    if not unanswered:
        return  # it was called before
    print_traceback = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt) or shows_tracebacks():
            print_traceback(kind, error, trace)

    def end() -> None:
        if ended_by:  # Python's own way to end by a signal is lost where C runs Python, and is for Ctrl-C alone
            sys.stdout.flush()
            os.kill(os.getpid(), ended_by[0])

    for number in unanswered:
        signal.signal(number, interrupt)
    signal.signal(SAVING, lambda *_: say(f"{in_words(SAVING)}: there is nothing to save now."))
    sys.excepthook = hook
    atexit.register(end)  # registered before all others, so called after them


def interrupt(number: int, _: object) -> None:
    """Ends this process with a line that names the signal."""
    if not shows_tracebacks():
        say(STOPPED.format(in_words(number)))
    end_by(number)


def end_by(number: int) -> NoReturn:
    """Ends this process by a signal, when what is open is closed; one more kills it."""
    for other in ENDING:
        if signal.getsignal(other) is interrupt:
            signal.signal(other, signal.SIG_DFL)
    ended_by.append(number)
    raise KeyboardInterrupt(signal.Signals(number))


def in_words(number: int) -> str:
    key = "■" if in_notebook() else "Ctrl-C"
    return key if number == signal.SIGINT else signal.Signals(number).name


def say(text: str) -> None:
    """Prints a line on stderr from within a signal's handler: print may be what it interrupts."""
    os.write(2, f"\n{text}\n".encode())


class Requests:
    """Collects what signals ask of a run, which answers between two steps, while the context is open.

    Ctrl-C, SIGTERM and SIGHUP have the run saved and ended, a second one ends it at once; SIGUSR1 saves alone.

    Args:
        outlook: says when the run will be saved, and what is lost before.
    """

    def __init__(self, outlook: Callable[[], tuple[str, str]]) -> None:
        self.outlook = outlook
        self.signals: list[int] = []
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self.handlers = {number: signal.getsignal(number) for number in (*ENDING, SAVING)}
        for number, handler in self.handlers.items():
            if number == SAVING or handler is not signal.SIG_IGN:
                signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self.note:  # else a second signal has come, and the next one kills
                signal.signal(number, handler)

    def note(self, number: int, _: object) -> None:
        """Notes a signal, and says what will come of it."""
        saved, lost = self.outlook()
        if number == SAVING:
            say(f"{in_words(number)}: {saved}.")
        else:
            say(f"{in_words(number)}: {saved}, and the run ends. Once more ends it at once: {lost}.")
            for other in ENDING:
                signal.signal(other, self.handlers[other])
        self.signals.append(number)

    def take(self) -> tuple[bool, int | None]:
        """Returns whether anything was asked since the last call, and the signal that is to end the run, if any."""
        signals, self.signals = self.signals, []
        return bool(signals), next((number for number in signals if number in ENDING), None)


@contextmanager
def children_apart() -> Iterator[None]:
    """Starts processes that signals to this one's group do not reach, as it answers for them; keeps its handlers."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    start, mask = subprocess.Popen.__init__, signal.pthread_sigmask(signal.SIG_BLOCK, {SAVING})
    subprocess.Popen.__init__ = partialmethod(start, process_group=0)
    try:
        yield
    finally:
        subprocess.Popen.__init__ = start
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


class Threads(NamedTuple):
    """A number of threads, and where it comes from."""

    number: int
    origin: str

    def __str__(self) -> str:
        return f"{self.number} thread{'s'[: self.number > 1]} ({self.origin})"


def worker_threads(n_threads: int | None, workers: int = 1) -> Threads:
    """Chooses the threads of each of a machine's `workers`: trainer.n_threads, else OMP_NUM_THREADS, else an equal
    share of the available cores."""
    if n_threads is not None:
        return Threads(n_threads, "trainer.n_threads")
    declared = os.environ.get(THREADS, "").strip()
    if not declared:
        cores, origin = available_cores()
        return Threads(max(1, cores // workers), origin)
    first = declared.partition(",")[0].strip()  # of a list, the outermost level
    if not first.isdecimal() or int(first) == 0:
        raise ValueError(f"{THREADS}={declared} is no number of threads: set one above 0, or trainer.n_threads.")
    return Threads(int(first), THREADS)


def available_cores() -> tuple[int, str]:
    """Counts the cores that this process may use, and says what limits them: the affinity mask, or a lower CPU quota.

    A quota is rounded down, because all threads wait for one that the quota holds up."""
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else machine
    quota = cpu_quota()
    if quota is not None and quota < allowed:
        return max(1, int(quota)), f"a CPU quota of {quota:g}"
    return allowed, "the machine's cores" if allowed == machine else f"{allowed} of the machine's {machine} cores"


def most_gpus(devices: Path = Path("/dev")) -> float:
    """Counts the GPUs whose files a driver has in `devices` and CUDA_VISIBLE_DEVICES leaves: no more can be used.
    Infinity: other files show others, or a Ray cluster, which a run would join, may have them."""
    address, visible = os.environ.get("RAY_ADDRESS", ""), os.environ.get("CUDA_VISIBLE_DEVICES")
    cluster = Path(os.environ.get("RAY_TMPDIR", gettempdir()), "ray", "ray_current_cluster")  # `ray start` writes it
    joins = cluster.exists() if address in ("", "auto") else address != "local"
    if joins or any(file for name in ("dxg", "kfd", "nvhost*") for file in devices.glob(name)):  # WSL, AMD, Jetson
        return math.inf
    files = len([*devices.glob("nvidia[0-9]*")])
    if visible is None:
        return files
    names = [name for name in visible.split(",") if name not in ("", "-1")]
    return len(names) if files and "MIG-" in visible else min(files, len(names))  # a card's parts have one file


def cpu_quota(group: Path = GROUP, root: Path = GROUPS) -> float | None:
    """Reads the CPU limit of this process's control groups, in cores; None: no limit."""
    limits = [(folder / "cpu.max").read_text().split() for folder in control_groups("cpu.max", group, root)]
    return min((int(time) / int(period) for time, period in limits if time != "max"), default=None)


def memory_and_disk(folder: str | Path, group: Path = GROUP, root: Path = GROUPS) -> str:
    """Says how much disk is free for `folder` and, on Linux, how much memory: of the machine's, or of a lower limit of
    this process's control groups, whose cached files count as free."""
    path = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    disk, meminfo = f"{shutil.disk_usage(path).free / 1e9:.3g} GB of disk", Path("/proc/meminfo")
    if not meminfo.exists():
        return disk
    machine = dict(re.findall(r"(\w+): +(\d+) kB", meminfo.read_text()))
    sizes = [(int(machine["MemTotal"]) << 10, int(machine["MemAvailable"]) << 10)]
    for inner in control_groups("memory.max", group, root):
        limit, used, stat = ((inner / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
        if limit.strip() != "max":
            sizes.append((int(limit), int(limit) - int(used) + int(re.search(r"inactive_file (\d+)", stat)[1])))
    total, free = (min(column) / 1e9 for column in zip(*sizes, strict=True))
    shared = shutil.disk_usage("/dev/shm").free / 1e9
    return f"{free:.3g} of {total:.3g} GB of memory, {shared:.3g} of /dev/shm, {disk} free"


def control_groups(file: str, group: Path, root: Path) -> list[Path]:
    """Lists the folders of this process's control group (version 2) and of those above it that have a `file`.

    In a container the inner folders may be missing: the container's own group is then the outermost."""
    lines = group.read_text().splitlines() if group.is_file() else []
    inner = root.joinpath(*(line.removeprefix("0::/") for line in lines if line.startswith("0::/")))
    folders = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return [folder for folder in folders if (folder / file).is_file()]


let_readers_leave()  # here, as every command imports this file first
if in_notebook():
    prepare_kernel()
