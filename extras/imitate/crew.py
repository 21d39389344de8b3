"""Makes what resets give in several processes: the same rows in the same order, whatever their number."""

import asyncio
import pickle
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from configs.process import worker_threads
from configs.schema import Config
from data.concurrency import loop_in_thread
from data.types import Row
from extras.imitate.demonstrations import Demonstrations, demonstrations_of
from extras.processes.child import Channel, Child, ProcessEnded

MOST = 4  # processes
PATIENCE = 2.0  # seconds of work after which helpers are started, as that takes them longer
PART = 8  # resets that a process works on at a time
AHEAD = 2  # parts that a helper has, so that it need not wait for the next


def helpers_of(config: Config, *which: Any) -> list[Child]:
    """Returns processes that make the same demonstrations as `demonstrations_of(config, *which)`; none where there is
    one core, or where the settings cannot be sent to a process."""
    try:
        first = pickle.dumps((config, *which))
    except (pickle.PicklingError, TypeError, AttributeError):
        return []
    processes = min(worker_threads(config.trainer.n_threads).number, MOST)
    return [Child(serve, lambda: first, output=subprocess.DEVNULL) for _ in range(processes - 1)]


def serve(channel: Channel) -> None:
    """Makes the rows of a part at each call, until the parent is gone; what fails here ends the process."""
    first, body = channel.read()
    make = partial(rows_of_part, demonstrations_of(*pickle.loads(body)))
    channel.write(first, b"")
    while (call := channel.read()) is not None:
        number, body = call
        channel.write(number, pickle.dumps(make(pickle.loads(body))))


def rows_of_part(demonstrations: Demonstrations, part: int) -> list[list[Row]]:
    return [demonstrations.rows_of(index) for index in range(part * PART, (part + 1) * PART)]


def make_rows(demonstrations: Demonstrations, helpers: list[Child]) -> Iterator[list[Row]]:
    """Yields the rows of each reset, without end; this process makes whatever the helpers have not made yet.

    A helper that fails is done without: what it was to make fails here, or does not.
    """
    parts, made, lost = count(), {}, deque()

    async def have_made(helper: Child) -> None:
        await asyncio.sleep(PATIENCE)
        with suppress(ProcessEnded, TimeoutError):
            await helper.start()
            while True:
                part = next(parts)
                try:
                    made[part] = pickle.loads(await helper.ask(pickle.dumps(part), None))
                except ProcessEnded:
                    return lost.append(part)

    try:
        with loop_in_thread() as loop:
            for helper in helpers * AHEAD:
                asyncio.run_coroutine_threadsafe(have_made(helper), loop)
            for wanted in count():
                while wanted not in made:
                    part = lost.popleft() if lost else next(parts)
                    made[part] = rows_of_part(demonstrations, part)
                yield from made.pop(wanted)
    finally:
        for helper in helpers:
            helper.end()
