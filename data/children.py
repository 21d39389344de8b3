"""Processes of our own that serve a function of ours: how they are started, and how they and all they started end."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any


def start_child(module: str, function: str, descriptor: int, **options: Any) -> subprocess.Popen:
    """A process that calls `function(descriptor)` of `module`, with this one's sys.path; `options` are Popen's.

    A plain child: multiprocessing would run the user's main script in it once more.
    """
    program = f"import sys; sys.path[:] = {sys.path}; from {module} import {function}; {function}({descriptor})"
    return subprocess.Popen([sys.executable, "-u", "-c", program], pass_fds=[descriptor], **options)


def kill_group(process: subprocess.Popen) -> None:
    """Kills a process that was started with start_new_session, and all that it started and left in its group.

    Once it was waited for, its number may be another's, and nothing is done.
    """
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
