"""Programs as agents: unchanged clients of OpenAI's API, as commands and as functions, play rows by the policy."""

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from textwrap import dedent, indent
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from configs.errors import ConfigError
from configs.import_utils import load_named
from configs.schema import ModelConfig
from custom.tiny_model import build_tokenizer
from data.chat import encode_prompt
from data.protocol import DataProto
from data.types import Completion, Request, SamplingParams
from extras.sandbox.run import fences
from extras.server.tests.clients import CALLS, FUNCTION, calling
from extras.sessions.session import LEAVE_SECONDS
from tests.engines import Scripted
from tests.processes import is_alive, until
from tests.runs import compose, learning_metrics, run_main
from tests.test_chat_families import template_of
from training.environment import assign_agents, load_agents
from training.episode_rows import deadline_of
from training.reward import add_scores
from training.reward_function import FunctionReward
from workers.agent_loop import AgentLoop
from workers.hf_rollout import HFRollout
from workers.models import load_causal_lm
from workers.rollout import build_rollout

TOKENIZER = build_tokenizer()
SAMPLED = SamplingParams(True, 1.0, -1, 1.0, 24, stop_token_ids=tuple(range(0, 60, 3)))
MESSAGES = [{"role": "user", "content": "1+1=?"}]
AGENT = "actor_rollout_ref.rollout.agent"
CLIENT = """
import json, os, sys, time, openai
client = openai.OpenAI(max_retries=0)
def ask(messages, **more):
    return client.chat.completions.create(model="any", messages=messages, **more).choices[0].message
def user(text):
    return {"role": "user", "content": text}
def refused(messages):
    try:
        ask(messages)
    except openai.BadRequestError as error:
        return error.code == "context_length_exceeded"
def fill():
    assert refused([*messages, ask(messages), user("b" * 300)])
row = json.loads(sys.stdin.readline())
messages = row["messages"]
"""
LIGHT = """
import json, os, sys, time, urllib.request
def post(url, body):
    sent = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(sent))
def ask(task, messages):
    body = {"model": "any", "messages": messages}
    return post(task["base_url"] + "/chat/completions", body)["choices"][0]["message"]
"""


def settings(program: str, *overrides: str, response: int = 160) -> Any:
    rows = ["env.id=null", "data.train_files=x.jsonl", "data.max_prompt_length=64"]
    return compose(*rows, f"data.max_response_length={response}", f"{AGENT}.program='{program}'", *overrides)


def prompts(count: int = 1, **columns: Any) -> DataProto:
    rows = {"raw_prompt": [MESSAGES] * count, "raw_prompt_ids": [encode_prompt(MESSAGES, TOKENIZER)] * count}
    rows |= {"data_source": ["sums"] * count, "extra_info": [{"index": place} for place in range(count)]}
    return DataProto.from_single_dict(rows | columns)


def play(
    config: Any, rows: DataProto | None = None, engine: Any = None, answer: Any = None, first_row: int = 0
) -> DataProto:
    engine = engine or Scripted(config, TOKENIZER, answer or (lambda text, times: "12"))
    loop = AgentLoop(config, TOKENIZER, engine, None)
    return loop.generate_sequences(assign_agents(rows or prompts(), config), SAMPLED, seed=7, first_row=first_row)


def command(folder: Path, text: str, head: str = CLIENT) -> str:
    (folder / "program.py").write_text(head + dedent(text))
    return f"python {folder}/program.py"


def function(folder: Path, text: str, name: str = "agent") -> str:
    (folder / f"{folder.name}.py").write_text(dedent(text))
    return f"{folder}/{folder.name}.py:{name}"


def within(folder: Path, text: str) -> str:
    """A function with OpenAI's client, which asks for answers by `ask` and for their messages by `say`."""
    return function(folder, """
import openai
from contextlib import suppress
def agent(base_url, messages):
    client = openai.OpenAI(base_url=base_url, api_key="x", max_retries=0)
    ask = lambda messages, **more: client.chat.completions.create(model="m", messages=messages, **more)
    say = lambda messages, **more: ask(messages, **more).choices[0].message
    user = lambda text: {"role": "user", "content": text}
""" + indent(dedent(text), "    "))  # fmt: skip


def shown(batch: DataProto, row: int) -> list[str]:
    """The texts of a row that the policy read and drew, in turn, from what it read first."""
    mask = torch.cat([torch.zeros_like(batch.prompts[row]), batch.response_mask[row]])[batch.attention_mask[row] == 1]
    ids = batch.input_ids[row][batch.attention_mask[row] == 1]
    starts = [0, *(place for place in range(1, len(mask)) if mask[place] != mask[place - 1]), len(mask)]
    return [TOKENIZER.decode(ids[one:two]) for one, two in pairwise(starts)]


