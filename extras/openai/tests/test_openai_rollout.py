"""A server as the engine: what it is asked, and what may go wrong on the way. How it gets weights:
tests/test_weight_transfer.py. What engines promise, with vLLM's server behind it: tests/test_engine_contract.py."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data.seeding import derive_seed
from data.types import Request, SamplingParams
from extras.http import http
from extras.http.http import RequestRefused, ServerError, ask_once
from extras.openai import rollout as openai_rollout
from extras.openai.rollout import OpenAIRollout
from extras.openai.tests.fixtures import engine_for
from extras.server.app import Served
from tests.processes import until
from tests.servers import KEY, answering
from workers.rollout import build_rollout

PLAIN = SamplingParams(True, 1.0, -1, 1.0, 6)
MODELS = {"data": [{"id": "tiny"}]}
CHOICE = {"finish_reason": "length", "token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}}


@contextmanager
def scripted(complete: Callable[[dict], tuple[int, dict]]) -> Iterator[str]:
    """The address of a server that answers /v1/completions by `complete(body) -> (status, JSON)`."""

    def answer(method: str, path: str, body: dict | None) -> tuple[int, dict | str]:
        if method == "GET":
            return 200, MODELS if path == "/v1/models" else "no API"
        return complete(body)

    with answering(answer) as url:
        yield url


def sure(body: dict) -> tuple[int, dict]:
    """Answers with the only token that is left to draw, as a server whose log-probs are those of what it draws from."""
    ids = [7] * body["max_tokens"]
    choice = {"finish_reason": "length", "token_ids": ids, "logprobs": {"token_logprobs": [0.0] * len(ids)}}
    return 200, {"choices": [choice]}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(openai_rollout, "RETRIES", 2)


NARROW = replace(PLAIN, temperature=0.6, top_k=7, top_p=0.8, min_p=0.05, max_tokens=20)


@pytest.mark.parametrize("params", [PLAIN, NARROW, replace(PLAIN, do_sample=False)], ids=str)
def test_a_server_answers_as_the_engine_behind_it(address: str, served: Served, tiny_model: Path, params):
    """Sampling, seed and stop ids go along; its server turns a seed into those of its choices."""
    engine = engine_for(address, tiny_model, api_key=KEY)
    requests = [Request(row, [20 + row, 30, 40], params, derive_seed(3, row)) for row in range(12)]
    same = [replace(request, seed=derive_seed(request.seed, "choice", 0, 0)) for request in requests]
    wanted = served.pump.engine.generate(same)
    for found, done in zip(engine.generate(requests), wanted, strict=True):
        assert (found.id, found.token_ids, found.finish_reason) == (done.id, done.token_ids, done.finish_reason)
        assert found.log_probs == pytest.approx(done.log_probs, abs=1e-5)
    assert engine.counts_filters and engine.ignore_eos


def test_an_aborted_request_is_hung_up(address: str, served: Served, tiny_model: Path):
    engine = engine_for(address, tiny_model, api_key=KEY)
    for number in range(2):
        engine.add(Request(number, [20 + number], replace(PLAIN, max_tokens=24), seed=number))
    engine.step()
    engine.abort([0, 5])
    left = []
    while engine.has_unfinished_requests():
        left += engine.step()
    assert [done.id for done in left] == [1]
    until(lambda: not served.pump.clients)


@pytest.mark.parametrize("answer", [(500, {"error": "out of memory"}), None], ids=["fails", "goes away"])
def test_a_server_that_fails_each_time_or_goes_away_is_named(tiny_model: Path, impatient: None, answer: tuple | None):
    def complete(body: dict) -> tuple[int, dict]:
        if body["max_tokens"] != PLAIN.max_tokens:
            return sure(body)
        if answer is None:
            raise ConnectionError  # in the thread that would answer: the connection is closed
        return answer

    said = "status 500: .*out of memory" if answer else "[Dd]isconnected"
    with scripted(complete) as url:
        engine = engine_for(url, tiny_model)
        with pytest.raises(ServerError, match=rf"{url}/v1/completions failed 3 times, .*{said}"):
            engine.generate([Request(row, [20], PLAIN, row) for row in range(4)])
        assert not engine.has_unfinished_requests()
    with pytest.raises(ServerError, match=f"{url}/v1/models failed 3 times, .*Connect.*Check that the server runs"):
        engine_for(url, tiny_model)


@pytest.mark.parametrize(
    ("head", "piece", "pause", "message"),
    [
        (b"", b"", 0.1, r"gave no answer in 0\.5 seconds"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"a", 0.1, r"gave no answer in 0\.5 seconds"),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 0.1, r"gave no answer in 0\.5 seconds"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"a" * (1 << 20), 0, "answers more than 64 MiB"),
    ],
)
def test_an_answer_that_does_not_end_is_no_answer(head: bytes, piece: bytes, pause: float, message: str):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        with suppress(ConnectionError):
            while True:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            seconds = 60 if not pause else 0.5
            await asyncio.wait_for(ask_once("POST", f"http://127.0.0.1:{port}", {}, timeout=seconds), 60)

    with pytest.raises((ServerError, RequestRefused), match=message):
        asyncio.run(ask())


def test_a_server_does_not_say_for_how_long_a_run_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "LONGEST_WAIT", 0.01)
    with answering(lambda *_: (503, "busy"), retry_after="86400") as url, pytest.raises(ServerError, match="3 times"):
        asyncio.run(asyncio.wait_for(ask_once("GET", url, None, retries=2), 60))


def test_what_a_server_refuses_is_said_at_once_in_its_words(address: str, tiny_model: Path):
    with pytest.raises(RequestRefused, match=r"/v1/models refused the request, status 401: .*the API key is missing"):
        engine_for(address, tiny_model, api_key="another")
    engine = engine_for(address, tiny_model, api_key=KEY)
    engine.stop_ids = {5}
    with pytest.raises(RequestRefused, match=r"status 400: .*ignore_eos: responses of this server stop at"):
        engine.generate([Request(0, [20], PLAIN, 0)])
    with pytest.raises(ValueError, match=r"model=other: .* has the models tiny\. Choose one"):
        engine_for(address, tiny_model, api_key=KEY, model="other")
    config = replace(engine.config, prompt_length=76)
    with pytest.raises(ValueError, match=r"takes sequences of 64 tokens, and .* up to 100: start it with --max-mod"):
        build_rollout(OpenAIRollout, config, AutoTokenizer.from_pretrained(tiny_model), engine.module)


def test_what_is_no_api_is_said_to_be_none(tiny_model: Path):
    with scripted(sure) as url, pytest.raises(RequestRefused, match=r"/other/v1/models answered what is not JSON"):
        engine_for(f"{url}/other", tiny_model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": None}, "without token_ids and logprobs.token_logprobs"),
        ({"token_ids": [7.5]}, "returned the token id 7.5 for request 0"),
        ({"token_ids": [10**9]}, "returned the token id 1000000000 for request 0: they are integers from 0 to"),
        ({"logprobs": {"token_logprobs": [None]}}, "returned the log-prob None for request 0"),
        ({"logprobs": None}, "without token_ids and logprobs.token_logprobs"),
        ({"logprobs": {"token_logprobs": [-2.0]}}, "before temperature.*--logprobs-mode processed_logprobs"),
        ({"finish_reason": "content_filter"}, "request 0 finished with finish_reason='content_filter'"),
    ],
)
def test_a_server_that_is_no_use_is_refused_at_the_start(tiny_model: Path, change: dict, message: str):
    with scripted(lambda body: (200, {"choices": [CHOICE | change]})) as url, pytest.raises(ValueError, match=message):
        engine_for(url, tiny_model)


def test_what_sglangs_server_does_otherwise_is_found_out(tiny_model: Path):
    """Log-probs after temperature and before top-k, top-p and min-p; ignore_eos has it stop nowhere."""
    asked = []

    def complete(body: dict) -> tuple[int, dict]:
        asked.append(body)
        ids = [7] * (1 if 7 in body["stop_token_ids"] and not body["ignore_eos"] else body["max_tokens"])
        log_probs = {"token_logprobs": [-1.0 / body["temperature"]] * len(ids)}
        return 200, {"choices": [{"finish_reason": "length", "token_ids": ids, "logprobs": log_probs}]}

    with scripted(complete) as url:
        engine = engine_for(url, tiny_model)
        assert engine.generate([Request(0, [20], PLAIN, 0)])[0].log_probs == [-1.0] * 6
        assert [body["ignore_eos"] for body in asked] == [True] * (len(asked) - 1) + [False]
        with pytest.raises(ValueError, match=r"asks for top_k=-1, top_p=0.9 and min_p=0.0, which the engine's log-"):
            engine.add(Request(0, [20], replace(PLAIN, top_p=0.9), 0))
