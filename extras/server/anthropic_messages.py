"""Anthropic's Messages API, as a translation of the chat API. Blocks of thinking are not read, and none are written."""

import json
from typing import Any

from extras.server.bodies import Json
from extras.server.translation import Events, add_call, chat_fields, content_of, objects

NAMES = {"max_tokens": "max_tokens", "messages": "messages", "stop_sequences": "stop"}
REMEDIES = {
    "thinking": "a model thinks as its chat template says: set chat_template_kwargs",
    "output_config": "an answer is a plain text: ask for a format in the messages",
}
IGNORED = ("system", "cache_control", "diagnostics", "user_profile_id", "workspace_id")
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}


def to_chat(body: Json) -> Json:
    """Returns the body of the chat that asks for the same; raises ValueError for what chats here have not."""
    system = [{"role": "system", "content": content_of(text, "system")}] if (text := body.get("system")) else []
    tools = [function_of(tool) for tool in objects(body.get("tools") or [], "tools")]
    fields = body | {"messages": system + messages_of(body.get("messages")), "tools": tools}
    if isinstance(choice := body.get("tool_choice"), dict):
        fields["tool_choice"] = choice.get("type")
        fields |= {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return chat_fields(fields, NAMES, REMEDIES, IGNORED)


def function_of(tool: Json) -> Json:
    if "input_schema" not in tool:
        raise ValueError(f"tools: {tool.get('type')!r} has no input_schema: give each tool a name and an input_schema")
    about = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": tool.get("name"), **about, "parameters": tool["input_schema"]}}


def messages_of(turns: Any) -> list[Json]:
    """Returns the messages of a chat; each result of a tool is one of its own, before what the user says beside it."""
    messages: list[Json] = []
    for turn in objects(turns, "messages"):
        content = turn.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(content, "a content")
        results, calls, others = ([], [], [])
        for block in blocks:
            {"tool_result": results, "tool_use": calls}.get(block.get("type"), others).append(block)
        for block in results:
            result = content_of(block.get("content") or "", "a tool_result")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        if others or not results:
            messages.append({"role": turn.get("role"), "content": content_of(others, "messages")})
        for block in calls:
            add_call(messages, block.get("id"), block.get("name"), block.get("input"))
    return messages


def from_chat(answer: Json, body: Json) -> Json:
    """Returns the message that an answer of a chat is, to the request `body`."""
    [choice] = answer["choices"]
    message, reason, stop = choice["message"], choice["finish_reason"], choice.get("stop_reason")
    calls, text = message.get("tool_calls") or [], message.get("content") or ""
    content = [{"type": "text", "text": text}] if text or not calls else []
    content += [call_block(call, json.loads(call["function"]["arguments"])) for call in calls]
    stop = stop if reason == "stop" and isinstance(stop, str) else None
    usage = {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": answer["usage"]["completion_tokens"]}
    reply = {"id": f"msg_{answer['id'].rpartition('-')[2]}", "type": "message", "role": "assistant"}
    reply |= {"model": answer["model"], "content": content, "usage": usage, "stop_sequence": stop}
    return reply | {"stop_reason": "stop_sequence" if stop else STOP_REASONS.get(reason)}


def call_block(call: Json, arguments: Json) -> Json:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def error(message: str, status: int) -> Json:
    """Returns an error in the form of this API."""
    kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageEvents(Events):
    """The events of a streamed message; the counts of its tokens come at its end."""

    def block(self, kind: str, **content: Any) -> Json:
        return {"type": f"content_block_{kind}", "index": self.index, **content}

    def begin(self) -> list[Json]:
        return [{"type": "message_start", "message": from_chat(self.answer, self.body) | {"content": []}}]

    def open_text(self) -> list[Json]:
        return [self.block("start", content_block={"type": "text", "text": ""})]

    def add_text(self, text: str) -> list[Json]:
        return [self.block("delta", delta={"type": "text_delta", "text": text})]

    def close_text(self) -> list[Json]:
        return [self.block("stop")]

    def call(self, call: Json) -> list[Json]:
        delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
        return [
            self.block("start", content_block=call_block(call, {})),
            self.block("delta", delta=delta),
            self.block("stop"),
        ]

    def end(self) -> list[Json]:
        message = from_chat(self.answer, self.body)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": message["usage"]}, {"type": "message_stop"}]

    def fail(self, message: str) -> list[Json]:
        return [error(message, 500)]