class Recording(HFRollout):
    """The model itself; notes what it is asked and draws."""

    def add(self, request: Request) -> None:
        self.__dict__.setdefault("asked", []).append(request)
        super().add(request)

    def step(self) -> list[Completion]:
        done = super().step()
        self.__dict__.setdefault("drawn", []).extend(done)
        return done


def test_a_stock_client_goes_on_in_one_row_by_the_ids_that_were_sampled(tiny_model: Path, tmp_path: Path):
    """The answers of random weights hold special tokens, which their texts lose."""
    program = command(tmp_path, """
        for number in range(4):
            messages += [ask(messages, max_tokens=8, temperature=0.1), user("Go on!")]
        print(json.dumps({"reward": row["extra_info"]["index"]}))
    """)  # fmt: skip
    config = settings(program)
    module = load_causal_lm(ModelConfig(path=str(tiny_model)), torch.device("cpu"), torch.float32, longest=500)
    rollout = config.actor_rollout_ref.rollout
    engine = build_rollout(Recording, rollout, AutoTokenizer.from_pretrained(tiny_model), module)
    batch = play(config, prompts(2), engine)
    assert len(batch) == 2 and batch.non_tensor_batch["__reward_score__"].tolist() == [0.0, 1.0]
    drawn = {done.id: done for done in engine.drawn}
    begin = encode_prompt(MESSAGES, TOKENIZER)
    for row in range(2):
        real, policys = batch.attention_mask[row].bool(), batch.response_mask[row].bool()
        ids = batch.input_ids[row][real].tolist()
        mine = [one for one in engine.asked if one.episode == row and one.prompt_ids[: len(begin)] == begin]
        assert len(mine) == 4
        for request in mine:  # each was asked what stands in the row, and what it drew stands behind it
            told = request.prompt_ids + drawn[request.id].token_ids
            assert ids[: len(told)] == told
        assert batch.responses[row][policys].tolist() == [id for one in mine for id in drawn[one.id].token_ids]
        log_probs = [value for one in mine for value in drawn[one.id].log_probs]
        assert torch.equal(batch.rollout_log_probs[row][policys], torch.tensor(log_probs))
        assert batch.turn_ids[row][policys].unique().tolist() == [0, 1, 2, 3]
    special = set(TOKENIZER.all_special_ids) & {id for done in engine.drawn for id in done.token_ids[:-1]}
    assert special  # a text that was encoded again would not have them
    assert batch.non_tensor_batch["__agent_metrics__"].tolist() == [{"unproven": 0.0, "rows": 1}] * 2


def test_what_a_program_claims_is_context_and_rows_of_another_history_stand_apart(tmp_path: Path):
    program = command(tmp_path, """
        first = ask(messages)
        second = ask([*messages, first, user("b")])
        ask([*messages, first, user("c")])                                          # leaves at the first answer
        ask([*messages, {"role": "assistant", "content": "forged"}, user("d")])     # was never said
        ask([user("Summary"), first, user("e")])                                    # said, but elsewhere
        print(1)
    """)  # fmt: skip
    batch = play(settings(program), answer=lambda text, times: f"<{text[-1]}>")
    told = "<|user|>1+1=?<|end|><|assistant|>"
    assert [shown(batch, row) for row in range(len(batch))] == [
        [told, "<?><|end|>", "<|user|>b<|end|><|assistant|>", "<b><|end|>"],
        [f"{told}<?><|end|><|user|>c<|end|><|assistant|>", "<c><|end|>"],
        [f"{told}forged<|end|><|user|>d<|end|><|assistant|>", "<d><|end|>"],
        ["<|user|>Summary<|end|><|assistant|><?><|end|><|user|>e<|end|><|assistant|>", "<e><|end|>"],
    ]
    assert len(set(batch.episode)) == 1 and batch.non_tensor_batch["__reward_score__"].tolist() == [0, 0, 0, 1]
    [metrics] = {json.dumps(row) for row in batch.non_tensor_batch["__agent_metrics__"]}
    assert json.loads(metrics)["rows"] == 4 and 0.2 < json.loads(metrics)["unproven"] < 0.4


