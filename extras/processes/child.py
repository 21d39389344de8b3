"""Processes that answer requests and can be killed, with all that they started; `Child` is the door."""

import asyncio
import ctypes
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress

START_SECONDS = 300.0  # for a process to load what it serves
POLL_SECONDS = 0.005  # between two checks whether a killed process is gone
MAX_BODY = 1 << 28  # bytes of a request or an answer
MAX_PRINTED = 2000  # bytes that a request may print; more is read and dropped
HEAD = struct.Struct("<qQ")  # of a frame: its number, and the bytes of its body
PR_SET_PDEATHSIG = 1


class ProcessEnded(Exception):
    """A child process ended before it answered; `aside`: it was killed because of another request."""

    def __init__(self, text: str, aside: bool) -> None:
        super().__init__(text)
        self.aside = aside


class Child:
    """Answers requests in a process, which is started when needed, and again after it has ended.

    It ends with this process or this object, and so does everything that it started. The methods belong to one event
    loop; code that is not asynchronous calls them by `run_in_background`.

    Args:
        serve: called with a `Channel` in the process; answers the first request when it is ready for others.
        first: makes the first request.
        output: as Popen's stdout; of PIPE, MAX_PRINTED bytes a request are passed on.
    """

    def __init__(
        self, serve: Callable[["Channel"], None], first: Callable[[], bytes], output: int | None = None
    ) -> None:
        self.serve, self.first, self.output = serve, first, output
        self.processes: list[ChildProcess] = []  # the newest, and older ones that have not quite ended
        self.starting, self.starts = asyncio.Lock(), 0
        weakref.finalize(self, end_all, self.processes)

    def is_running(self) -> bool:
        return bool(self.processes) and self.processes[-1].is_alive()

    async def start(self) -> bytes | None:
        """Starts the process; returns its answer to the first request, or None if it runs already.

        Raises TimeoutError and ProcessEnded as `ask` does, after START_SECONDS.
        """
        async with self.starting:
            if self.is_running():
                return None
            body, (parent_end, child_end) = self.first(), socket.socketpair()
            with child_end:
                process = start_process(self.serve, child_end.fileno(), self.output)
            started = ChildProcess(process, *await asyncio.open_connection(sock=parent_end))
            self.processes[:] = [*(old for old in self.processes if not old.is_over()), started]
            self.starts += 1
            return await self.ask(body, START_SECONDS)

    async def ask(self, body: bytes, seconds: float | None) -> bytes:
        """Returns the answer of the newest process to `body`.

        Raises:
            TimeoutError: it did not answer within `seconds` (None: no limit), and was killed.
            ProcessEnded: it ended before that.
        """
        process = self.processes[-1]
        try:
            async with asyncio.timeout(seconds):
                return await process.ask(body)
        except (TimeoutError, asyncio.CancelledError):
            process.kill()
            raise

    def cpu_seconds(self) -> float:
        """Returns the seconds that the process has computed, with those it started that have ended; 0 outside Linux."""
        with suppress(OSError, IndexError), open(f"/proc/{self.processes[-1].process.pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def end(self) -> None:
        """Kills the process, and waits until it is gone."""
        end_all(self.processes)


def end_all(processes: "list[ChildProcess]") -> None:
    for process in processes:
        process.kill()
        process.process.wait()


def start_process(serve: Callable[["Channel"], None], descriptor: int, output: int | None) -> subprocess.Popen:
    """Starts a plain child with this process's sys.path: multiprocessing would run the user's main script again."""
    program = (
        f"import sys; sys.path[:] = {sys.path}; from extras.processes.child import Channel; "
        f"from {serve.__module__} import {serve.__name__}; {serve.__name__}(Channel({descriptor}))"
    )
    return subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        **{"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output and subprocess.STDOUT},
        pass_fds=[descriptor],
        start_new_session=True,  # a group of its own, to be killed as one
    )


class ChildProcess:
    """One process of a `Child`, from its start to its end."""

    def __init__(self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process, self.writer, self.owner = process, writer, os.getpid()
        self.answers: dict[int, asyncio.Future[bytes]] = {}
        self.numbers, self.may_print, self.killed = itertools.count(), MAX_PRINTED, False
        self.listening = asyncio.create_task(self._listen(reader))
        self.printing = asyncio.create_task(self._print())

    async def ask(self, body: bytes) -> bytes:
        """Returns the answer to `body`. Raises ProcessEnded if there is none."""
        number, answer = next(self.numbers), asyncio.get_running_loop().create_future()
        self.answers[number], self.may_print = answer, MAX_PRINTED
        self.writer.write(frame(number, body))
        try:
            await asyncio.wait([answer, self.listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self.answers[number]
        if not answer.done():
            raise self.listening.result()
        return answer.result()

    def is_alive(self) -> bool:
        return not self.killed and self.owner == os.getpid()  # a fork of this process starts its own

    def is_over(self) -> bool:
        return self.listening.done() and self.printing.done()

    def kill(self) -> None:
        """Kills the process and all that it started and left in its group."""
        self.killed = True
        if self.process.returncode is None and self.owner == os.getpid():  # else its number may be another's
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _listen(self, reader: asyncio.StreamReader) -> ProcessEnded:
        """Hands out the answers until there are no more, ends the process, and returns how it ended."""
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    number, body = await read_frame(reader)
                    if number in self.answers and not self.answers[number].done():
                        self.answers[number].set_result(body)
        finally:
            aside = self.killed
            self.kill()
            self.writer.close()
        while (code := self.process.poll()) is None:
            await asyncio.sleep(POLL_SECONDS)
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return ProcessEnded(f"its process ended {how}", aside)

    async def _print(self) -> None:
        """Passes on the process's output up to MAX_PRINTED, and reads all of it, so that no full pipe blocks it."""
        if self.process.stdout is None:
            return
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self.process.stdout)
        try:
            while piece := await reader.read(1 << 16):
                shown, self.may_print = piece[: self.may_print], max(0, self.may_print - len(piece))
                sys.stdout.write(shown.decode("utf-8", "replace"))
        finally:
            pipe.close()


def frame(number: int, body: bytes) -> bytes:
    return HEAD.pack(number, len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Returns the number and the body of the next frame; raises IncompleteReadError after the last, and ConnectionError
    for one larger than MAX_BODY, which is not ours."""
    number, size = HEAD.unpack(await reader.readexactly(HEAD.size))
    if size > MAX_BODY:
        raise ConnectionError(f"a frame of {size} bytes")
    return number, await reader.readexactly(size)


class Channel:
    """A child process's end of the connection to its parent. The process ends with the parent, whatever it does."""

    def __init__(self, descriptor: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.set_inheritable(descriptor, False)
        self.socket = socket.socket(fileno=descriptor)
        self.file = self.socket.makefile("rb")

    def read(self) -> tuple[int, bytes] | None:
        """Returns the number and the body of the next request; None after the last."""
        head = self.file.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        number, size = HEAD.unpack(head)
        return number, self.file.read(size)

    def write(self, number: int, body: bytes) -> None:
        """Answers the request of this number."""
        self.socket.sendall(frame(number, body))
