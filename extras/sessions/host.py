"""Serves the sessions of this process, and runs programs that end with it.

One server in a thread, at a free port of 127.0.0.1, has a session for each episode under way: /s/ID/v1 is its base_url.
The ID cannot be guessed, and is the key. A process beside it kills what a program has left behind when it has ended,
and all of them when this one dies.
"""

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from pydantic import BaseModel

from data.concurrency import start_loop
from data.types import check_reward
from extras.sandbox.run import FencedCommand
from extras.server.app import bare_app
from extras.server.bodies import ChatBody, CompletionBody, Json
from extras.server.dialects import model_card, serve_dialects
from extras.server.gate import Gate, server_config
from extras.sessions.session import Session

MOST_BYTES = 64 << 20  # of a body, which may hold a long history with images; of a session, of four at once
KEPT = 1 << 16  # bytes of the end of what a program writes
LOOK_SECONDS = 0.02  # between two checks whether a program has ended
READ_SECONDS = 1  # to read its last output then
WARDEN = r"""
import os, signal
from contextlib import suppress
from glob import iglob
from itertools import chain
def end(marks):
    looks = [iglob("/proc/[0-9]*/environ") for _ in "12" if marks]  # the first may meet one that forks
    for file in chain(*looks):
        with suppress(OSError), open(file, "rb") as variables:
            if not marks.isdisjoint(variables.read().split(b"\0")):
                os.kill(int(file.split("/")[2]), signal.SIGKILL)
programs, rest = set(), b""
while piece := os.read(0, 1 << 16):
    *lines, rest = (rest + piece).split(b"\n")
    words = [line.split() for line in lines]
    for sign, *program in words:
        (programs.add if sign == b"+" else programs.discard)(tuple(program))
    end({mark for sign, _, mark in words if sign == b"-"})
for group, _ in programs:
    with suppress(OSError):
        os.killpg(int(group), signal.SIGKILL)
end({mark for _, mark in programs})
"""


@cache
def host_of(process: int) -> "Host":
    """Returns the server of this process, which is `process`: a fork has its own."""
    return Host()


class Host:
    """The server of a process, and the event loop in which it and programs are run."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.loop, _ = start_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listener.getsockname()[1]
        self.app = server_config(build_app(self.sessions), log_config=None, log_level="error", lifespan="off")
        asyncio.run_coroutine_threadsafe(uvicorn.Server(self.app).serve([listener]), self.loop)
        warden = subprocess.Popen([sys.executable, "-IS", "-c", WARDEN], stdin=subprocess.PIPE, start_new_session=True)
        self.warden = warden.stdin

    @contextmanager
    def open(self, session: Session) -> Iterator[Json]:
        """Serves a session until the end of the block; yields the program's description of it."""
        key = secrets.token_urlsafe(16)
        self.sessions[key], base = session, f"http://127.0.0.1:{self.port}/s/{key}"
        try:
            yield {"base_url": f"{base}/v1", "api_key": key, "reward_url": f"{base}/reward"}
        finally:
            del self.sessions[key]
            session.over.set_result(None)

    def watch(self, sign: str, group: int, mark: str) -> None:
        """Tells the warden that a program, whose children have the variable `mark`, begins ("+") or has ended ("-")."""
        with suppress(OSError):  # at the end of this process
            self.warden.write(f"{sign} {group} {mark}\n".encode())
            self.warden.flush()


class RewardBody(BaseModel):
    """POST /s/ID/reward; null: the run's reward scores the last row."""

    reward: float | None