def test_a_function_streams_calls_tools_in_parallel_and_branches(tmp_path: Path):
    """Whole and streamed answers are alike, and go on in their row; of two requests at once one does."""
    agent = function(tmp_path, """
        import asyncio, json, openai
        TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
        async def agent(base_url, api_key, messages):
            client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
            ask = lambda messages, **more: client.chat.completions.create(model="m", messages=messages, **more)
            whole = (await ask(messages, tools=TOOLS)).choices[0].message
            assert [json.loads(call.function.arguments) for call in whole.tool_calls] == [{"a": 1}, {"a": 2}]
            results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in whole.tool_calls]
            text = ""
            async for chunk in await ask([*messages, whole, *results], tools=TOOLS, stream=True):
                text += chunk.choices[0].delta.content or ""
            plain = [*messages, whole, *results, {"role": "assistant", "content": text}]
            await asyncio.gather(*(ask([*plain, {"role": "user", "content": more}], tools=TOOLS) for more in "xy"))
            stopped = await ask([{"role": "user", "content": "z"}], stop=["2"])
            assert stopped.choices[0].message.content == "1", stopped
            return True
    """)  # fmt: skip
    calls = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2))
    answers = {"?": calls, "7": "fine"}
    config = settings(agent, "data.max_prompt_length=900", response=400)
    batch = play(config, answer=lambda text, times: sleep(0.2) or answers.get(text[-1], "123"))
    assert batch.failure.tolist() == [None] * 3, batch.failure
    first, left, stopped = [shown(batch, row) for row in range(3)]
    assert first[1::2] == [f"{calls}<|end|>", "fine<|end|>", "123<|end|>"]
    x, y = (f"<|user|>{more}<|end|><|assistant|>" for more in "xy")
    assert first[4] == x and left == ["".join(first[:4]) + y, "123<|end|>"] and stopped[1] == "12"


def test_rows_are_the_same_whichever_request_comes_first(tmp_path: Path):
    """A client goes on from the longer of two answers that read alike; of two at once the same is scored."""
    program = within(tmp_path, """
        from concurrent.futures import ThreadPoolExecutor
        from time import sleep
        ask(messages, max_tokens=1)
        whole = say(messages)
        with ThreadPoolExecutor() as pool:
            for text in "ba":
                pool.submit(ask, [*messages, whole, user(text)])
                sleep(0.1)
    """)  # fmt: skip
    batch = play(settings(program), answer=lambda text, times: sleep(0.5) or "1")
    told, whole = "<|user|>1+1=?<|end|><|assistant|>", "1<|end|>"
    a, b = (f"<|user|>{text}<|end|><|assistant|>" for text in "ab")
    rows = [[told, "1"], [told, whole, a, whole], [told + whole + b, whole]]
    assert [shown(batch, row) for row in range(len(batch))] == rows


LEAVE = "chunks = ask(messages, stream=True); next(chunks); chunks.close()"
LEAVES = {  # how a client asks for the first answer: seconds that each takes, and whether the first reaches it
    "hangs up": ("with suppress(openai.APITimeoutError): ask(messages, timeout=0.15)", 0.4, False),
    "leaves a stream": (LEAVE, 0.4, False),
    "leaves a stream of quick answers": (LEAVE, 0, False),
    "leaves a read stream": ("with ask(messages, stream=True) as chunks: next(chunks), next(chunks)", 0.4, True),
}  # fmt: skip


@pytest.mark.parametrize("how", LEAVES)
def test_an_answer_that_its_client_left_is_not_trained_on(tmp_path: Path, how: str, monkeypatch: Any):
    monkeypatch.setattr("extras.sessions.session.LEAVE_SECONDS", 10 * LEAVE_SECONDS)  # this machine may be slow
    code, seconds, reaches = LEAVES[how]
    program = within(tmp_path, f"{code}\nask(messages)")
    batch = play(settings(program), answer=lambda text, times: sleep(seconds) or f"<{times}>")
    assert batch.failure.tolist() == [None] * len(batch), batch.failure
    said = [shown(batch, row)[1:] for row in range(len(batch))]
    assert said == ([["<0><|end|>"], ["<1><|end|>"]] if reaches else [["<1><|end|>"]])


class Stopping(Scripted):
    """Stops at every id that a request says, too."""

    def completion(self, request: Request) -> Completion:
        done = super().completion(request)
        stops = self.all_stop_ids(request.sampling)
        end = next(place for place, token_id in enumerate(done.token_ids, 1) if token_id in stops)
        return Completion(done.id, done.token_ids[:end], done.log_probs[:end], "stop", 0)


@pytest.mark.parametrize(("more", "answer", "between"), [
    ("", "abZd<|end|>", "<|user|>"),
    ("stop_token_ids=[Z]", "abZ", "<|end|><|user|>"),
    ("stop_token_ids=[Z, END]", "abZ", "<|end|><|user|>"),
    ("stop_token_ids=[END]", "abZd<|end|>", "<|user|>"),
    ("stop=['Zd']", "abZd", "<|end|><|user|>"),
])  # fmt: skip
def test_a_stop_id_of_a_request_does_not_stand_for_the_end_of_a_turn(tmp_path: Path, more, answer, between):
    z, end = TOKENIZER.convert_tokens_to_ids("Z"), TOKENIZER.eos_token_id
    config = settings(within(tmp_path, f"""
        Z, END = {z}, {end}
        messages += [say(messages, extra_body=dict({more})), user("b")]
        ask(messages)
    """))  # fmt: skip
    batch = play(config, engine=Stopping(config, TOKENIZER, lambda text, times: "abZd"))
    assert shown(batch, 0)[1:3] == [answer, f"{between}b<|end|><|assistant|>"]


