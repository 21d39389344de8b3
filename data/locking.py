"""One run a folder: a lock that the kernel takes back however its process ends."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from configs.errors import ConfigError
from configs.loader import notice

LOCK_FILE = "run.lock"


@contextmanager
def sole_run(folder: str | Path) -> Iterator[None]:
    """Keeps other runs out of `folder`, which is made. Its run.lock names the process that has it, or had it last.

    Raises:
        ConfigError: another run has it; names that run's process and host.
    """
    path = Path(folder) / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "it has not said yet which"
            raise ConfigError(
                f"trainer.default_local_dir={folder} belongs to another run, which goes on: {holder}. Wait for it, "
                "stop it, or name another folder (trainer.default_local_dir, or trainer.experiment_name)."
            ) from error
        except OSError as error:
            notice(f"{folder} is on a file system without locks ({error.strerror}): let no other run use it.")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
