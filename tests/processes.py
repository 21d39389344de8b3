"""Says what has become of processes that a test started."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 180  # seconds


def until(condition: Callable[[], object]) -> None:
    """Waits until the condition holds; fails where it does not in a long time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def is_alive(pid: int) -> bool:
    """Says whether it runs: a zombie that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