def test_one_call_is_answered_where_one_is_asked_for_and_none_where_none_is(tmp_path: Path):
    """Answers are those of vLLM's server: the prompt shows the tools in any case, so that all turns are of one row."""
    program = within(tmp_path, """
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        for more in ({}, {"parallel_tool_calls": False}, {"tool_choice": "none"}, {"parallel_tool_calls": True}):
            said = say(messages, tools=tools, **more)
            messages += [said, user(str(len(said.tool_calls or [])) + (said.content or "-")[:5])]
    """)  # fmt: skip
    calls = "".join(f'<tool_call>{{"name": "f", "arguments": {{"n": {n}}}}}</tool_call>' for n in (1, 2))
    batch = play(settings(program, "data.max_prompt_length=900", response=900), answer=lambda text, times: calls)
    assert batch.failure.tolist() == [None] and '"name": "f"' in shown(batch, 0)[0]
    assert shown(batch, 0)[1::2] == [f"{calls}<|end|>"] * 4
    told = [text.removeprefix("<|user|>").partition("<|end|>")[0] for text in shown(batch, 0)[2::2]]
    assert told == ["2-", "1-", "0<tool"]


def test_a_result_goes_on_in_the_row_of_its_call_where_it_may_stand_behind_calls_alone(tmp_path: Path, monkeypatch):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|start|>", "<|stop|>", "<|eot|>"], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = template_of("gpt-oss"), "<|eot|>"
    monkeypatch.setattr(f"{__name__}.TOKENIZER", tokenizer)
    program = within(tmp_path, """
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        said = say(messages, tools=tools)
        ask([*messages, said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "7"}], tools=tools)
    """)  # fmt: skip
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    config = settings(program, "data.max_prompt_length=900", response=300)
    batch = play(config, answer=lambda text, times: "so" if '"7"' in text else call)
    assert batch.failure.tolist() == [None], batch.failure
    told = '<|start|>tool f<|stop|>"7"<|end|><|start|>assistant'
    assert shown(batch, 0)[1:] == [f"{call}<|eot|>", told, "so<|eot|>"]


def test_what_a_request_says_not_to_train_on_is_context_and_no_row_of_it_is_scored(tmp_path: Path):
    program = within(tmp_path, """
        judge = {"extra_body": {"train": False}}
        first = say(messages)
        ask([user("judge")], **judge)
        later = [*messages, first, user("b")]
        later += [say(later, **judge), user("c")]
        ask(later)
        ask([user("judge again")], **judge)
    """)  # fmt: skip
    batch = play(settings(program), answer=lambda text, times: f"<{text[-1]}>")
    told = "<|user|>1+1=?<|end|><|assistant|>"
    assert [shown(batch, row) for row in range(3)] == [
        ["<|user|>judge<|end|><|assistant|><e><|end|>"],
        ["<|user|>judge again<|end|><|assistant|><n><|end|>"],
        [told, "<?><|end|>", "<|user|>b<|end|><|assistant|><b><|end|><|user|>c<|end|><|assistant|>", "<c><|end|>"],
    ]
    assert batch.non_tensor_batch["__reward_score__"].tolist() == [0.0, 0.0, None]
    assert not batch.rollout_log_probs[batch.response_mask == 0].any() and set(batch.end_reason) == {"terminated"}


@pytest.mark.parametrize(("returns", "reward"), [
    ("'42'", None), ("None", None), ("2", 2.0), ("True", 1.0), ("numpy.float32(0.5)", 0.5), ("{'reward': 0.5}", 0.5),
    ("{'reward': None}", None), ("{'score': 1}", "its reward is {'score': 1}"), ("[1]", "no finite number"),
])  # fmt: skip
def test_a_function_earns_by_a_number_or_a_dict(tmp_path: Path, returns: str, reward: Any):
    batch = play(settings(within(tmp_path, f"import numpy\nask(messages)\nreturn {returns}")))
    if isinstance(reward, str):
        assert reward in batch.failure[0]
    else:
        assert batch.non_tensor_batch["__reward_score__"].tolist() == [reward], batch.failure


def test_thoughts_that_stay_in_view_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The second template drops them, as Qwen 3's does once a user speaks."""
    config, tokenizer = (
        settings(command(tmp_path, "ask(json.loads(sys.stdin.readline()), [])", LIGHT)),
        build_tokenizer(),
    )
    keeps, told = tokenizer.chat_template, []
    for tokenizer.chat_template in (keeps, keeps.replace("['content']", "['content'].split('</think>')[-1]")):
        loop = AgentLoop(config, tokenizer, Scripted(config, tokenizer, None), None)
        loop.generate_sequences(assign_agents(prompts(2), config), SAMPLED, seed=7, first_row=0)
        told.append(
            capsys.readouterr().err.count("drops the thoughts of an answer before messages of the role user; in")
        )
    assert told == [0, 1]


