"""Another model as the reward: what it is asked, how its grade is read, and what happens when its server fails."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.schema import RewardConfig, RewardFunctionConfig
from data.protocol import DataProto
from data.types import NotScored
from extras.http import http
from extras.judge import judge as module
from extras.judge.judge import GRADE, fill_template, judge, read_grade, read_template
from tests import servers
from training.reward import load_reward_manager

Answer = tuple[int, dict | str]


@contextmanager
def answering(rule: Callable[[int, dict], Answer], **headers: str) -> Iterator[tuple[str, list[dict]]]:
    """A server that gives the n-th question the status and the text that `rule(n, body)` says; its address, and what it
    was asked."""
    asked: list[dict] = []

    def answer(method: str, path: str, body: dict | None) -> tuple[int, dict | str]:
        if method == "GET":
            return 200, {"data": [{"id": "grader"}]}
        asked.append(body | {"path": path})
        return rule(len(asked), body)

    with servers.answering(answer, **headers) as url:
        yield url, asked


def says(text: str) -> Answer:
    return 200, {"choices": [{"message": {"content": text}}]}


def by_length(number: int, body: dict) -> Answer:
    """Half a point for an answer with "good" in it, none else; nothing for one that begs."""
    text = body["messages"][0]["content"]
    return says("I will not." if "please" in text else f"Hm. Score: {5 if 'good' in text else 0}")


def asked_of(url: str, response: str = "good", **kwargs: Any) -> dict[str, Any]:
    return asyncio.run(judge("1+1", response, base_url=url, **kwargs))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(module, "only_models", {})


@pytest.mark.parametrize(
    ("said", "grade"),
    [("Score: 7", 7.0), ("Score: 2? No.\n**Score: 9.5**", 9.5), ("Score: **3**", 3.0), ("Score: 10 of 10", 10.0)],
)
def test_the_last_grade_counts(said, grade):
    assert read_grade(said, GRADE, 0, 10) == grade


@pytest.mark.parametrize(
    ("said", "problem"), [("fine", "no grade"), ("Score: eleven", "no grade"), ("Score: 11", "not from 0 to 10")]
)
def test_what_is_no_grade_is_no_score(said, problem):
    with pytest.raises(ValueError, match=problem):
        read_grade(said, GRADE, 0, 10)


def test_what_is_filled_in_is_not_filled_in_again():
    filled = fill_template("{prompt}|{response}|{ground_truth}", "{response}", "{ground_truth} {x}", "4")
    assert filled == "{response}|{ground_truth} {x}|4"


def test_a_template_may_be_a_file_and_shows_the_response(tmp_path: Path):
    (tmp_path / "ask.txt").write_text("Grade {response}.")
    assert read_template(str(tmp_path / "ask.txt")) == "Grade {response}."
    with pytest.raises(ValueError, match=r"has no \{response\}"):
        read_template("Grade it.")


def test_the_question_and_the_score():
    with answering(by_length) as (url, asked):
        settings = {"best": 5.0, "temperature": 0.5, "max_tokens": 9, "template": "is {response}?"}
        assert asked_of(f"{url}/v1/", **settings) == {"score": 1.0, "judge_said": "Hm. Score: 5"}
    messages = [{"role": "user", "content": "is good?"}]
    body = {"model": "grader", "messages": messages, "temperature": 0.5, "max_tokens": 9}
    assert asked == [body | {"path": "/v1/chat/completions"}]


def test_a_busy_or_failing_server_is_asked_again_and_then_no_more():
    replies = [(429, "busy"), (503, "starting"), says("Score: 8")]
    with answering(lambda number, body: replies[number - 1], Retry_After="0") as (url, asked):
        assert asked_of(url)["score"] == 0.8 and len(asked) == 3
    with answering(lambda *_: (500, "broken")) as (url, asked):
        with pytest.raises(ConnectionError, match="failed 3 times, status 500: broken"):
            asked_of(url, retries=2)
        assert len(asked) == 3
    with pytest.raises(ConnectionError, match="failed 2 times, ClientConnectorError"):
        asked_of(url, model="gone", retries=1)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((401, "no"), r"refused the request, status 401: no\. Name the variable .* reward_kwargs\.api_key_env"),
        ((404, "no"), r"status 404: no\. Look at reward_kwargs\.base_url"),
        ((400, "no"), r"status 400"),
        ((200, "<html>"), r"answered what is not JSON: '<html>'"),
        ((200, "{}"), r"gave no choices\[0\]\.message\.content"),
    ],
)
def test_what_asking_again_would_not_mend_is_said_at_once(answer, problem):
    with answering(lambda *_: answer) as (url, asked):
        with pytest.raises(ValueError, match=problem):
            asked_of(url)
        assert len(asked) == 1


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://localhost", "http://"])
def test_what_is_no_address_is_said_at_once(address: str):
    with pytest.raises(ValueError, match=r"is no address: reward_kwargs\.base_url begins with http://"):
        asked_of(address)


def test_answers_are_kept_by_all_that_decides_them(tmp_path: Path):
    cache = str(tmp_path / "deep" / "judge.sqlite")
    with answering(lambda number, _: says(f"Score: {number}")) as (url, asked):
        assert [asked_of(url, cache=cache)["score"] for _ in range(2)] == [0.1, 0.1]
        for other, score in (({"max_tokens": 5}, 0.2), ({"model": "b"}, 0.3)):
            assert asked_of(url, cache=cache, **other)["score"] == score
        assert asked_of(url, "other", cache=cache)["score"] == 0.4 and len(asked) == 4
    with answering(lambda *_: says("no grade")) as (url, asked):
        for _ in range(2):
            with pytest.raises(ValueError, match="no grade"):
                asked_of(url, "third", cache=cache)
        assert len(asked) == 2  # such an answer is not kept


def manager(timeout: float = 60.0, **reward_kwargs: Any) -> Any:
    function = RewardFunctionConfig("extras.judge.judge", "judge", reward_kwargs)
    return load_reward_manager(RewardConfig(custom_reward_function=function, timeout=timeout), None, None)


def test_it_is_a_reward_function_whose_rows_without_a_grade_are_not_scored():
    rows = {"prompts": ["1+1"] * 3, "responses": ["good", "bad", "please"], "ground_truths": ["2", None, "2"]}
    with answering(by_length) as (url, _):
        scores = manager(base_url=url)(DataProto.from_single_dict(rows))
    assert [row["score"] for row in scores[:2]] == [0.5, 0.0]
    assert isinstance(scores[2], NotScored) and scores[2].outcome == "error" and "no grade" in scores[2].reason
    with pytest.raises(ConfigError, match=r"judge .* needs base_url, and none of 1 rows has one"):
        manager(model="a").check({0: {"prompt": "1+1"}})


def test_our_own_server_is_a_judge(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", servers.KEY)
    with pytest.raises(ValueError, match="answer has no grade"):  # of a model with random weights
        asked_of(address, api_key_env="JUDGE_KEY", template="{response}", max_tokens=4)
    with pytest.raises(ValueError, match=r"status 401.*api_key_env"):
        asked_of(address, model="tiny", template="{response}", max_tokens=4)
