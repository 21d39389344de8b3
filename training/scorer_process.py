"""The life of a process that scores: the user's function is loaded once, and called for what the parent sends.

It loads nothing but what that function needs, so that it starts fast. The parent (training/scorers.py) keeps the clock,
and kills. What comes back to it is JSON, and never pickled: a function may run what a policy wrote.
"""

import inspect
import json
import os
import pickle
import random
import signal
import struct
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from configs.errors import users_line
from data.import_utils import load_extern_object

MOST_SAID = 4000  # characters of an exception and its traceback
HEAD = struct.Struct("<qQ")  # of a frame: its number, and the bytes of its body
READY = -1  # the number of the answer that says that the function is loaded
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Errand:
    """What a scorer process is for: the function of a file, and its limits.

    `memory_mb`: that it may take beyond what loading the file took. `soft_seconds`: after which an async call is
    cancelled; null: any.
    """

    path: str
    name: str
    reward_kwargs: dict[str, Any]
    memory_mb: int | None
    soft_seconds: float | None


def serve(descriptor: int) -> None:
    """Answers calls until the parent is gone: pickled arguments in, [outcome, value] as JSON out."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the parent, whatever it is stuck in
    os.set_inheritable(descriptor, False)
    channel = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  (as long as the process lives)
    _, body = read_frame(channel)
    errand: Errand = pickle.loads(body)
    try:
        function = load_extern_object(errand.path, errand.name)
    except BaseException as error:  # said to the parent, which ends the run
        write_all(channel, answer(READY, "error", told(error)))
        return
    limit_memory(errand.memory_mb)
    write_all(channel, answer(READY, "ok", None))
    if is_async(function):
        import asyncio

        asyncio.run(serve_side_by_side(function, errand, descriptor))
        return
    while (call := read_frame(channel)) is not None:
        number, body = call
        try:
            arguments = pickle.loads(body)
            seed_generators(arguments)
            outcome, value = "ok", finished(function(**arguments | errand.reward_kwargs))
        except BaseException as error:  # SystemExit too: the row is counted, and the process lives on
            outcome, value = "error", told(error)
        write_all(channel, answer(number, outcome, value))


async def serve_side_by_side(function: Callable, errand: Errand, descriptor: int) -> None:
    """`serve` for an async function: its calls run in one event loop."""
    import asyncio
    import socket

    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    under_way: set[asyncio.Task] = set()

    async def score(number: int, body: bytes) -> None:
        try:
            arguments = pickle.loads(body)
            async with asyncio.timeout(errand.soft_seconds) as deadline:
                outcome, value = "ok", await function(**arguments | errand.reward_kwargs)
        except BaseException as error:  # as above
            expired = isinstance(error, TimeoutError) and deadline.expired()
            outcome, value = ("timeout", None) if expired else ("error", told(error))
        writer.write(answer(number, outcome, value))

    try:
        while True:
            number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
            task = asyncio.create_task(score(number, await reader.readexactly(size)))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    except asyncio.IncompleteReadError:
        return


def is_async(function: Callable) -> bool:
    """Whether `function` is an `async def`, so that many calls go on in one process."""
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def finished(result: Any) -> Any:
    """`result`, awaited if a plain function returned something to await."""
    if not inspect.isawaitable(result):
        return result
    import asyncio

    async def wait() -> Any:
        return await result

    return asyncio.run(wait())


def seed_generators(arguments: dict[str, Any]) -> None:
    """Seeds the global generators that the function may draw from by the texts that it scores: equal runs are equal,
    whichever process a row comes to."""
    texts = [part for name in sorted(arguments) for part in texts_of(arguments[name])]
    seed = zlib.crc32("\0".join(texts).encode("utf-8", "replace"))
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def texts_of(value: Any) -> list[str]:
    return [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str)]


def limit_memory(memory_mb: int | None) -> None:
    """Lets this process, and each that it starts, take so much more address space than it has now."""
    if memory_mb is None or sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    limit = has + (memory_mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def frame(number: int, body: bytes) -> bytes:
    return HEAD.pack(number, len(body)) + body


def read_frame(channel: BinaryIO) -> tuple[int, bytes] | None:
    """The next frame, as its number and body; None: there is none any more."""
    head = read_all(channel, HEAD.size)
    if len(head) < HEAD.size:
        return None
    number, size = HEAD.unpack(head)
    return number, read_all(channel, size)


def read_all(channel: BinaryIO, size: int) -> bytes:
    pieces = bytearray()
    while len(pieces) < size and (piece := channel.read(size - len(pieces))):
        pieces += piece
    return bytes(pieces)


def write_all(channel: BinaryIO, data: bytes) -> None:
    while data:
        data = data[channel.write(data) :]


def answer(number: int, outcome: str, value: Any) -> bytes:
    """The frame of an answer; a value that JSON cannot hold is an error of the call."""
    try:
        body = json.dumps([outcome, value], default=plain)
    except (TypeError, ValueError) as error:
        body = json.dumps(["error", told(error)])
    return frame(number, body.encode())


def plain(value: Any) -> Any:
    """Numbers and lists of an array, a tensor or a number of numpy's."""
    try:
        return value.tolist()
    except AttributeError:
        raise TypeError(
            f"it returned {value!r:.200}: a score is a number, or a dict of 'score' and numbers, texts and lists"
        ) from None


def told(error: BaseException) -> dict[str, Any]:
    """An exception as the parent tells it: one line, the user's line, the traceback."""
    trace = "".join(traceback.format_exception(error))
    return {
        "said": f"{type(error).__name__}: {error}"[:MOST_SAID],
        "place": users_line(error),
        "trace": trace[-MOST_SAID:],
    }