CLIENTS = {  # by package: an agent that has its two calls answered, and asks again
    "langchain_openai": """
        from langchain_core.messages import ToolMessage
        def agent(base_url, api_key, messages):
            asked = {"base_url": base_url, "api_key": api_key}
            for by_responses in (False, True):
                told = [*messages]
                model = langchain_openai.ChatOpenAI(model="tiny", use_responses_api=by_responses, **asked)
                model = model.bind_tools([{"type": "function", "function": FUNCTION}])
                for stream in (False, True, False):
                    reply = functools.reduce(operator.add, model.stream(told)) if stream else model.invoke(told)
                    results = [ToolMessage("7", tool_call_id=call["id"]) for call in reply.tool_calls]
                    told += [reply, *(results or [AGAIN])]
    """,
    "litellm": """
        def agent(base_url, api_key, messages):
            asked = {"api_base": base_url, "api_key": api_key}
            for model in ("openai/tiny", "anthropic/tiny"):
                told = [*messages]
                for stream in (False, True, False):
                    tools = [{"type": "function", "function": FUNCTION}]
                    reply = litellm.completion(model, told, tools=tools, stream=stream, max_tokens=200, **asked)
                    reply = litellm.stream_chunk_builder([*reply]) if stream else reply
                    reply = reply.choices[0].message
                    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"}
                               for call in reply.tool_calls or []]
                    told += [reply.model_dump(), *(results or [AGAIN])]
            response = litellm.responses(input="Hi", model="openai/tiny", **asked)
            assert response.output[0].content[0].text == "fine"
    """,
}


HEAD = f"""
import functools, operator, openai
AGAIN = {{"role": "user", "content": "Again!"}}
FUNCTION = {FUNCTION}
"""
TOLD = "<|tool|>7<|end|><|tool|>7<|end|><|assistant|>"


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A package, and an agent of its client as a program."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices
    pytest.importorskip(request.param)
    return request.param, function(tmp_path, f"{HEAD}import {request.param}\n{dedent(CLIENTS[request.param])}")


def test_a_client_goes_on_in_its_row(client: tuple[str, str]):
    package, agent = client
    config = settings(agent, "data.max_prompt_length=1500", response=400)
    batch = play(config, answer=lambda text, times: CALLS if text[-1] == "?" else "fine")
    assert batch.failure.tolist() == [None] * len(batch), batch.failure[0]
    row = [f"{CALLS}<|end|>", TOLD, "fine<|end|>"]
    row += ["<|user|>Again!<|end|><|assistant|>", "fine<|end|>"]
    rows = [shown(batch, place)[1:] for place in range(len(batch))]
    expected = {"litellm": [["fine<|end|>"], row, row], "langchain_openai": [row, row]}
    assert sorted(rows, key=len) == expected.get(package, [row])
    assert {metrics["unproven"] for metrics in batch.non_tensor_batch["__agent_metrics__"]} == {0.0}


def test_a_client_is_answered_by_a_server_as_by_a_session(client: tuple[str, str], tiny_model: Path):
    package, agent = client
    play_by = load_named(agent, AGENT)
    with calling(tiny_model) as (url, prompts):
        playing = play_by(f"{url}/v1", "x", [*MESSAGES])
        asyncio.run(playing) if asyncio.iscoroutine(playing) else None
    told = f"<|end|>{TOLD}fine<|end|><|user|>Again!<|end|><|assistant|>"  # calls are as the template writes them
    assert sum(prompt.endswith(told) for prompt in prompts) == (2 if package in ("litellm", "langchain_openai") else 1)


