"""Programs that flood the server of sessions, end badly, or leave processes behind."""

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from urllib.request import Request, urlopen

import pytest
from fastapi.responses import JSONResponse

from extras.sessions.host import Host
from extras.sessions.tests.test_sessions import AGENT, LIGHT, command, play, prompts, settings
from tests.processes import is_alive, until
from tests.servers import flood, spoken

HEAD = b"POST /s/%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
CHUNK = b"190\r\n" + b" " * 400 + b"\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n" + CHUNK  # and no end


class Waiting:
    """Stands for a session, which answers when it is told to."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reward, self.asked, self.told = asyncio.Future(loop=loop), Event(), Event()

    async def respond(self, *_: Any) -> JSONResponse:
        self.asked.set()
        await asyncio.to_thread(self.told.wait)
        return JSONResponse("answered")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Waiting]]:
    """The address of a server with small bounds, and its session /s/known."""
    for name, value in {"BODY_SECONDS": 0.5, "HEADER_SECONDS": 0.5, "MOST_CONNECTIONS": 8}.items():
        monkeypatch.setattr(f"extras.server.gate.{name}", value)
    monkeypatch.setattr("extras.sessions.host.MOST_BYTES", 1000)
    host = Host()
    host.sessions["known"] = session = Waiting(host.loop)
    yield f"http://127.0.0.1:{host.port}", session
    host.loop.call_soon_threadsafe(host.loop.stop)
    host.warden.close()


@pytest.mark.parametrize(("path", "sent", "answer"), [
    (b"none/reward", b"Content-Length: 400000000\r\n\r\n", " 404 .*there is no session none"),
    (b"none/v1/chat/completions", CHUNKS, " 404 .*there is no session none"),
    (b"../v1/chat/completions", CHUNKS, " 404 .*there is no session"),
    (b"known/reward", b"Content-Length: 1001\r\n\r\n", " 413 .*more than 1000 bytes"),
    (b"known/reward", CHUNKS + 2 * CHUNK, " 413 .*more than 1000 bytes"),
    (b"known/reward", CHUNKS, " 408 .*has not come within 0.5 seconds"),
    (b"known/reward", b"", "$"),
])  # fmt: skip
def test_a_body_is_not_read_without_a_session_nor_beyond_its_bound(server, path, sent, answer):
    assert re.match(f"(HTTP/1.1)?{answer}", spoken(server[0], HEAD % path + sent).decode(), re.DOTALL)


def test_who_asks_and_who_is_being_answered_have_their_connections_in_a_flood(server):
    url, session = server

    def post(path: str, **body: object) -> object:
        headers = {"content-type": "application/json"}
        with urlopen(Request(f"{url}/s/known/{path}", json.dumps(body).encode(), headers)) as answer:
            return json.loads(answer.read())

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, "v1/chat/completions", model="m", messages=[{"role": "user", "content": "a"}])
        assert session.asked.wait(60)
        with flood(url, [HEAD % b"known/reward", HEAD % b"known/reward" + CHUNKS] * 20):
            assert post("reward", reward=1) == {"reward": 1}
        session.told.set()
        assert waiting.result() == "answered"


LAST = {  # what a program does after its answer: its reward, or words of the reason for which it has none
    "long": ("print(json.dumps({'reward': 0.5, 'trace': 'x' * 1200}))", 0.5),
    "64 KB": ("print(json.dumps({'trace': 'x' * 65000, 'reward': 0.25}))", 0.25),
    "longer": ("print(json.dumps({'trace': 'x' * 66000, 'reward': 0.25}))", "65536 bytes or more"),
    "blank": ("print(1, chr(10) * 66000)", "65536 bytes or more"),
    "separator": ("sys.stdout.buffer.write('{\"trace\": \"\u2028\", \"reward\": 0.75}'.encode())", 0.75),
    "a text": ("print('x' * 2000)", None),
    "no reward": ("print(json.dumps({'score': 1}))", None),
    "of Python": ("print({'reward': 1})", "begins like JSON and is none: {'reward': 1}"),
    "torn": ("print(json.dumps({'reward': 1, 'trace': 'x'})[:-3])", "begins like JSON and is none"),
    "exits": ("post(task['reward_url'], {'reward': 0.5}); sys.exit(7)", 0.5),
    "killed": ("post(task['reward_url'], {'reward': 0.5}); os.kill(os.getpid(), 9)", 0.5),
    "posts and tears": ("post(task['reward_url'], {'reward': 0.5}); print('{')", 0.5),
    "posts none": ("post(task['reward_url'], {'reward': None}); sys.exit(7)", None),
}  # fmt: skip


def test_a_reward_is_read_from_the_whole_last_line_or_said_to_be_none_and_a_posted_one_counts(tmp_path: Path):
    cases = "".join(f"if task['kind'] == {kind!r}:\n    {code}\n" for kind, (code, _) in LAST.items())
    head = "task = json.loads(sys.stdin.readline())\nask(task, task['messages'])\n"
    batch = play(settings(command(tmp_path, head + cases, LIGHT)), prompts(len(LAST), kind=[*LAST]))
    rewards = batch.non_tensor_batch["__reward_score__"]
    for kind, reason, failure, reward in zip(batch.kind, batch.end_reason, batch.failure, rewards, strict=True):
        expected = LAST[kind][1]
        if isinstance(expected, str):
            assert reason == "env_error" and expected in failure, (kind, failure)
        else:
            assert (reason, reward) == ("terminated", expected), (kind, failure)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system shows no variables of processes")
@pytest.mark.parametrize("end", ["print(1)", "sys.exit(7)", "time.sleep(600)"])
def test_what_a_program_starts_in_another_group_ends_with_it(tmp_path: Path, end: str):
    program = command(tmp_path, f"""
        import subprocess
        task = json.loads(sys.stdin.readline())
        ask(task, task["messages"])
        first = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
        subprocess.run(["sh", "-c", "setsid sh -c 'echo $$ > {tmp_path}/orphan; exec sleep 600' &"])
        open("{tmp_path}/child", "w").write(str(first))
        {end}
    """, LIGHT)  # fmt: skip
    play(settings(program, f"{AGENT}.program_timeout=3"))
    pids = [int((tmp_path / name).read_text()) for name in ("child", "orphan")]
    until(lambda: not any(map(is_alive, pids)))
