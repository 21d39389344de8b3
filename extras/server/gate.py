"""Lets requests in: the key is looked at before the body is read, and what a client sends has a bound and a deadline.

Behind it are the API of a model and the sessions of programs, as clients of both may be hostile.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import uvicorn
from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from configs.errors import notice_once
from extras.server.refusals import refuse

CLIENT_GONE = 499  # nobody reads the answer
HEADER_SECONDS, BODY_SECONDS = 20, 60  # that a client may take to send them
MOST_CONNECTIONS = 4096  # of a process, which keeps a third of its descriptors for other things
RETRY_SECONDS = 5  # after which a request may come again for which there was no room
BACKLOG = 256  # connections that are accepted before the first of them is counted


class HTTPProtocol(H11Protocol):
    """HTTP with HEADER_SECONDS for clients to send their headers, whose length h11 bounds; with more than `most`
    connections, the oldest that waits for its client is closed."""

    def __init__(self, connected: dict["HTTPProtocol", None], most: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.connected, self.most = connected, most

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.connected[self] = None
        if len(self.connected) > self.most:
            oldest = next(each for each in self.connected if each.is_silent() or each.cycle.more_body)
            if oldest is self:
                notice_once(f"{self.most} clients are being answered, and no more are let in: raise `ulimit -n`.")
            del self.connected[oldest]
            oldest.transport.abort()
        self.loop.call_later(HEADER_SECONDS, self.hang_up_on_silence, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.connected.pop(self, None)

    def is_silent(self) -> bool:
        """Says whether all that was asked is answered."""
        return self.cycle is None or self.cycle.response_complete

    def hang_up_on_silence(self, before: object) -> None:
        """Hangs up if nothing was asked since the request `before`, which is answered; looks again later."""
        if self.transport.is_closing():
            return
        if self.is_silent() and self.cycle is before:
            self.transport.close()
        else:
            self.loop.call_later(HEADER_SECONDS, self.hang_up_on_silence, self.cycle if self.is_silent() else None)


def server_config(app: ASGIApp, **settings: Any) -> uvicorn.Config:
    """Returns the config of a server, or of several that share a bound on connections; `settings` are uvicorn's."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    protocol = partial(HTTPProtocol, {}, min(MOST_CONNECTIONS, descriptors * 2 // 3))
    return uvicorn.Config(app, http=protocol, ws="none", backlog=BACKLOG, **settings)


class Gate:
    """Passes on to `app` the requests that `check` refuses by no HTTPException, with a body of at most `most` bytes in
    BODY_SECONDS. An ExitStack in their scope, `ending`, is closed when they are over.

    Of the requests for which `check` returns one thing, a session, the bodies have at most `most_held` bytes at once.
    """

    def __init__(
        self, app: ASGIApp, check: Callable[[str, dict[bytes, bytes]], object], most: int, most_held: int
    ) -> None:
        self.app, self.check, self.most, self.most_held = app, check, most, most_held
        self.held: Counter[object] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        with ExitStack() as scope["ending"]:
            try:
                hold = partial(self.hold, self.check(scope["path"], headers), scope["ending"])
                body = await read_body(headers, receive, self.most, hold)
            except HTTPException as error:
                return await (await refuse(None, error))(scope, receive, send)
            messages = [{"type": "http.request", "body": body}]

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            return await self.app(scope, replay, send)

    def hold(self, owner: object, ending: ExitStack, size: int) -> None:
        """Counts bytes of a body until its request is over; raises HTTPException where they are too many together."""
        self.held[owner] += size
        ending.callback(self.release, owner, size)
        if self.held[owner] > self.most_held:
            detail = f"the requests under way have more than {self.most_held} bytes together: come again later"
            raise HTTPException(503, detail, {"Retry-After": str(RETRY_SECONDS)})

    def release(self, owner: object, size: int) -> None:
        self.held[owner] -= size
        if not self.held[owner]:
            del self.held[owner]


async def read_body(headers: dict[bytes, bytes], receive: Receive, most: int, hold: Callable[[int], None]) -> bytes:
    """Returns the body of a request, whose bytes are given to `hold` as they come; raises HTTPException if it is too
    long, or does not come to its end in time."""
    body, more, size = bytearray(), True, int(headers.get(b"content-length", 0))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more and max(size, len(body)) <= most:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HTTPException(CLIENT_GONE, "the client has left")
                body += message.get("body", b"")
                hold(len(message.get("body", b"")))
                more = message.get("more_body", False)
    except TimeoutError as error:
        raise HTTPException(408, f"the body has not come within {BODY_SECONDS} seconds") from error
    if max(size, len(body)) > most:
        raise HTTPException(413, f"the body has more than {most} bytes: send less at a time")
    return bytes(body)
