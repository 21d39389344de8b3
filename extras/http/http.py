"""Asks for JSON over HTTP, and tries again if the server is busy or fails, or the connection drops."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import aiohttp

from configs.errors import MayPass

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before another try; it doubles each time
CONNECT_SECONDS = 10
MOST_BYTES = 64 << 20  # of an answer
BUSY, SERVER_ERROR = 429, 500  # statuses worth another try: 429, and 500 and above
MAX_MESSAGE = 500  # characters of a server's answer that are passed on

Json = dict[str, Any]


class ServerError(MayPass, ConnectionError):
    """The server cannot be reached, fails each time, or does not answer in time."""


class RequestRefused(ValueError):
    """The server refuses the request, with a `status`, or answers what is not JSON."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def may_pass(status: int) -> bool:
    return status == BUSY or status >= SERVER_ERROR


async def open_session(
    api_key: str | None = None, timeout: float | None = None, connections: int = 100
) -> aiohttp.ClientSession:
    """Opens a session of at most `connections`, one a request, so that dropping a request hangs up. `timeout`: seconds
    from sending a request to the last byte of its answer; None: no limit."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=timeout)
    connector, clock = aiohttp.TCPConnector(limit=max(connections, 1), force_close=True), aiohttp.TraceConfig()
    clock.on_request_headers_sent.append(start_clock)
    return aiohttp.ClientSession(headers=headers, connector=connector, timeout=limits, trace_configs=[clock])


async def start_clock(session: aiohttp.ClientSession, request: Any, _: object) -> None:
    """Starts the timeout of a request when it is sent: it may have waited for others before."""
    if seconds := session.timeout.sock_read:
        request.trace_request_ctx.reschedule(asyncio.get_running_loop().time() + seconds)


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: Json | None = None,
    *,
    retries: int = 5,
    may_pass: Callable[[int], bool] = may_pass,
    setting: str = "base_url",
) -> Json:
    """Returns the JSON that the server answers, after at most `retries` more tries. The wait before each is twice the
    last one, or the answer's Retry-After, and LONGEST_WAIT at most.

    Raises:
        RequestRefused: it answered a status above 399 that is not worth another try, no JSON, or too much.
        ServerError: it cannot be reached or fails each time, or gives no answer in time.
        ValueError: `url` is no address; names `setting`.
    """
    wait, tries = FIRST_WAIT, retries + 1
    for attempt in range(1, tries + 1):
        try:
            async with (
                asyncio.timeout(None) as clock,
                session.request(method, url, json=body, trace_request_ctx=clock) as answer,
            ):
                status, text, retry_after = answer.status, await read(answer), answer.headers.get("Retry-After", "")
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise ValueError(f"{url} is no address: {setting} begins with http:// or https://.") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            if clock.expired() or isinstance(error, aiohttp.SocketTimeoutError):
                raise ServerError(f"{url} gave no answer in {session.timeout.sock_read:g} seconds.") from error
            problem, retry_after = f"{type(error).__name__}: {error}", ""
        else:
            if status < 400:
                return parse(url, text)
            problem = f"status {status}: {text[:MAX_MESSAGE]}"
            if not may_pass(status):
                raise RequestRefused(f"{url} refused the request, {problem}", status)
        if attempt < tries:
            delay = float(retry_after) if retry_after.isdecimal() else wait * random.uniform(0.5, 1.5)
            await asyncio.sleep(min(delay, LONGEST_WAIT))
            wait = min(2 * wait, LONGEST_WAIT)
    count = f" {tries} times" if tries > 1 else ""
    raise ServerError(f"{url} failed{count}, {problem}. Check that the server runs, and read its log.")


async def read(answer: aiohttp.ClientResponse) -> str:
    """Returns the text of an answer; raises RequestRefused if it is longer than MOST_BYTES."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > MOST_BYTES:
            raise RequestRefused(f"{answer.url} answers more than {MOST_BYTES >> 20} MiB.", answer.status)
    return body.decode(errors="replace")


async def ask_once(
    method: str, url: str, body: Json | None, api_key: str | None = None, timeout: float | None = None, **options: Any
) -> Json:
    """Calls `ask` with a session of its own."""
    async with await open_session(api_key, timeout) as session:
        return await ask(session, method, url, body, **options)


def parse(url: str, text: str) -> Json:
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise RequestRefused(f"{url} answered what is not JSON: {text[:MAX_MESSAGE]!r}") from error


def api_root(base_url: str) -> str:
    """Returns the address of a server, from its API's address with or without /v1 at the end."""
    return base_url.rstrip("/").removesuffix("/v1")
