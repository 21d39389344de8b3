"""A sandbox for Python that a policy writes: a process of its own, with limits and without a network.

Where the system lets users make namespaces (most Linux machines; many containers do not), the program has no network,
sees no process of others to signal, and finds every file read-only but those of a folder of its own, in memory, which
goes with it; whatever it started goes with it too. In any case limits hold its time, memory, processes, files and
output, and a hook refuses sockets, processes, and changes outside its folder: without namespaces that is a fence
against mistakes and greed, not against an attacker. It reads what this user can read. `run_python` is the door; open
child.py to change a fence.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO

from training.sandbox import child

START_SECONDS = 60.0  # for Python and the fences
GRACE_SECONDS = 1  # of computing, beyond the time on the clock


@dataclass(frozen=True)
class Finished:
    """The end of a program.

    `status`: its exit status; below 0, the signal that ended it; None: it took too long. `output`, `errors`: all
    that it wrote until then.
    """

    status: int | None
    output: str
    errors: str

    @property
    def is_no_program(self) -> bool:
        return self.status == child.COMPILE_ERROR


def run_python(
    code: str, stdin: str = "", *, seconds: float = 5.0, memory_mb: int = 512, files_mb: int = 1
) -> Finished:
    """Runs the program `code` in a process of its own, for at most `seconds` on the clock from its first line on.

    When this returns, the process and all it started is gone, and so is its folder. `files_mb` MiB are what it may
    write to files, and as output.
    """
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True))
        program, given, output, errors = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(4))
        for file, text in ((program, code), (given, stdin)):
            file.write(text.encode("utf-8", "replace"))
            file.seek(0)
        started, ready = os.pipe()
        opened.callback(os.close, started)
        limits = (int(seconds) + GRACE_SECONDS, memory_mb, files_mb)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", child.__file__, *map(str, (program.fileno(), ready, *limits))],
            **{"stdin": given, "stdout": output, "stderr": errors},
            pass_fds=[program.fileno(), ready],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a group of its own, to be killed as one
        )
        os.close(ready)
        try:
            select.select([started], [], [], START_SECONDS)  # until it closes its end: the program begins
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Finished(status, read_back(output), read_back(errors))


def read_back(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
