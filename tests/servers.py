"""A server on loopback, for tests, that answers by a function; and a client that says what it likes."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

KEY = "a secret"


@contextmanager
def answering(
    answer: Callable[[str, str, dict | None], tuple[int, dict | str]], key: str | None = None, **headers: str
) -> Iterator[str]:
    """The address of a server that answers by `answer(method, path, JSON or None) -> (status, JSON or text)`, with
    `headers`, in which _ stands for -. Whoever does not send the `key`, if there is one, is refused."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say(*answer("GET", self.path, None))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            self.say(*answer("POST", self.path, json.loads(body) if body else None))

        def say(self, status: int, content: dict | str) -> None:
            if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                status, content = 401, "another key"
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content_length": str(len(data)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # waited for at the end: what they print is of this test
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def spoken(address: str, *sent: bytes) -> bytes:
    """Reads the server's answer to bytes that are sent to it, until it hangs up."""
    with socket.create_connection(address.removeprefix("http://").split(":")) as connection:
        for part in sent:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@contextmanager
def flood(address: str, texts: list[bytes]) -> Iterator[list[socket.socket]]:
    """Connections to a server, each of which has sent one of the texts, and sends no more."""
    with ExitStack() as stack:
        opened = []
        for text in texts:
            opened.append(stack.enter_context(socket.create_connection(address.removeprefix("http://").split(":"))))
            opened[-1].sendall(text)
        yield opened


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except ConnectionError:
        return False
