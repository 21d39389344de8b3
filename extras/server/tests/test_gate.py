"""The gate before a server: what hostile clients send to it, bytes on a socket, and who is answered meanwhile."""

import time
from urllib.request import urlopen

import pytest

from extras.server.tests.fixtures import compose, serving
from tests.servers import KEY, flood, is_open, spoken

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"  # or it hangs up after 5 seconds


@pytest.mark.parametrize(("key", "code"), [(b"wrong", b" 401 "), (KEY.encode(), b" 413 ")])
def test_the_key_and_the_length_are_looked_at_before_the_body_is_read(address, key, code):
    said = spoken(address, HEAD + b"Content-Length: 20000000\r\nAuthorization: Bearer " + key + b"\r\n\r\n")
    assert code in said.splitlines()[0], "and nothing of the body was sent"


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half"])
def test_who_does_not_say_what_is_asked_is_hung_up_on(served, tiny_model, monkeypatch, sent):
    monkeypatch.setattr("extras.server.gate.HEADER_SECONDS", 0.2)
    with serving(served, compose(tiny_model)) as url:
        assert spoken(url, sent) == b""


def test_a_body_that_never_ends_is_answered(served, tiny_model, monkeypatch):
    monkeypatch.setattr("extras.server.gate.BODY_SECONDS", 0.2)
    head = HEAD + b"Content-Length: 9\r\nAuthorization: Bearer " + KEY.encode()
    with serving(served, compose(tiny_model)) as url:
        said = spoken(url, head + b"\r\n\r\n{")
        assert b" 408 " in said.splitlines()[0] and b"the body has not come within 0.2 seconds" in said
        chunked = head.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked") + b"\r\n\r\n"
        said = spoken(url, chunked, b"100000\r\n" + b" " * (1 << 20) + b"\r\n", b"200000\r\n" + b" " * (1 << 20))
        assert b" 413 " in said.splitlines()[0] or b" 408 " in said.splitlines()[0]


def test_bodies_have_a_bound_together_until_their_requests_are_over(served, tiny_model, monkeypatch):
    monkeypatch.setattr("extras.server.app.MOST_HELD", 1000)
    begun = HEAD + b"Content-Length: 600\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n" + b" " * 599
    with serving(served, compose(tiny_model)) as url:
        with flood(url, [begun]):
            said = spoken(url, begun).lower()
            assert b" 503 " in said.splitlines()[0] and b"retry-after: 5" in said and b"more than 1000 bytes" in said
        last = time.monotonic() + 30
        while b" 503 " in (said := spoken(url, begun + b" ")) and time.monotonic() < last:
            time.sleep(0.01)
        assert b" 400 " in said.splitlines()[0]  # it is no JSON


def test_of_too_many_connections_the_oldest_that_wait_for_their_clients_are_closed(served, tiny_model, monkeypatch):
    monkeypatch.setattr("extras.server.gate.MOST_CONNECTIONS", 8)
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    begun = half + b"Content-Length: 9\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n{"
    with serving(served, compose(tiny_model)) as url, flood(url, [b"", half, begun, half] * 5) as opened:
        with urlopen(f"{url}/health") as answer:
            assert answer.status == 200
        assert [is_open(each) for each in opened] == [False] * 13 + [True] * 7