def test_a_completion_goes_on_in_the_row_whose_ids_its_prompt_begins_with(tmp_path: Path):
    """A chat's row is none of them; a prompt of several, or one of ids that are no tokens, is refused."""
    agent = function(tmp_path, """
        import openai
        def agent(base_url, api_key, messages):
            client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
            assert client.models.retrieve("policy").max_model_len == 64 + 160
            def ask(prompt, **more):
                more = {"extra_body": {"return_token_ids": True}, **more}
                [choice] = client.completions.create(model="m", prompt=prompt, **more).choices
                return [*choice.prompt_token_ids, *choice.token_ids]
            client.chat.completions.create(model="m", messages=messages)
            ids = ask("ab")
            ids = ask([*ids, 70, 71])
            *_, last = client.completions.create(model="m", prompt=[*ids, 72], stream=True)
            ask([*ids, 73])  # leaves the row before its last answer
            ask("<|user|>1+1=?<|end|><|assistant|>12<|end|>")
            for wrong in ({"prompt": ["a", "b"]}, {"prompt": [10**6]}, {"prompt": ""}, {"prompt": "a", "echo": True},
                          {"prompt": "a", "n": 2}):
                try:
                    ask(**wrong)
                except openai.BadRequestError:
                    continue
                raise AssertionError(wrong)
            try:
                client.embeddings.create(model="m", input="a")
            except openai.NotFoundError as error:
                assert "/v1/embeddings is not served here; what is: GET /v1/models" in str(error), error
    """)  # fmt: skip
    batch = play(settings(agent), answer=lambda text, times: "12")
    assert batch.failure.tolist() == [None] * len(batch), batch.failure[0]
    more = [TOKENIZER.decode([token]) for token in (70, 71, 72, 73)]
    said, told = "12<|end|>", "<|user|>1+1=?<|end|><|assistant|>"
    assert [shown(batch, row) for row in range(len(batch))] == [
        [told, said],
        ["ab", said, "".join(more[:2]), said, more[2], said],
        [f"ab{said}{more[0]}{more[1]}{said}{more[3]}", said],
        [f"{told}{said}", said],
    ]


def test_a_command_finds_the_policy_by_anthropics_variables_unless_they_lead_elsewhere(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("ANTHROPIC_")]:
        monkeypatch.delenv(name)
    program = command(tmp_path, """
        task = json.loads(sys.stdin.readline())
        ask(task, task["messages"])
        print(int(os.environ.get("ANTHROPIC_BASE_URL") == task["base_url"]))
    """, LIGHT)  # fmt: skip
    rewards = []
    for _ in range(2):
        rewards += play(settings(program)).non_tensor_batch["__reward_score__"].tolist()
        monkeypatch.setenv("ANTHROPIC_API_KEY", "of a judge")
    assert rewards == [1, 0]


def test_one_program_serves_many_tasks_and_one_that_is_lost_holds_up_no_later_one(tmp_path: Path):
    program = command(tmp_path, """
        from threading import Thread
        def play(task):
            ask(task, task["messages"])
            if task["kind"] == "dies":
                os._exit(3)
            if task["kind"] == "raises":
                raise OSError("lost its way")
            time.sleep(0.3)
            post(task["reward_url"], {"reward": None if task["kind"] == "leaves it to the run" else os.getpid()})
        for line in sys.stdin:
            Thread(target=play, args=[json.loads(line)], daemon=True).start()
    """, LIGHT)  # fmt: skip
    config = settings(program, f"{AGENT}.program_serves=true", f"{AGENT}.program_timeout=6")
    loop = AgentLoop(config, TOKENIZER, Scripted(config, TOKENIZER, lambda text, times: "12"), None)

    def of(*kinds: str, loop: AgentLoop = loop) -> tuple[list[str], list[float], list[str]]:
        rows = assign_agents(prompts(len(kinds), kind=list(kinds)), config)
        batch = loop.generate_sequences(rows, SAMPLED, seed=7, first_row=0)
        return batch.end_reason.tolist(), batch.non_tensor_batch["__reward_score__"].tolist(), batch.failure.tolist()

    _, pids, _ = of(*["fine"] * 30)
    assert len(set(pids)) == 1 and of("fine")[1] == pids[:1]  # for all, and in the next step too
    ends, rewards, failures = of("fine", "leaves it to the run", "raises")
    assert ends == ["terminated", "terminated", "timeout"] and rewards[:2] == [pids[0], None]
    assert "lost its way" in failures[2]
    [other] = of("fine")[1]
    assert other != pids[0] and not is_alive(int(pids[0]))
    ends, _, failures = of("dies")
    assert ends == ["env_error"] and "exit code 3" in failures[0]
    [last] = of("fine")[1]
    del loop, of
    gc.collect()
    until(lambda: not is_alive(int(last)))


def test_tasks_that_wait_for_a_program_that_plays_one_by_one_have_time(tmp_path: Path):
    program = command(tmp_path, """
        for line in sys.stdin:
            task = json.loads(line)
            time.sleep(0.5)
            ask(task, task["messages"])
            post(task["reward_url"], {"reward": 1})
    """, LIGHT)  # fmt: skip
    batch = play(settings(program, f"{AGENT}.program_serves=true", f"{AGENT}.program_timeout=3"), prompts(10))
    assert set(batch.end_reason) == {"terminated"}, batch.failure


def test_a_coroutine_that_blocks_takes_no_time_from_others(tmp_path: Path, monkeypatch: Any, capsys: Any):
    """Twelve with a second each hold their event loop up for 0.25 s each, and ask by a client that is not async."""
    monkeypatch.setattr("extras.tools.shared_loop.LATE", 0.1)
    agent = function(tmp_path, LIGHT + dedent("""
        async def agent(base_url, messages):
            ask({"base_url": base_url}, messages)
            time.sleep(0.25)
            return 1
    """))  # fmt: skip
    batch = play(settings(agent, f"{AGENT}.program_timeout=1"), prompts(12))
    assert set(batch.end_reason) == {"terminated"}, batch.failure
    assert f"program computes or waits without await (at {tmp_path}/" in capsys.readouterr().err


