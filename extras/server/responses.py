"""OpenAI's Responses API, as a translation of the chat API.

No response is kept: a client sends the items of a conversation back. Reasoning among them is not read.
"""

from typing import Any

from extras.server.bodies import Json
from extras.server.translation import Events, add_call, chat_fields, content_of, objects

NAMES = {"max_output_tokens": "max_completion_tokens", "messages": "messages"}
REMEDIES = {
    **dict.fromkeys(("previous_response_id", "conversation"), "no response is kept: send all items as input"),
    "background": "no response is kept: wait for it, or stream it",
    "reasoning": "a model thinks as its chat template says: set chat_template_kwargs",
    "text": "an answer is a plain text: ask for a format in the messages",
    "top_logprobs": "ask /v1/chat/completions for log-probs",
}
SAID = {  # fields of a request that its response repeats, and what they are by default
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled", "user": None,
}  # fmt: skip


def to_chat(body: Json) -> Json:
    """Returns the body of the chat that asks for the same; raises ValueError for what chats here have not."""
    if "logprobs" in str(body.get("include")):  # the other things to include are none here
        raise ValueError(f"include: {REMEDIES['top_logprobs']}")
    system = [{"role": "system", "content": text}] if (text := body.get("instructions")) else []
    tools = [function_of(tool) for tool in objects(body.get("tools") or [], "tools")]
    fields = body | {"messages": system + messages_of(body.get("input")), "tools": tools}
    return chat_fields(fields, NAMES, REMEDIES, ("input", "instructions", "include", "stream_options"))


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
            case {"role": role, "content": content} if item.get("type", "message") == "message":
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
    message, is_cut = choice["message"], choice["finish_reason"] == "length"
    status, calls = "incomplete" if is_cut else "completed", message.get("tool_calls") or []
    texts = [message.get("content") or ""] if message.get("content") or not calls else []
    items = [text_item(answer, status, text) for text in texts] + [call_item(answer, call, status) for call in calls]
    usage = {"input_tokens": answer["usage"]["prompt_tokens"], "output_tokens": answer["usage"]["completion_tokens"]}
    usage |= {"total_tokens": answer["usage"]["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0}}
    usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    details = {"reason": "max_output_tokens"} if is_cut else None
    return envelope(answer, body, status) | {"output": items, "usage": usage, "incomplete_details": details}


def envelope(answer: Json, body: Json, status: str) -> Json:
    response = SAID | {name: body[name] for name in SAID if body.get(name) is not None}
    response |= {"id": f"resp_{name_of(answer)}", "object": "response", "created_at": answer["created"]}
    response |= {"model": answer["model"], "status": status, "error": None, "output": [], "store": False}
    return response | {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}}


def name_of(answer: Json) -> str:
    return answer["id"].rpartition("-")[2]


def output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def text_item(answer: Json, status: str, *texts: str) -> Json:
    item = {"id": f"msg_{name_of(answer)}", "type": "message", "role": "assistant", "status": status}
    return item | {"content": [*map(output_text, texts)]}


def call_item(answer: Json, call: Json, status: str) -> Json:
    item = {"id": f"fc_{name_of(answer)}_{call['index']}", "type": "function_call", "call_id": call["id"]}
    return item | call["function"] | {"status": status}


class ResponseEvents(Events):
    """The events of a streamed response; they are numbered."""

    number = 0

    def event(self, kind: str, **content: Any) -> Json:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **content}

    def of_item(self, kind: str, item: Json, **content: Any) -> Json:
        place = {"item_id": item["id"], "output_index": self.index}
        return self.event(kind, **place, **({"content_index": 0} if item["type"] == "message" else {}), **content)

    def begin(self) -> list[Json]:
        response = envelope(self.answer, self.body, "in_progress")
        return [self.event(f"response.{kind}", response=response) for kind in ("created", "in_progress")]

    def open_text(self) -> list[Json]:
        item = text_item(self.answer, "in_progress")
        added = self.event("response.output_item.added", output_index=self.index, item=item)
        return [added, self.of_item("response.content_part.added", item, part=output_text(""))]

    def add_text(self, text: str) -> list[Json]:
        item = text_item(self.answer, "in_progress")
        return [self.of_item("response.output_text.delta", item, delta=text, logprobs=[])]

    def close_text(self) -> list[Json]:
        item = from_chat(self.answer, self.body)["output"][0]
        [part] = item["content"]
        return [
            self.of_item("response.output_text.done", item, text=part["text"], logprobs=[]),
            self.of_item("response.content_part.done", item, part=part),
            self.event("response.output_item.done", output_index=self.index, item=item),
        ]

    def call(self, call: Json) -> list[Json]:
        item, arguments = call_item(self.answer, call, "completed"), call["function"]["arguments"]
        opened, spoken = item | {"arguments": "", "status": "in_progress"}, "response.function_call_arguments"
        return [
            self.event("response.output_item.added", output_index=self.index, item=opened),
            self.of_item(f"{spoken}.delta", item, delta=arguments),
            self.of_item(f"{spoken}.done", item, name=item["name"], arguments=arguments),
            self.event("response.output_item.done", output_index=self.index, item=item),
        ]

    def end(self) -> list[Json]:
        response = from_chat(self.answer, self.body)
        return [self.event(f"response.{response['status']}", response=response)]

    def fail(self, message: str) -> list[Json]:
        error = {"code": "server_error", "message": message, "param": None}
        return [self.event("error", **error, error=error)]  # some clients read the one, some the other
