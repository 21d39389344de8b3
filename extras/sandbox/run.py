"""A sandbox for Python that a policy writes: a process of its own, with limits and fences that the kernel keeps.

Limits of time, memory, threads, files and output hold everywhere. Fences depend on the system: namespaces (no network,
no process of others, nothing to write to but a folder in memory), no rights of root, Landlock (nothing to write to but
that folder, nothing to read but Python and the system's libraries, no signals), and a filter of system calls (no
processes, sockets, signals, mounts). With the filter, and namespaces or Landlock, the sandbox is closed. Otherwise no
program is run, unless the caller asks for it: then a hook refuses only mistakes. `run_python` is the entry point;
child.py sets the fences.
"""

import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from configs.errors import ConfigError
from extras.sandbox import child

START_SECONDS = 60.0  # for Python and the fences
OF_THE_SHELL = ("PATH", "HOME", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_")  # variables
OF_CLIENTS = ("/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf", "/etc/pki/tls", "/etc/hosts")  # to read
GRACE_SECONDS = 1  # of computing, for Python's own start


@dataclass(frozen=True)
class Finished:
    """The end of a program: its exit status (below 0: a signal's; None: it took too long), its output and errors, and
    the fences that held it."""

    status: int | None
    output: str
    errors: str
    fences: tuple[str, ...] = ()


def run_python(
    code: str,
    stdin: str = "",
    *,
    then: Sequence[str] = (),
    seconds: float = 5.0,
    cpu_seconds: float | None = None,
    memory_mb: int = 512,
    files_mb: int = 1,
    readable: Sequence[str | Path] = (),
    processes: bool = False,
    anyway: bool = False,
) -> Finished:
    """Runs the program `code` in a process of its own, for at most `seconds` on the clock from its first line on.
    When this returns, the process and all it started is gone, and so is its folder.

    Args:
        then: programs that run after it in its module; each is read when those before it have ended.
        cpu_seconds: of computing, rounded up; None: `seconds`.
        files_mb: MiB that it may write to files, and as output.
        readable: files and folders that it may read, beside Python and the system's libraries.
        processes: whether it may start other programs, as a shell does; the same fences hold them.
        anyway: whether it runs where the fences of this system leave the sandbox open: else that is a ConfigError.
    """
    with ExitStack() as opened:
        folder = opened.enter_context(own_folder())
        texts = [text.encode("utf-8", "replace") for text in (code, *then)]
        sources, input_file, output, errors = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        fill(sources, b"".join(texts))
        fill(input_file, stdin.encode("utf-8", "replace"))
        started, ready = os.pipe()
        opened.callback(os.close, started)
        cpu_seconds = math.ceil(seconds if cpu_seconds is None else cpu_seconds) + GRACE_SECONDS
        limits = (cpu_seconds, memory_mb, files_mb, int(processes), int(anyway))
        process = subprocess.Popen(
            words_of_child(readable, ready, *limits, 0, sources.fileno(), *map(len, texts)),
            **{"stdin": input_file, "stdout": output, "stderr": errors},
            pass_fds=[sources.fileno(), ready],
            **surroundings(folder),
        )
        os.close(ready)
        fences, status = wait_for_end(process, started, seconds)
        if not fences:
            raise RuntimeError(f"the sandbox did not start, status {process.returncode}: {read_back(errors)[-1000:]}")
        if fences[0] == child.OPEN and not anyway:
            raise ConfigError(f"{lacking(fences[1:])} The program was not run: run_python(…, anyway=True) runs it.")
        return Finished(status, read_back(output), read_back(errors), fences[1:])


def words_of_child(readable: Sequence[str | Path], *more: object) -> list[str]:
    return [sys.executable, "-I", "-B", child.__file__, os.pathsep.join(map(str, readable)), *map(str, more)]


def surroundings(folder: str) -> dict[str, Any]:
    """Returns the arguments that start a process in `folder`, without your variables, and in a group of its own, to be
    killed as one."""
    variables = {"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    return {"cwd": folder, "env": variables, "start_new_session": True}


class FencedCommand:
    """A command for the sandbox, where the network is only the port of one server.

    Its working directory is this process's, which it may read, and it writes to HOME and TMPDIR, a folder in memory.

    Attributes:
        words, arguments: with these, subprocess.Popen starts it.
    """

    MEMORY_MB, FILES_MB, CPU_SECONDS = 8192, 256, 1 << 30

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], port: int) -> None:
        self.folder = tempfile.mkdtemp(prefix="sandbox-")
        self.channel, ready = socket.socketpair()
        self.ready, path = ready, os.pathsep.join((os.path.dirname(sys.executable), os.defpath))
        limits = ready.fileno(), self.CPU_SECONDS, self.MEMORY_MB, self.FILES_MB, 1, 0, port
        self.words = words_of_child(readable_by(words, path), *limits, os.getcwd(), *words)
        self.arguments = surroundings(self.folder) | {"pass_fds": [ready.fileno()]}
        temporary = dict.fromkeys(("TEMP", "TMP"), self.folder)  # libc takes TMPDIR from what runs by `count_alone`
        self.arguments["env"] |= {"PATH": path, **temporary, **variables}

    def listener(self) -> socket.socket:
        """Waits until the command begins; returns the socket at which to serve it.

        Raises:
            RuntimeError: it did not begin, as this system lacks a fence.
        """
        self.ready.close()
        self.channel.settimeout(START_SECONDS)
        with self.channel:
            word, descriptors, *_ = socket.recv_fds(self.channel, 1000, 1)
        if not descriptors:
            raise RuntimeError(f"it was not run in the sandbox: {lacking(word.decode().split(', ')[1:])}")
        return socket.socket(fileno=descriptors[0])

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def readable_by(words: Sequence[str], path: str) -> list[str]:
    """Lists the paths that a command may read beside Python and the system's libraries: its own installation, the files
    that it names, and the working directory."""
    program = Path(shutil.which(words[0], path=path) or words[0]).absolute()
    homes = [file.parent.parent if file.parent.name == "bin" else file for file in (program, program.resolve())]
    return [*map(str, homes), *filter(os.path.exists, words[1:]), *OF_CLIENTS, os.getcwd()]