def build_app(sessions: dict[str, Session]) -> FastAPI:
    """Returns the API of all sessions as an ASGI application."""
    app = bare_app()

    def session_of(key: str) -> Session:
        if key not in sessions:
            raise HTTPException(404, f"there is no session {key}: its episode is over, or never was")
        return sessions[key]

    def session_at(path: str, _: object) -> Session:
        return session_of(path.removeprefix("/s/").partition("/")[0] or path)

    app.add_middleware(Gate, check=session_at, most=MOST_BYTES, most_held=4 * MOST_BYTES)

    @app.get("/s/{key}/v1/models")
    async def models(key: str) -> Json:
        session = session_of(key)
        return {"object": "list", "data": [model_card("policy", session.speech.width + session.limits.response)]}

    @app.get("/s/{key}/v1/models/{name:path}")
    async def model(key: str, name: str) -> Json:
        session = session_of(key)
        return model_card(name, session.speech.width + session.limits.response)

    @app.post("/s/{key}/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await session_of(request.path_params["key"]).respond(body, request)

    @app.post("/s/{key}/v1/completions")
    async def completions(key: str, body: CompletionBody, request: Request) -> Response:
        return await session_of(key).respond(body, request)

    @app.post("/s/{key}/reward")
    async def reward(key: str, body: RewardBody) -> Json:
        session, reward = session_of(key), body.reward
        try:
            check_reward(reward or 0.0)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        if session.reward.done():
            raise HTTPException(400, "this session has its reward already")
        session.reward.set_result(reward)
        return {"reward": reward}

    serve_dialects(app, "/s/{key}/v1", chat)
    return app


class Running:
    """A program's process, in a group of its own, and the ends of what it wrote to stdout and stderr.

    Attributes:
        sessions: of the episodes that it plays, where it serves.
        ending: is done when it has ended, and what it wrote is read.
    """

    def __init__(self, host: Host, process: asyncio.subprocess.Process, key: str) -> None:
        self.host, self.process, self.mark, self.is_over = host, process, f"OPENAI_API_KEY={key}", False
        self.fence: FencedCommand | None = None
        self.server: uvicorn.Server | None = None  # in the sandbox
        self.sessions: set[Session] = set()
        self.output, self.errors = bytearray(), bytearray()
        pipes = (process.stdout, self.output), (process.stderr, self.errors)
        self.readers = [asyncio.ensure_future(keep_end(*pipe)) for pipe in pipes]
        self.ending = asyncio.ensure_future(self._wait())
        host.watch("+", process.pid, self.mark)

    @classmethod
    async def start(cls, host: Host, words: list[str], task: Json, fenced: bool = False) -> "Running":
        """Starts a program, which finds the session of `task` by the variables of OpenAI's clients; `fenced`, it runs
        in the sandbox, where the same address leads to the same server."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        session = {"OPENAI_BASE_URL": task["base_url"], "OPENAI_API_KEY": task["api_key"]}
        if fenced or not any(name.startswith("ANTHROPIC_") for name in os.environ):  # a judge may be reached by these
            session |= {name.replace("OPENAI", "ANTHROPIC"): value for name, value in session.items()}
        if not fenced:
            options = {"env": program_environment() | session, "start_new_session": True}
            return cls(host, await asyncio.create_subprocess_exec(*words, **pipes, **options), task["api_key"])
        fence = FencedCommand(words, session, host.port)
        process = await asyncio.create_subprocess_exec(*fence.words, **pipes, **fence.arguments)
        running = cls(host, process, task["api_key"])
        running.fence = fence
        try:
            listener = await asyncio.to_thread(fence.listener)
            running.server = uvicorn.Server(host.app)
            running.serving = asyncio.ensure_future(running.server.serve([listener]))
        finally:
            if running.server is None:
                running.end()
        return running

    async def _wait(self) -> None:
        while self.process.returncode is None:  # process.wait() waits for children that hold its pipes, too
            await asyncio.sleep(LOOK_SECONDS)
        self.end()
        await asyncio.wait(self.readers, timeout=READ_SECONDS)
        for reader in self.readers:
            reader.cancel()

    def check_status(self) -> None:
        """Raises RuntimeError if it failed."""
        if status := self.process.returncode:
            how = f"exit code {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
            raise RuntimeError(f"it ended with {how}; its last lines: {last_lines(self.errors, 3) or 'none'}")

    def last_line(self) -> str:
        """Returns the last line of its output; raises RuntimeError if more was written than is kept of a line."""
        lines = self.output.rstrip().splitlines()
        if len(lines) < 2 and len(self.output) == KEPT:
            size = f"its last line has {KEPT} bytes or more, and is not read for a reward"
            raise RuntimeError(f"{size}: POST that to reward_url, or print it as a line of its own")
        return lines[-1].decode("utf-8", "replace").strip() if lines else ""

    def tell(self, task: Json) -> None:
        """Writes a task to its stdin, as a line."""
        self.process.stdin.write(json.dumps(task, default=as_json).encode() + b"\n")

    def end(self) -> None:
        """Kills it, and all that it started and left in its group, or in others with its variables."""
        if self.is_over:
            return
        self.is_over = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.host.watch("-", self.process.pid, self.mark)
        if self.server is not None:
            self.server.should_exit = self.server.force_exit = True
        if self.fence is not None:
            self.fence.remove()


def program_environment() -> dict[str, str]:
    """Returns the variables of a program: `python` is that of this process, and no proxy stands before the server."""
    local = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1")))
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    return {**os.environ, "PATH": path, "NO_PROXY": local, "no_proxy": local}


async def keep_end(pipe: asyncio.StreamReader, buffer: bytearray) -> None:
    """Reads all of a pipe, so that a full one blocks nobody, and keeps its end in `buffer`."""
    while piece := await pipe.read(KEPT):
        buffer += piece
        del buffer[:-KEPT]


def as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def last_lines(output: bytearray, count: int) -> str:
    return "\n".join(output.decode("utf-8", "replace").strip().splitlines()[-count:])[-1000:]
