"""A server's HTTP API, asked many things side by side by code that is not asynchronous.

The event loop runs while somebody waits in `Server.run`, and at no other time: what the server sends meanwhile stays in
the sockets. Every request has a connection of its own, which ends with it: to drop a request is to hang up.
"""

import asyncio
import json
import resource
import weakref
from collections.abc import Coroutine
from typing import Any

import aiohttp

Json = dict[str, Any]

CONNECT_SECONDS = 10
RETRY_SECONDS = (0.25, 0.5, 1.0, 2.0)  # and no longer: a server that was started anew meanwhile has its first weights
BUSY = 429
MESSAGE = 500  # characters of what a server answers, at most, that are passed on


class ServerError(RuntimeError):
    """The server cannot be reached or fails, each time that it is asked."""


class RequestRefused(ValueError):
    """The server answered 4xx: it is the request that is wrong."""


class Server:
    """An HTTP server.

    Args:
        base_url: where its API begins, as OpenAI's clients are told it: with /v1 at its end, or without.
        api_key: sent along as a bearer token; None: none.
        connections: requests side by side, at most; half of the files that the process may open is the limit of that.
        timeout: seconds that an answer may take.
        retries: whether what fails is tried again, which what is asked must then bear.
    """

    def __init__(
        self, base_url: str, api_key: str | None, connections: int, timeout: float, retries: bool = True
    ) -> None:
        self.url, self.timeout, self.retries = base_url.rstrip("/").removesuffix("/v1"), timeout, retries
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.session = self.run(open_session(headers, min(connections, files_allowed() // 2), timeout))
        self.close = weakref.finalize(self, close, self.runner, self.session)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, while which all other tasks go on."""
        return self.runner.run(work)

    async def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """The JSON that the server answers.

        Failures of the server and of the way to it are tried again a few times, with `retries`: requests are answered
        by their own seeds, so an answer that was lost is given a second time.

        Raises:
            RequestRefused: it answered 4xx.
            ServerError: it cannot be reached, answered 5xx or none in time, each time.
        """
        problem, waits = "", RETRY_SECONDS if self.retries else ()
        for wait in (0.0, *waits):
            await asyncio.sleep(wait)
            try:
                async with self.session.request(method, self.url + path, json=body) as response:
                    status, text = response.status, await response.text()
            except aiohttp.SocketTimeoutError as error:
                raise ServerError(f"{self.url}{path} gave no answer in {self.timeout:g} seconds.") from error
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if status < 400:
                return self._parsed(path, text)
            problem = f"status {status}: {text[:MESSAGE]}"
            if status < 500 and status != BUSY:
                raise RequestRefused(f"{self.url}{path} refused the request, {problem}")
        often = f" {len(waits) + 1} times in {sum(waits):g} seconds" if waits else ""
        raise ServerError(f"{self.url}{path} failed{often}, {problem}. Look whether the server runs, and into its log.")

    def _parsed(self, path: str, text: str) -> Json:
        try:
            return json.loads(text or "{}")
        except json.JSONDecodeError as error:
            raise RequestRefused(
                f"{self.url}{path} answered what is not JSON ({text[:60]!r}): it is no OpenAI-compatible server."
            ) from error


def files_allowed() -> int:
    """Files that this process may have open, sockets included."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


async def open_session(headers: dict[str, str], connections: int, timeout: float) -> aiohttp.ClientSession:
    """Answers are waited for, each on its own, once a connection is free."""
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=timeout)
    connector = aiohttp.TCPConnector(limit=max(connections, 1), force_close=True)
    return aiohttp.ClientSession(headers=headers, connector=connector, timeout=limits)


def close(runner: asyncio.Runner, session: aiohttp.ClientSession) -> None:
    runner.run(session.close())
    runner.close()