class Call(NamedTuple):
    """A command that a script gave, and the variables that it had exported until then."""

    words: list[str]
    variables: dict[str, str]


def run_shell(
    text: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    cwd: Path,
    *,
    readable: Sequence[Path],
    seconds: float,
) -> tuple[list[Call], Finished]:
    """Runs a shell script in the sandbox, where commands only record how they are called: none of them is run.

    `words` are its name and arguments. It finds what is in `cwd` and in the user's home, and may write beside it.
    """
    environment = {name: value for name, value in variables.items() if not name.startswith(("BASH", "LD_"))}
    folders = {kind: (str(path), sorted(os.listdir(path))) for kind, path in (("cwd", cwd), ("home", Path.home()))}
    program, *scripts = (Path(__file__).with_name(name).read_text() for name in ("shell.py", "stand.sh", "prelude.sh"))
    done = run_python(
        program,
        json.dumps([text, words, environment, folders, *scripts]),
        seconds=seconds,
        files_mb=8,
        readable=readable,
        processes=True,
    )
    output, errors, folder = done.output, done.errors, done.output.split("\0", 2)[1]
    for kind, (path, _) in folders.items():
        output, errors = (stream.replace(f"{folder}/{kind}", path) for stream in (output, errors))
    return list(calls_in(output.split("\0")[3:-1], environment)), replace(done, output="", errors=errors)


def calls_in(fields: list[str], environment: Mapping[str, str]) -> Iterator[Call]:
    """Yields the calls of shell.py's records, with the variables that differ from `environment`."""
    while fields:
        middle = 1 + int(fields[0])
        end = middle + 1 + int(fields[middle])
        variables = dict(pair.partition("=")[::2] for pair in fields[middle + 1 : end])
        new = {name: value for name, value in variables.items() if environment.get(name) != value}
        shell_names = (*OF_THE_SHELL, *(name for name in new if name.startswith("BASH")))
        yield Call(fields[1:middle], {name: value for name, value in new.items() if name not in shell_names})
        fields = fields[end:]


def wait_for_end(process: subprocess.Popen, started: int, seconds: float) -> tuple[tuple[str, ...], int | None]:
    """Waits for a process, and ends it with its group; returns what it sent through the pipe `started`, and its status,
    None if it took too long."""
    try:
        fences = read_fences(started)  # the program begins
        status = process.wait(seconds) if fences else None
    except subprocess.TimeoutExpired:
        status = None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return fences, None if status == -signal.SIGKILL else status  # the kernel's, at the end of its computing


@contextmanager
def own_folder() -> Iterator[str]:
    """Makes a folder, and removes it afterwards, however deep a program has nested others in it."""
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except RecursionError:
            subprocess.run(["rm", "-rf", folder], check=False)


def read_fences(started: int) -> tuple[str, ...]:
    """Waits for the first word of a process, which is followed by the fences that it has set; (): it sends none."""
    waiting = select.poll()
    waiting.register(started, select.POLLIN)
    waiting.poll(START_SECONDS * 1000)
    os.set_blocking(started, False)
    with suppress(BlockingIOError):
        return tuple(filter(None, os.read(started, 1000).decode().split(", ")))
    return ()


def fill(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.seek(0)


def read_back(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


@cache
def fences() -> tuple[str, ...]:
    """Returns the names of the fences that hold on this machine, for this user."""
    return run_python("", seconds=START_SECONDS, anyway=True).fences


def check_fences(sandbox: str = "closed", key: str = "reward.sandbox") -> str:
    """Returns a line that says which fences hold.

    Raises:
        ConfigError: they are fewer than `sandbox`, the value of `key`, requires.
    """
    present, problem = fences(), lacking(fences())
    if child.is_closed(present):
        if sandbox != "required" or child.LANDLOCK in present:
            return f"programs of the policy run in a sandbox: {', '.join(present)}."
        problem = f"this machine has no {child.LANDLOCK} (Linux 5.13), without which programs can read your files."
    if sandbox == "open":
        return problem
    raise ConfigError(f"{key}={sandbox}: {problem} Run it there; {key}=open says that you know.", key)


def check_command_fences(key: str) -> None:
    """Raises ConfigError, which names `key`, if this system cannot fence a FencedCommand."""
    if not {child.NAMESPACES, child.SECCOMP} <= {*fences()}:
        raise ConfigError(f"{key}=true: {lacking(fences())} A command takes {child.NAMESPACES}.", key)


def lacking(present: Sequence[str]) -> str:
    return (
        f"the sandbox is open: on this machine programs are held by {', '.join(present) or 'no fence'}, and it takes "
        f"{child.SECCOMP} with {child.LANDLOCK} (Linux 5.13) or {child.NAMESPACES} (`unshare -rn true`)."
    )
