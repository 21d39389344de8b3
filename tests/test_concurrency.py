"""Event loops for the user's code: what an unclosed client leaves behind harms no other connection."""

import asyncio
import gc
import socket

import pytest

from data.concurrency import run, start_loop, stop_loop


class Unclosed:
    """A client that is collected by cycle, with its connection, and closes that later, as openai's do."""

    def __init__(self, transport: asyncio.Transport, later: asyncio.Event):
        self.me, self.transport, self.later = self, transport, later

    def __del__(self):
        asyncio.get_running_loop().create_task(self.close())

    async def close(self):
        await self.later.wait()
        self.transport.abort()


async def echo_beside_an_unclosed_client() -> bytes:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        writer.write(await reader.read(9))
        await asyncio.sleep(0.1)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    address, later = server.sockets[0].getsockname(), asyncio.Event()
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, *address)
    descriptor = transport.get_extra_info("socket").fileno()
    transport.pause_reading()  # as anyio's does while nothing is read: the loop holds it no more
    Unclosed(transport, later)
    del transport
    gc.collect()
    lower = []  # descriptors that are free, too
    while (free := socket.socket()).fileno() != descriptor:
        lower.append(free)
    free.connect(address)
    reader, writer = await asyncio.open_connection(sock=free)
    later.set()
    await asyncio.sleep(0)
    writer.write(b"answer")
    return await asyncio.wait_for(reader.read(9), 5)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("is_shared", [False, True])
def test_an_unclosed_client_that_is_collected_takes_no_other_connection_along(is_shared: bool):
    if not is_shared:
        assert run(echo_beside_an_unclosed_client()) == b"answer"
        return
    loop, thread = start_loop()
    assert asyncio.run_coroutine_threadsafe(echo_beside_an_unclosed_client(), loop).result(10) == b"answer"
    stop_loop(loop, thread)