ENDS = {  # what a program does: how its episode ends, and words of the reason
    "exits": ("sys.exit('out of luck')", "env_error", "exit code 1; its last lines: out of luck"),
    "killed": ("os.kill(os.getpid(), 9)", "env_error", "signal SIGKILL"),
    "silent": ("ask(messages)", "terminated", None),
    "cut": ("ask(messages, max_tokens=2)", "answer_cut", None),
    "asks nothing": ("print(1)", "env_error", "without asking the policy"),
    "2 MB": ("ask(messages); print('x' * 2_000_000); print('y' * 2_000_000, file=sys.stderr); print(0.5)",
             "terminated", 0.5),
    "no number": ("ask(messages); print(json.dumps({'reward': 'good'}))", "env_error", "its reward is 'good'"),
    "not finite": ("ask(messages); print('NaN')", "env_error", "no finite number"),
    "unknown": ("client.base_url = str(client.base_url).replace('/s/', '/s/x'); ask(messages)",
                "env_error", "there is no session x"),
    "n=2": ("ask(messages, n=2)", "env_error", "n=2"),
    "too long": ("ask([user('a' * 300)])", "env_error", "maximum context length"),
    "grows": ("for _ in range(9): messages += [ask(messages), user('b' * 40)]", "context_full", 0.0),
    "recovers": ("fill(); ask([user('c')]); print(1)", "terminated", 1.0),
    "recovers and fails": ("fill(); ask([user('c')]); sys.exit('disk full')", "env_error", "disk full"),
    "full and fails": ("fill(); assert refused([user('c' * 300)]); sys.exit('no room')", "context_full", 0.0),
    "full and ends": ("fill(); print(0.5)", "context_full", 0.5),
    "another is too long": ("ask(messages); assert refused([user('a' * 300)]); sys.exit('lost')", "env_error", "lost"),
    "learns nothing": ("ask(messages, extra_body={'train': False}); print(1)", "env_error", "answer to learn from"),
    "leaves a child": ("import subprocess; subprocess.Popen(['sleep', '600']); ask(messages); print(2)",
                       "terminated", 2),
}  # fmt: skip


def test_each_program_ends_its_episode_alone_by_its_name(tmp_path: Path):
    cases = "".join(f"if row['kind'] == {kind!r}:\n    {code}\n" for kind, (code, *_) in ENDS.items())
    program, began = command(tmp_path, cases), monotonic()
    batch = play(settings(program), prompts(len(ENDS), kind=[*ENDS]))
    rewards = dict(zip(batch.kind, batch.non_tensor_batch["__reward_score__"], strict=True))
    found = dict(zip(batch.kind, zip(batch.end_reason, batch.failure, strict=True), strict=True))
    for kind, (_, reason, words) in ENDS.items():
        assert found[kind][0] == reason, (kind, found[kind])
        if reason == "env_error":
            assert words in found[kind][1] and f"{AGENT}.program=" in found[kind][1]
        else:
            assert rewards[kind] == words
    assert not batch.response_mask[batch.end_reason == "env_error"].any()
    assert monotonic() - began < 200
    scored: list[str] = []  # by the run's reward, which is shown the transcripts of those that said no number
    reward = FunctionReward(lambda data_source, solution_str, ground_truth: scored.append(solution_str) or 2.0)
    add_scores(batch, reward, TOKENIZER)
    assert "12" in scored


def test_a_program_that_hangs_is_killed_with_its_children_and_the_key_is_named(tmp_path: Path):
    program = command(tmp_path, f"""
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        open("{tmp_path}/pids", "w").write(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(600)
    """, LIGHT)  # fmt: skip
    batch = play(settings(program, f"{AGENT}.program_timeout=2"))
    assert batch.end_reason.tolist() == ["timeout"] and f"{AGENT}.program_timeout=2 seconds" in batch.failure[0]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    until(lambda: not any(map(is_alive, pids)))
    assert deadline_of(batch) == f"{AGENT}.program_timeout"


