"""The program of a process that scores: it loads the user's function once, and calls it for what the parent sends.

It loads nothing but what that function needs, so that it starts fast. The parent (extras/scorers/pool.py) keeps the
clock, and kills. What comes back to it is JSON, and never pickled: a function may run what a policy wrote.
"""

import asyncio
import ctypes
import inspect
import json
import pickle
import random
import socket
import sys
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from configs.errors import users_line
from configs.import_utils import load_extern_object
from data.concurrency import run
from extras.processes.child import Channel, frame, read_frame

PR_SET_DUMPABLE = 4
MAX_MESSAGE = 4000  # characters of an exception and its traceback


@dataclass(frozen=True)
class ScorerSpec:
    """Names the function that a scorer process calls, its kwargs, and its limits: MiB beyond what loading the file
    took, and seconds after which an async call is cancelled (None: any)."""

    path: str
    name: str
    reward_kwargs: dict[str, Any]
    memory_mb: int | None
    soft_seconds: float | None


def serve(channel: Channel) -> None:
    """Answers calls until the parent is gone: pickled arguments in, [outcome, value] as JSON out."""
    first, body = channel.read()
    spec: ScorerSpec = pickle.loads(body)
    try:
        function = load_extern_object(spec.path, spec.name)
    except BaseException as error:  # said to the parent, which ends the run
        channel.write(first, encode("error", format_exception(error)))
        return
    limit_memory(spec.memory_mb)
    hide_memory()
    channel.write(first, encode("ok", None))
    if is_async(function):
        run(serve_side_by_side(function, spec, channel.socket))
        return
    while (call := channel.read()) is not None:
        number, body = call
        try:
            arguments = pickle.loads(body)
            seed_generators(arguments)
            outcome, value = "ok", function(**arguments | spec.reward_kwargs)
            if inspect.isawaitable(value):  # of a plain function
                value = asyncio.run(wait(value))
        except BaseException as error:  # SystemExit too: the row is counted, and the process lives on
            outcome, value = "error", format_exception(error)
        channel.write(number, encode(outcome, value))


async def serve_side_by_side(function: Callable, spec: ScorerSpec, connection: socket.socket) -> None:
    """Answers calls of an async function, which run in one event loop, until the parent is gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    under_way: set[asyncio.Task] = set()

    async def score(number: int, body: bytes) -> None:
        try:
            arguments = pickle.loads(body)
            async with asyncio.timeout(spec.soft_seconds) as deadline:
                outcome, value = "ok", await function(**arguments | spec.reward_kwargs)
        except BaseException as error:  # as above
            expired = isinstance(error, TimeoutError) and deadline.expired()
            outcome, value = ("timeout", None) if expired else ("error", format_exception(error))
        writer.write(frame(number, encode(outcome, value)))

    with suppress(asyncio.IncompleteReadError):
        while True:
            task = asyncio.create_task(score(*await read_frame(reader)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)


def is_async(function: Callable) -> bool:
    """Says whether `function` is an `async def`, so that many calls go on in one process."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


async def wait(result: Any) -> Any:
    return await result


def seed_generators(arguments: dict[str, Any]) -> None:
    """Seeds the global generators by the texts that are scored: equal runs are equal, whichever process has a row."""
    values = [arguments[name] for name in sorted(arguments)]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    seed = zlib.crc32("\0".join(part for part in parts if isinstance(part, str)).encode("utf-8", "replace"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def limit_memory(memory_mb: int | None) -> None:
    """Lets this process, and each that it starts, take so much more private memory than it has now. Reserved addresses,
    as of threads and CUDA, and mapped files do not count."""
    if memory_mb is None or sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        has = int(file.read().split()[5]) * resource.getpagesize()
    limit = has + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def hide_memory() -> None:
    """Keeps this process's environment and memory from other processes of this user, such as a scored program."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def encode(outcome: str, value: Any) -> bytes:
    """Returns the body of an answer; a value that JSON cannot hold is an error of the call."""
    try:
        return json.dumps([outcome, value], default=to_plain).encode()
    except (TypeError, ValueError) as error:
        return json.dumps(["error", format_exception(error)]).encode()


def to_plain(value: Any) -> Any:
    """Returns the numbers and lists of an array, a tensor or a number of numpy's."""
    try:
        return value.tolist()
    except AttributeError:
        raise TypeError(f"it returned {value!r:.200}: a score is a number, or a dict with 'score'") from None


def format_exception(error: BaseException) -> dict[str, Any]:
    """Returns the message, the user's line and the traceback of an exception."""
    trace = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
    return {"message": message, "line": users_line(error), "trace": trace[-MAX_MESSAGE:]}
