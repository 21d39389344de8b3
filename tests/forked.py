"""Runs `python …` in a fork of a process that has the imports done: 5 CPU seconds a run are saved.

`python(...)` is for tests. The process that is forked is started by `python -m tests.forked` at the first call, one for
each process of pytest, and ends with it. A run is a process of its own in all but its start: it has its own arguments,
environment, working directory, output and exit status, by a signal too. Tests of the start itself (what is imported,
variables that are read when torch is loaded) use `subprocess`.
"""

import atexit
import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import types
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (  # what a run loads; Ray and vLLM, which start threads, are left to those that need them
    *("main", "training.preparation", "training.ray_trainer", "training.validation", "training.dry_run"),
    *("training.sft_trainer", "training.main_server", "training.main_generation", "training.main_eval"),
    *("workers.remote_roles", "workers.model_worker", "workers.hf.rollout", "workers.server.app"),
    *("custom.tiny_model", "custom.env_dataset", "custom.reward_manager"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}  # or a fork may hang
MOST = 1 << 20  # bytes of a request


def python(
    *arguments: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess:
    """Runs `python arguments…`, a file or -c or -m first, and returns its output and exit status.

    Raises:
        subprocess.CalledProcessError: with `check`, if it fails.
    """
    given = [*map(str, arguments)]
    request = repr((given, str(cwd), dict(os.environ if env is None else env))).encode()
    assert len(request) < MOST, f"{len(request)} bytes of arguments and environment: at most {MOST} are read"
    ours, theirs = socket.socketpair()
    with TemporaryFile() as out, TemporaryFile() as err, open(os.devnull) as nothing, ours:
        with theirs:
            files = [nothing.fileno(), out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(prepared_process(), [request], files)
        status = ours.recv(100)
        assert status, f"{shlex.join(given)} was not run: the process that is forked is gone"
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    done = subprocess.CompletedProcess([sys.executable, *given], os.waitstatus_to_exitcode(int(status)), *texts)
    if check:
        done.check_returncode()
    return done


@cache
def prepared_process() -> socket.socket:
    """Starts the process that is forked, which ends when this one does; returns the socket that takes its requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours


def next_run(requests: socket.socket) -> tuple[list[str], str, dict[str, str]]:
    """Returns in a fork, for each request; this process waits for the next."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, files, *_ = socket.recv_fds(requests, MOST, 4)
        if not request:
            sys.exit()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (pid := os.fork()) == 0:
                break
            _, status = os.waitpid(pid, 0)
            os.write(files[3], str(status).encode())
            os._exit(0)
        for file in files:
            os.close(file)
    requests.close()
    for place, file in enumerate(files):
        if place < 3:
            os.dup2(file, place)
        os.close(file)
    return eval(request)


def run(arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    """Does what Python does with its arguments, in this process."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
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
    sys.argv = [first, *rest]
    exec(code, main.__dict__)


def is_ours(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    return file.startswith(f"{ROOT}{os.sep}") and f"{os.sep}site-packages{os.sep}" not in file


def run_and_end(*call: Any) -> None:
    """`run`, and an end as Python's, without taking apart all that was imported, which takes 1.5 seconds in a fork."""
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


if __name__ == "__main__":
    for module in IMPORTED:
        import_module(module)
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    assert threads == 1, f"{threads} threads: a fork would have one of them, and locks of the others"
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        call = next_run(listening)
    run_and_end(*call)
