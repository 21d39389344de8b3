"""Anthropic's Messages API, as a translation of the chat API. Blocks of thinking are not read, and none are written."""

import json
from typing import Any

from extras.server import translation
from extras.server.bodies import Json
from extras.server.translation import add_call, chat_fields, content_of, objects

REMEDIES = {
    "thinking": "a model thinks as its chat template says: set chat_template_kwargs",
    "output_config": "an answer is a plain text: ask for a format in the messages",
}
READ = ("messages", "system", "tools", "cache_control", "diagnostics", "user_profile_id", "workspace_id")
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def to_chat(body: Json) -> Json:
    """Returns the body of the chat that asks for the same; raises ValueError for what chats here have not."""
    fields = chat_fields(body, {"max_tokens": "max_tokens", "stop_sequences": "stop"}, REMEDIES, READ)
    if isinstance(choice := body.get("tool_choice"), dict):
        fields["tool_choice"] = choice.get("type")
        fields |= {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    system = [{"role": "system", "content": content_of(text, "system")}] if (text := body.get("system")) else []
    tools = [function_of(tool) for tool in objects(body.get("tools") or [], "tools")]
    return fields | {"messages": system + messages_of(body.get("messages")), "tools": tools}


def function_of(tool: Json) -> Json:
    if "input_schema" not in tool:
        raise ValueError(f"tools: {tool.get('type')!r} has no input_schema: give each tool a name and an input_schema")
    about = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool.get("name"), **about, "parameters": tool["input_schema"]}}


def messages_of(turns: Any) -> list[Json]:
    """Returns the messages of a chat; each result of a tool is one of its own, before what the user says beside it."""
    messages: list[Json] = []
    if objects(turns, "messages") and turns[-1].get("role") == "assistant":
        raise ValueError("messages: the last is the assistant's, and no answer here goes on with it: end with a user's")
    for turn in turns:
        content = turn.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, "a content")
        results, calls, texts = [], [], []
        for block in blocks:
            {"tool_result": results, "tool_use": calls}.get(block.get("type"), texts).append(block)
        for block in results:
            result = content_of(block.get("content") or "", "a tool_result")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        if texts or not results:
            messages.append({"role": turn.get("role"), "content": content_of(texts, "messages")})
        for block in calls:
            add_call(messages, block.get("id"), block.get("name"), block.get("input"))
    return messages


def from_chat(answer: Json, body: Json) -> Json:
    """Returns the message that an answer of a chat is, to the request `body`."""
    [choice] = answer["choices"]
    calls, text = choice["message"].get("tool_calls") or [], choice["message"].get("content") or ""
    content: list[Json] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    reason, stop, usage = choice["finish_reason"], choice.get("stop_reason"), answer["usage"]
    stop = stop if reason == "stop" and isinstance(stop, str) else None
    return {
        **{"id": f"msg_{answer['id'].rpartition('-')[2]}", "type": "message", "role": "assistant"},
        **{"model": answer["model"], "content": content, "stop_sequence": stop},
        "stop_reason": "stop_sequence" if stop else STOP_REASONS.get(reason),
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


class Events(translation.Events):
    """The events of a streamed message; the counts of its tokens come at its end."""

    def whole(self) -> Json:
        return from_chat(self.answer, self.body)

    def event(self, kind: str, **content: Any) -> list[Json]:
        return [{"type": f"content_block_{kind}", "index": self.index, **content}]

    def begin(self) -> list[Json]:
        return [{"type": "message_start", "message": self.whole() | {"content": []}}]

    def start(self, block: Json) -> list[Json]:
        return self.event("start", content_block=block | ({"input": {}} if "input" in block else {"text": ""}))

    def delta(self, block: Json, text: str) -> list[Json]:
        kind, name = ("input_json", "partial_json") if "input" in block else ("text", "text")
        return self.event("delta", delta={"type": f"{kind}_delta", name: text})

    def stop(self, block: Json) -> list[Json]:
        return self.event("stop")

    def end(self) -> list[Json]:
        message = self.whole()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": message["usage"]}, {"type": "message_stop"}]
