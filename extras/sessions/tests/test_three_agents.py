"""Agents as people write them, by four clients: they learn from all that reached them and nothing else, repeatably."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import SystemRandom
from time import sleep
from typing import Any

import httpx
import pytest
import torch

from data.chat import encode_prompt
from data.protocol import DataProto
from data.types import Completion, Request
from extras.server.tests.clients import TOOLS, Answer, Chat, History, Messages, Responses
from extras.sessions.tests.test_sessions import TOKENIZER, play, prompts, settings, shown
from tests.engines import Scripted


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Stream(Chat):
    def __init__(self, base_url: str, **_: str) -> None:
        self.client, self.late = httpx.Client(base_url=base_url), httpx.TimeoutException

    def ask(self, history: History, calls: bool = False, timeout: float = 60) -> Answer:
        body = {"model": "m", "stream": True, "messages": history, "tools": TOOLS if calls else None}
        with self.client.stream("POST", "chat/completions", json=body, timeout=timeout) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        text = "".join(delta.get("content") or "" for delta in deltas)
        made = [call for delta in deltas for call in delta.get("tool_calls") or []]
        calls = [(call["id"], json.loads(call["function"]["arguments"])["a"]) for call in made]
        return [*history, {"role": "assistant", "content": text, "tool_calls": made}], text, calls


class Late(Chat):
    """Asks at odd times."""

    def ask(self, *arguments: Any, **more: Any) -> Answer:
        sleep(SystemRandom().random() * 0.05)
        return super().ask(*arguments, **more)


CLIENTS = {"openai": Chat, "openai responses": Responses, "anthropic": Messages, "httpx": Stream}


# An agent yields the numbers that reach it, and last how many rows it has begun.
def loop_with_tools(client: Any, history: History) -> Iterator[Any]:
    calls = [()]
    while calls:
        history, text, calls = client.ask(history, calls=True)
        yield [a for _, a in calls] or [text]
        history += client.results({call_id: str(a + 1) for call_id, a in calls}) if calls else []
    yield 1


def votes_with_retries(client: Any, history: History) -> Iterator[Any]:
    """The first answer comes when the client has hung up; of three votes at once each is asked for until it is odd."""
    for timeout in (0.2, 30):
        try:
            history, text, _ = client.ask([*history, user("hurry")], timeout=timeout)
        except client.late:
            continue
        yield [text]

    def vote(votes: list[str]) -> list[str]:
        while not votes or int(votes[-1]) % 2 == 0:
            votes.append(client.ask([user("vote")])[1])
        return votes

    with ThreadPoolExecutor(3) as pool:
        yield (votes := [text for texts in pool.map(vote, ([], [], [])) for text in texts])
    yield 1 + len(votes)


def sub_agents(client: Any, history: History) -> Iterator[Any]:
    def explore(name: str) -> list[str]:
        explored, first, _ = client.ask([user(f"explore {name}")])
        return [first, client.ask([*explored, user("sure?")])[1]]

    history, plan, _ = client.ask(history)
    with ThreadPoolExecutor(2) as pool:
        results = [*pool.map(explore, "st")]
    history, text, _ = client.ask([*history, user(f"found {results[0][1]} and {results[1][1]}")])
    summary = {"role": "assistant", "content": f"in short {plan[:3]}"}  # in place of all answers
    yield [plan, *results[0], *results[1], text, client.ask([history[0], summary, user("so?")])[1]]
    yield 4


def crowd(client: Any, history: History) -> Iterator[Any]:
    """Branches of one answer, two of them alike, votes until they are odd and a judge, all at once."""
    history, plan, _ = client.ask(history)

    def branch(name: str) -> list[str]:
        explored, first, _ = client.ask([*history, user(name)])
        return [first, client.ask([*explored, user("sure?")])[1], client.ask([*history, user(name)])[1]]

    def vote(_: str) -> list[str]:
        votes = ["0"]
        while int(votes[-1]) % 2 == 0:
            votes.append(client.ask([user("vote")])[1])
        return votes[1:]

    def judge(_: str) -> list[str]:
        for text in ("vote", plan):
            client.ask([user(text)], extra_body={"train": False})
        return client.ask([user("vote")], max_tokens=300)[1:2]

    with ThreadPoolExecutor(7) as pool:
        work = [
            pool.submit(part, name)
            for part, name in zip((branch,) * 3 + (vote,) * 3 + (judge,), "abbcccd", strict=True)
        ]
        yield [plan, *(text for each in work for text in each.result())]
    yield 0


def program(base_url: str, api_key: str, messages: History, agent: str, api: str, log: str) -> int:
    *answers, rows = globals()[agent]({"late": Late, **CLIENTS}[api](base_url=base_url, api_key=api_key), messages)
    with Path(log).open("a") as file:
        file.write("".join(f"{number}\n" for numbers in answers for number in numbers))
    return rows


class Drawing(Scripted):
    """Draws numbers by the seed, or calls with them, and takes its time."""

    def completion(self, request: Request) -> Completion:
        self.answer = lambda text, times: self.say(text, times, request.seed % 10**9)
        return super().completion(request)

    def say(self, text: str, times: int, number: int) -> str:
        sleep(0.5 if text.endswith("hurry") and times == 0 else 0.005)
        made = text.count('"arguments": {')
        if '"name": "add"' not in text or made > 2:
            return str(number)
        calls = (f'{{"name": "add", "arguments": {{"a": {number + n}}}}}' for n in range(1 if made else 2))
        return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


def run(agent: str, api: str, log: Path, workers: int = 1) -> tuple[list[DataProto], list[str], list[str]]:
    """Plays two episodes; returns their rows, a batch a worker, the answers in their trained tokens, and those that
    reached the agent."""
    config = settings(f"{__file__}:program", "data.max_prompt_length=1500", response=500)
    asked = [[user(f"{number}+1=?")] for number in range(2)]
    ids = [encode_prompt(messages, TOKENIZER) for messages in asked]
    columns = {"agent": [agent] * 2, "api": [api] * 2, "log": [str(log)] * 2}
    rows = prompts(2, raw_prompt=asked, raw_prompt_ids=ids, **columns)
    shares = [(0, rows)] if workers == 1 else [(row, rows.select_idxs([row])) for row in range(2)]
    batches = [play(config, share, Drawing(config, TOKENIZER, None), first_row=row) for row, share in shares]
    spans = "".join(text for batch in batches for row in range(len(batch)) for text in shown(batch, row)[1::2])
    return batches, re.findall(r"\d+", spans), log.read_text().split()


def told(batches: list[DataProto]) -> list[Any]:
    """Everything that a run says of its rows, in their order."""
    names = ("episode", "end_reason", "__reward_score__", "__agent_metrics__", "__num_turns__", "failure")
    columns = [[value for batch in batches for value in batch.non_tensor_batch[name].tolist()] for name in names]
    tensors = ("prompts", "responses", "response_mask", "turn_ids", "rollout_log_probs", "attention_mask")
    return columns + [torch.cat([batch.batch[name] for batch in batches]).tolist() for name in tensors]


@pytest.mark.parametrize("api", CLIENTS)
@pytest.mark.parametrize("agent", ["loop_with_tools", "votes_with_retries", "sub_agents"])
def test_what_reaches_an_agent_is_learnt_once_and_again_in_another_run(agent: str, api: str, tmp_path: Path):
    pytest.importorskip(api.partition(" ")[0])
    batches, learnt, reached = run(agent, api, tmp_path / "first")
    [batch] = batches
    assert batch.failure.tolist() == [None] * len(batch), batch.failure
    assert Counter(learnt) == Counter(reached) and len(set(reached)) == len(reached)
    assert sum(batch.non_tensor_batch["__reward_score__"]) == len(batch)
    again, *_ = run(agent, api, tmp_path / "second", workers=2)
    assert told(again) == told(batches)


def test_rows_and_all_that_is_said_of_them_are_the_same_whenever_their_requests_come(tmp_path: Path):
    batches, learnt, reached = run("crowd", "late", tmp_path / "first")
    assert Counter(learnt) == Counter(reached) and not any(batches[0].failure)
    for number in range(20):
        again, *_ = run("crowd", "late", tmp_path / str(number), workers=1 + number % 2)
        assert told(again) == told(batches)
