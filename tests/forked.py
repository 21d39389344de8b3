"""Runs `python …` in a fork of a process that has the imports done: 5 CPU seconds a run are saved.

`python(...)` is for tests, and `Run(...)` for those that do something meanwhile. The process that is forked is started
by `python -m tests.forked` at the first call, one for each process of pytest, and ends with it, as its runs do. A run
is a process of its own in all but its start: it has its own arguments, environment, working directory, output, session
and exit status, by a signal too. Tests of the start itself (what is imported, variables that are read when torch is
loaded) use `subprocess`.
"""

import atexit
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from uuid import uuid4

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (  # what a run loads; vLLM, which starts threads, is left to those that need it
    *("main", "training.preparation", "training.ray_trainer", "extras.dry_run.dry_run"),
    *("extras.sft.trainer", "extras.server.__main__"),
    *("extras.evaluation.main_generation", "extras.evaluation.main_eval"),
    *("workers.group", "workers.model_worker", "workers.hf_rollout", "extras.server.app"),
    *("custom.tiny_model", "custom.env_dataset", "custom.reward_manager"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # or a fork may hang
MOST = 1 << 20  # bytes of a request
FIRST_JOB = "01000000"  # of a Ray that a test has started: its workers read it and whose end is theirs, as they import


class Run:
    """A `python arguments…` that goes on, in a session of its own: its process `pid`, what it says, and its end."""

    def __init__(self, *arguments: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
        self.given = [*map(str, arguments)]
        self.output = TemporaryFile(), TemporaryFile()  # noqa: SIM115
        with open(os.devnull) as nothing:
            files = [nothing.fileno(), *(file.fileno() for file in self.output)]
            environment = dict(os.environ if env is None else env)
            self.told = ask(prepared_process(), self.given, str(cwd), environment, files=files)
        self.pid = next_number(self.told)

    def said(self) -> tuple[str, str]:
        """Returns what it has written so far, to stdout and to stderr."""
        return tuple(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in self.output)

    def is_over(self) -> bool:
        return bool(select.select([self.told], [], [], 0)[0])

    def wait(self, seconds: float | None = None) -> subprocess.CompletedProcess:
        """Waits for its end, at most so long, and returns its output and exit status."""
        self.told.settimeout(seconds)
        status = os.waitstatus_to_exitcode(next_number(self.told))
        done = subprocess.CompletedProcess([sys.executable, *self.given], status, *self.said())
        for file in (*self.output, self.told):
            file.close()
        return done


def python(
    *arguments: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess:
    """Runs `python arguments…`, a file or -c or -m first, and returns its output and exit status.

    Raises:
        subprocess.CalledProcessError: with `check`, if it fails.
    """
    done = Run(*arguments, cwd=cwd, env=env).wait()
    if check:
        done.check_returncode()
    return done


def python_command() -> str:
    """The words that stand for `python` where a program starts it, as Ray does its workers."""
    return f"{sys.executable} -S {__file__} {prepared_process()}"


@cache
def prepared_process() -> str:
    """Starts the process that is forked, which ends when this one does; returns the address that takes its requests."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0nano_verl_tests_{os.getpid()}_{uuid4().hex}")
        listening.listen()
        until_closed, _ = os.pipe()  # the other end is closed with this process
        subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(listening.fileno()), str(until_closed)],
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, "RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())},
            pass_fds=[listening.fileno(), until_closed],
            start_new_session=True,
        )
        os.close(until_closed)
        return listening.getsockname()[1:].decode()


def ask(address: str, *call: Any, files: list[int]) -> socket.socket:
    """Has a fork of the process at `address` run(*call) with these files as its stdin, stdout and stderr; is told its
    process id, then its status."""
    request = repr(call).encode()
    assert len(request) < MOST, f"{len(request)} bytes of arguments and environment: at most {MOST} are read"
    told = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST)
    told.connect(f"\0{address}")
    socket.send_fds(told, [request], files)
    return told


def next_number(told: socket.socket) -> int:
    found = told.recv(100)
    assert found, "nothing was run: the process that is forked is gone"
    return int(found)


def next_run(listening: socket.socket, until_closed: int) -> tuple[list[str], str, dict[str, str]]:
    """Returns in a fork, for each request; this process waits for the next, until the process that started it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if until_closed in select.select([listening, until_closed], [], [])[0]:
            sys.exit()
        asking, _ = listening.accept()
        request, files, *_ = socket.recv_fds(asking, MOST, 3)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                os.setsid()
                break
            with suppress(OSError):  # nobody waits for it
                asking.send(str(pid).encode())
                if asking in select.select([os.pidfd_open(pid), asking], [], [])[0]:  # who asked is gone
                    os.killpg(pid, signal.SIGTERM)
                _, status = os.waitpid(pid, 0)
                asking.send(str(status).encode())
            os._exit(0)
        asking.close()
        for file in files:
            os.close(file)
    for held in (asking, listening):
        held.close()
    os.close(until_closed)
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    return eval(request)


def run(arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    """Does what Python does with its arguments, in this process."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if ray := sys.modules.get("ray"):
        ray._raylet.Config.initialize("")  # reads RAY_… again
    first, *rest = arguments
    folder = {"-c": "", "-m": cwd}.get(first, str(Path(first).resolve().parent))
    before = [str(Path(path).absolute()) for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:1] = [folder, *before]
    if Path(folder, "configs").is_dir() and Path(folder).resolve() != ROOT:
        for name in [name for name, module in sys.modules.items() if is_ours(module)]:
            del sys.modules[name]  # a copy of the repository has its own
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        text, *rest = rest
        code = compile(text, "<string>", "exec")
    elif first == "-m":
        name, *rest = rest
        spec = importlib.util.find_spec(name)
        if spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{name}.__main__")
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        first, code = spec.origin, spec.loader.get_code(spec.name)
    else:
        main.__file__, code = first, compile(Path(first).read_bytes(), first, "exec")
    sys.argv, sys.orig_argv = [first, *rest], [sys.executable, *arguments]
    exec(code, main.__dict__)


def is_ours(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None) or next(iter(vars(module).get("__path__", [])), "")  # of a plain folder
    return file.startswith(f"{ROOT}{os.sep}") and f"{os.sep}site-packages{os.sep}" not in file


def run_and_end(*call: Any) -> None:
    """Calls `run` and ends as Python does, but without taking modules apart, which takes 1.5 seconds in a fork."""
    status, interrupted = 0, False
    try:
        run(*call)
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if status == 1 and ending.code != 1:
            print(ending.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()  # of a command: ends it by the signal that did
    sys.stdout.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def run_elsewhere(address: str, arguments: list[str]) -> int:
    """Has `python arguments…` run as this process would; returns how it ended."""
    told = ask(address, arguments, os.getcwd(), dict(os.environ), files=[0, 1, 2])
    next_number(told)
    return os.waitstatus_to_exitcode(next_number(told)) % 256


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    if not first.isdigit():
        raise SystemExit(run_elsewhere(first, rest))
    from configs.extras import is_here  # not above: as a file, this one is run from elsewhere

    for module in filter(is_here, IMPORTED):
        import_module(module)
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert threads == 1, f"{threads} threads: a fork would have one of them, and locks of the others"
    call = next_run(socket.socket(fileno=int(first)), int(rest[0]))
    run_and_end(*call)
