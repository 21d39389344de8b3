"""Clients of three APIs in one form, and the server of a model that answers them by calls of a tool."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from configs.schema import RolloutConfig
from data.types import Completion, Request
from extras.server.app import Served
from extras.server.streaming import StreamingEngine
from extras.server.tests.fixtures import compose, serving
from workers.rollout import Rollout

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": NUMBER}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALLS = "So:" + "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2))
History, Answer = list[Any], tuple[list[Any], str, list[tuple[str, int]]]  # with the answer, its text and its calls


class Chat:
    """Asks by OpenAI's chats. `used` has the numbers of tokens that the server has counted last."""

    def __init__(self, **address: str) -> None:
        self.client, self.late = openai.OpenAI(**address, max_retries=0), openai.APITimeoutError
        self.used = (0, 0)

    def ask(self, history: History, calls: bool = False, **more: Any) -> Answer:
        more |= {"tools": TOOLS} if calls else {}
        reply = self.client.chat.completions.create(model="tiny", messages=history, **more)
        message, self.used = reply.choices[0].message, (reply.usage.prompt_tokens, reply.usage.completion_tokens)
        calls = [(call.id, json.loads(call.function.arguments)["a"]) for call in message.tool_calls or []]
        return [*history, message], message.content or "", calls

    def results(self, texts: dict[str, str]) -> History:
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in texts.items()]


class Responses(Chat):
    def ask(self, history: History, calls: bool = False, stream: bool = False, **more: Any) -> Answer:
        more |= {"model": "tiny", "input": history} | ({"tools": [{"type": "function", **FUNCTION}]} if calls else {})
        if stream:
            with self.client.responses.stream(**more) as events:
                kinds, response = [event.type for event in events], events.get_final_response()
            assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        else:
            response = self.client.responses.create(**more)
        calls = [item for item in response.output if item.type == "function_call"]
        assert response.status == "completed" and len(response.output) == bool(response.output_text) + len(calls)
        self.used = response.usage.input_tokens, response.usage.output_tokens
        calls = [(call.call_id, json.loads(call.arguments)["a"]) for call in calls]
        return [*history, *response.output], response.output_text, calls

    def results(self, texts: dict[str, str]) -> History:
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in texts.items()]


class Messages(Chat):
    """Asks by Anthropic's API."""

    def __init__(self, **address: str) -> None:
        anthropic = pytest.importorskip("anthropic")
        self.client, self.late = anthropic.Anthropic(**address, max_retries=0), anthropic.APITimeoutError

    def ask(self, history: History, calls: bool = False, stream: bool = False, **more: Any) -> Answer:
        more |= {"model": "tiny", "max_tokens": 300, "messages": history}
        more |= {"tools": [{"name": "add", "description": "Adds.", "input_schema": NUMBER}]} if calls else {}
        if stream:
            with self.client.messages.stream(**more) as events:
                reply = events.get_final_message()
        else:
            reply = self.client.messages.create(**more)
        text = "".join(block.text for block in reply.content if block.type == "text")
        calls = [(block.id, block.input["a"]) for block in reply.content if block.type == "tool_use"]
        assert reply.stop_reason == ("tool_use" if calls else "end_turn")
        self.used = reply.usage.input_tokens, reply.usage.output_tokens
        return [*history, {"role": "assistant", "content": reply.content}], text, calls

    def results(self, texts: dict[str, str]) -> History:
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in texts.items()]
        return [{"role": "user", "content": blocks}]


def served_by(kind: type[Rollout], folder: Path, prompt: int = 30, response: int = 8) -> Served:
    """A server around an engine of a test's own class."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = kind(RolloutConfig(prompt_length=prompt, response_length=response), tokenizer, None)
    streaming = StreamingEngine(engine, nullcontext, ThreadPoolExecutor(1))
    return Served("tiny", tokenizer, streaming, 999, prompt + response, response)


@contextmanager
def calling(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A server whose model says CALLS where it is shown the tool and no results end the prompt, else "fine"; and the
    prompts that it was given."""
    tokenizer, prompts = AutoTokenizer.from_pretrained(folder), []

    class Calling(Rollout):
        def generate(self, requests: list[Request]) -> list[Completion]:
            prompts.extend(tokenizer.decode(request.prompt_ids) for request in requests)
            calls = '"add"' in prompts[-1] and "<|end|><|tool|>" not in prompts[-1]
            ids = tokenizer(CALLS if calls else "fine")["input_ids"]
            cut = ids[: min(request.sampling.max_tokens for request in requests)]
            reason = "stop" if cut == ids else "length"
            return [Completion(one.id, cut, [-1.0] * len(cut), reason, 0) for one in requests]

    with serving(served_by(Calling, folder, 3000, 300), compose(folder)) as url:
        yield url, prompts