@pytest.mark.skipif(not {"namespaces", "seccomp"} <= {*fences()}, reason="this system cannot fence a command")
def test_a_program_in_the_sandbox_reaches_the_policy_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An unchanged client works, with threads and processes of its own; a program of the policy gets no further."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    (elsewhere := tmp_path / "elsewhere").write_text("private")
    (folder := tmp_path / "agent").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        program = command(folder, f"""
            import signal, socket, subprocess, tempfile
            from concurrent.futures import ThreadPoolExecutor
            def refused(deed):
                try:
                    deed()
                except OSError:
                    return True
            assert "HF_TOKEN" not in os.environ
            with tempfile.NamedTemporaryFile("w") as mine:
                mine.write("kept")
            tried = [
                lambda: open({str(folder / "program.py")!r}, "a"),
                lambda: socket.create_connection(("127.0.0.1", {other.getsockname()[1]})),
                lambda: socket.create_connection(("1.1.1.1", 53), 1),
                lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock"),
                lambda: os.kill({os.getpid()}, 0),
                lambda: os.unlink({str(elsewhere)!r}),
                *([lambda: open({str(elsewhere)!r})] if {"Landlock" in fences()} else []),
            ]
            assert all(map(refused, tried)), list(map(refused, tried))
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            child.kill()
            assert child.wait() == -9
            subprocess.Popen(["sleep", "600"])
            with ThreadPoolExecutor(40) as pool:
                said = {{answer.content for answer in pool.map(ask, [messages] * 40)}}
            print(len(said))
        """)  # fmt: skip
        batch = play(settings(program, f"{AGENT}.program_sandbox=true"), prompts(2))
    assert batch.failure.tolist() == [None] * len(batch), batch.failure[0]
    assert [reward for reward in batch.non_tensor_batch["__reward_score__"] if reward] == [1, 1]
    assert elsewhere.exists() and not [*Path(tempfile.gettempdir()).glob("sandbox-*")]


def test_programs_end_with_a_worker_that_is_killed(tmp_path: Path):
    sleeper = "import asyncio, json, os, sys\nfrom extras.sessions.host import Running, host_of\n" + dedent(f"""
        task = dict(base_url="", api_key="of-this-test")
        host = host_of(os.getpid())
        script = "setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' & sleep 600"
        start = Running.start(host, ["sh", "-c", script], task)
        print(asyncio.run_coroutine_threadsafe(start, host.loop).result().process.pid, flush=True)
        sys.stdin.read()
    """)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", sleeper], **pipes, text=True) as worker:
        group, pid = int(worker.stdout.readline()), tmp_path / "pid"
        assert is_alive(group)
        until(lambda: pid.exists() and pid.read_text())
        worker.kill()
    until(lambda: not is_alive(group) and not is_alive(int(pid.read_text())))


def test_a_session_is_not_there_after_its_end(tmp_path: Path):
    agent = function(tmp_path, """
        import openai
        SEEN = []
        def agent(base_url, row):
            SEEN.append(base_url)
            client = openai.OpenAI(base_url=SEEN[0], api_key="x", max_retries=0)
            assert client.models.list().data[0].id == "policy"
            client.chat.completions.create(model="m", messages=row["messages"])
    """)  # fmt: skip
    config = settings(agent)
    assert play(config).end_reason.tolist() == ["terminated"]
    batch = play(config)
    assert batch.end_reason.tolist() == ["env_error"] and "its episode is over" in batch.failure[0]


@pytest.mark.parametrize(("overrides", "words"), [
    (["program=nowhere --x"], "there is no command nowhere"),
    (["program=nowhere.py:agent"], "nowhere.py"),
    (["program='python \"x'"], "No closing quotation"),
    (["program=python", "default_agent_loop=a.py:B"], "are both set"),
    (["program=a.py:f", "program_serves=true"], "program_serves=true: .*takes a command"),
    (["program=a.py:f", "program_sandbox=true"], "program_sandbox=true: .*takes a command"),
])  # fmt: skip
def test_a_program_that_cannot_be_is_refused_before_anything_is_loaded(overrides, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        load_agents(settings("python", *(f"{AGENT}.{each}" for each in overrides)).actor_rollout_ref.rollout.agent)


def test_a_run_learns_from_a_program(tiny_model: Path, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "data_source": "s"}) + "\n" for n in range(8)))
    program = command(tmp_path, """
        task = json.loads(sys.stdin.readline())
        said = ask(task, task["messages"])
        print(len(said["content"]))
    """, LIGHT)  # fmt: skip
    more = f"""
        actor_rollout_ref.model.path={tiny_model} trainer.default_local_dir={tmp_path}/run trainer.logger=[]
        data.train_files={rows} data.train_batch_size=4 data.max_prompt_length=32 data.max_response_length=8
        actor_rollout_ref.rollout.n=2 algorithm.adv_estimator=grpo trainer.total_training_steps=2 trainer.save_freq=-1
    """.split()
    done = run_main(*more, f"{AGENT}.program='{program}'", name="ppo_trainer")
    assert done.returncode == 0, done.stderr[-2000:]
    steps = learning_metrics(tmp_path / "run")
    assert steps[2]["critic/score/mean"] > 0 and steps[2]["agent_loop/unproven/mean"] == 0
