"""OpenAI's Responses API, as a translation of the chat API.

No response is kept: a client sends the items of a conversation back. Reasoning among them is not read.
"""

from collections.abc import Iterator
from typing import Any

from extras.server import translation
from extras.server.bodies import Json
from extras.server.translation import add_call, chat_fields, content_of, objects

REMEDIES = {
    **dict.fromkeys(("previous_response_id", "conversation"), "no response is kept: send all items as input"),
    "background": "no response is kept: wait for it, or stream it",
    "reasoning": "a model thinks as its chat template says: set chat_template_kwargs",
    "text": "an answer is a plain text: ask for a format in the messages",
    "top_logprobs": "ask /v1/chat/completions for log-probs",
}
REPEATED = {  # fields of a request that its response has too, and what they are by default
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled", "user": None,
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None},
}  # fmt: skip


def to_chat(body: Json) -> Json:
    """Returns the body of the chat that asks for the same; raises ValueError for what chats here have not."""
    if "logprobs" in str(body.get("include")):  # the other things to include are none here
        raise ValueError(f"include: {REMEDIES['top_logprobs']}")
    read = ("input", "instructions", "tools", "include", "stream_options")
    fields = chat_fields(body, {"max_output_tokens": "max_tokens"}, REMEDIES, read)
    system = [{"role": "system", "content": text}] if (text := body.get("instructions")) else []
    tools = [function_of(tool) for tool in objects(body.get("tools") or [], "tools")]
    return fields | {"messages": system + messages_of(body.get("input")), "tools": tools}


def function_of(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise ValueError(f"tools: {tool.get('type')!r} is run by OpenAI: give functions, which the agent runs")
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type" and tool[name]}}


def messages_of(items: Any) -> list[Json]:
    """Returns the messages of a chat that the input's items are; calls of one answer of ours are in one message, even
    if their results stand between them."""
    messages: list[Json] = []
    answers: dict[str, Json] = {}  # our own, by what their items' ids have in common
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else objects(items, "input"):
        answer = "".join(str(item.get("id")).split("_")[1:2])
        match item:
            case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
                add_call([answers[answer]] if answer in answers else messages, call_id, name, arguments)
            case {"type": "function_call_output", "call_id": call_id, "output": output}:
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content_of(output, "input")})
            case {"type": "reasoning"}:
                continue
            case {"role": role, "content": content} if item.get("type") in (None, "message"):
                messages.append({"role": role, "content": content_of(content, "input")})
            case _:
                known = "a message, a function_call or a function_call_output, with all of its fields"
                raise ValueError(f"input: an item of the type {item.get('type')!r} must be {known}")
        if answer and messages[-1]["role"] == "assistant":
            answers.setdefault(answer, messages[-1])
    return messages


def from_chat(answer: Json, body: Json) -> Json:
    """Returns the response that an answer of a chat is, to the request `body`."""
    [choice] = answer["choices"]
    name, is_cut = answer["id"].rpartition("-")[2], choice["finish_reason"] == "length"
    calls, text = choice["message"].get("tool_calls") or [], choice["message"].get("content") or ""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    items = [{"id": f"msg_{name}", "type": "message", "role": "assistant", "content": [part]}]
    items = items if text or not calls else []
    items += [
        {"id": f"fc_{name}_{index}", "type": "function_call", "call_id": call["id"], **call["function"]}
        for index, call in enumerate(calls)
    ]
    status, usage = "incomplete" if is_cut else "completed", answer["usage"]
    return {
        **REPEATED | {name: body[name] for name in REPEATED if body.get(name) is not None},
        **{"id": f"resp_{name}", "object": "response", "created_at": answer["created"], "model": answer["model"]},
        **{"status": status, "output": [item | {"status": status} for item in items], "error": None, "store": False},
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            **{"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
            **{"total_tokens": usage["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0}},
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        },
    }


class Events(translation.Events):
    """The events of a streamed response; they are numbered."""

    number = 0

    def of(self, chunk: Json) -> Iterator[Json]:
        for event in super().of(chunk):
            yield event | {"sequence_number": self.number}
            self.number += 1

    def whole(self) -> Json:
        return from_chat(self.answer, self.body)

    def event(self, kind: str, item: Json, /, **content: Any) -> Json:
        origin = {"item_id": item["id"], "output_index": self.index, "content_index": 0}
        return {"type": f"response.{kind}", **origin, **content}

    def begin(self) -> list[Json]:
        response = self.whole() | {"status": "in_progress", "output": [], "usage": None}
        return [{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")]

    def start(self, item: Json) -> list[Json]:
        empty = {"status": "in_progress"} | ({"arguments": ""} if "arguments" in item else {"content": []})
        part = [{**each, "text": ""} for each in item.get("content", ())]
        added = self.event("output_item.added", item, item=item | empty)
        return [added, *(self.event("content_part.added", item, part=each) for each in part)]

    def delta(self, item: Json, text: str) -> list[Json]:
        kind = "function_call_arguments" if "arguments" in item else "output_text"
        return [self.event(f"{kind}.delta", item, delta=text, logprobs=[])]

    def stop(self, item: Json) -> list[Json]:
        done = self.event("output_item.done", item, item=item)
        if "arguments" in item:
            spoken = {name: item[name] for name in ("name", "arguments")}
            return [self.event("function_call_arguments.done", item, **spoken), done]
        [part] = item["content"]
        text = self.event("output_text.done", item, text=part["text"], logprobs=[])
        return [text, self.event("content_part.done", item, part=part), done]

    def end(self) -> list[Json]:
        response = self.whole()
        return [{"type": f"response.{response['status']}", "response": response}]
