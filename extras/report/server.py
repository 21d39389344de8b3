"""Serves the report of runs that go on, to this machine alone: the page, and at /data its data with the newest steps.

The page asks for /data?have=VERSION every few seconds, and is answered by 204 No Content as long as it has the newest.
"""

import hashlib
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from extras.report.page import embed, fill_page, page_data, page_parts
from extras.report.runs import CONFIG, EVENTS, INFO, METRICS, RunRecord, read_runs, state_of

# Its own names. For another, a foreign page asks that had that name point here, to read the runs.
NAMES = ("127.0.0.1", "localhost")
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
REST = 10  # times as long as a build took, before the next: the cores are the run's


class LiveReport:
    """The report's data, built anew when a run has written something and someone asks.

    Attributes:
        title, text: the page's title, and its data as JSON, which have their `version` in them.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.runs: list[RunRecord] = []
        self.source: Any = None  # the state of the files that the text was built from
        self.title = self.text = self.version = ""
        self.rests_until = 0.0
        self.lock = threading.Lock()
        page_parts()  # takes two seconds once; no build should have to rest for them
        self.update()

    def update(self) -> None:
        """Builds the data anew if there is something new. Raises ValueError if a folder is no run, or not any more."""
        with self.lock:
            began, files = time.monotonic(), [*map(stamp, self.folders)]
            if began < self.rests_until or self.source == (files, [*map(state_of, self.runs)]):
                return
            self.runs = read_runs(self.folders)
            self.source = files, [run.state for run in self.runs]
            data = page_data(self.runs)
            text = embed(data)
            version = hashlib.sha256(text.encode()).hexdigest()[:16]
            self.title, self.version, self.text = data["title"], version, f'{{"version":"{version}",{text[1:]}'
            self.rests_until = time.monotonic() + REST * (time.monotonic() - began)


def stamp(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns size and time of the files that a run writes at every step; those of samples come before them."""
    stamps = {}
    for name in (METRICS, INFO, EVENTS, CONFIG):
        with suppress(OSError):
            state = (folder / name).stat()
            stamps[name] = state.st_size, state.st_mtime_ns
    return stamps


class Handler(BaseHTTPRequestHandler):
    """Answers with the page and its data, and nothing else."""

    server: "ReportServer"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self.headers.get("Host", "").partition(":")[0] not in NAMES:
            return self.answer(HTTPStatus.FORBIDDEN, f"This report is at {self.server.address} only.")
        if url.path not in ("/", "/data"):
            return self.answer(HTTPStatus.NOT_FOUND, f"The report is at {self.server.address}.")
        report = self.server.report
        try:
            report.update()
        except ValueError as error:
            return self.answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if url.path == "/":
            page = fill_page(report.title, report.text, "connect-src 'self'")
            return self.answer(HTTPStatus.OK, page, "text/html")
        if parse_qs(url.query).get("have") == [report.version]:
            return self.answer(HTTPStatus.NO_CONTENT)
        return self.answer(HTTPStatus.OK, report.text, "application/json")

    def answer(self, status: HTTPStatus, text: str = "", kind: str = "text/plain") -> None:
        content = text.encode(errors="backslashreplace")
        about = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        self.send_response(status)
        for name, value in (HEADERS | about).items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # the page was closed
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Says nothing: who asks is the page itself."""


class ReportServer(ThreadingHTTPServer):
    """Serves the report of the runs in `folders` at `address`, of this machine; port 0 is any that is free.

    Raises ValueError for a folder that is no run, and for a port that is taken.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        self.report = LiveReport(folders)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(
                f"--port {port} cannot be served at ({error}): name another, or none for any that is free."
            ) from error
        self.address = f"http://127.0.0.1:{self.server_port}/"
