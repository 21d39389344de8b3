"""Parts of the translations of other APIs to the chat API and back: a request's fields and contents, and streams."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from extras.server.bodies import DEFAULTS, IGNORED, Json

SHARED = (  # fields that a chat has by the same name, those of vLLM's server and ours among them
    "model", "stream", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "top_k", "min_p", "seed",
    "stop_token_ids", "chat_template_kwargs", "train",
)  # fmt: skip
NEUTRAL = ("disabled", "adaptive", "standard")  # of truncation, of a type of thinking, and of speed
NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def chat_fields(body: Json, names: Mapping[str, str], remedies: Mapping[str, str], ignored: Sequence[str]) -> Json:
    """Returns the fields of a request that a chat has, `names` by the names there; raises ValueError for any other that
    asks for something and is not `ignored`, with what to do instead."""
    chat: Json = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    for name, value in body.items():
        if name in names or name in SHARED:
            chat[names.get(name, name)] = value
        elif name not in IGNORED and name not in ignored and not asks_for_nothing(value):
            raise ValueError(f"{name} is not part of this server: {remedies.get(name, 'leave it out')}")
    return chat


def asks_for_nothing(value: Any) -> bool:
    """Tells whether a field's value is a default, or holds nothing else."""
    return value in (*DEFAULTS, *NEUTRAL) or (isinstance(value, dict) and all(map(asks_for_nothing, value.values())))


def objects(value: Any, name: str) -> list[Json]:
    """Returns `value`, the field `name`; raises ValueError if it is no list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError(f"{name} must be a list of objects")
    return value


def content_of(content: Any, name: str) -> str | list[Json]:
    """Returns a content as chats have it, without thoughts, which no answer here has apart from its text."""
    if isinstance(content, str):
        return content
    parts: list[Json] = []
    for part in objects(content, f"{name}: a content"):
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
                parts.append({"type": "text", "text": text})
            case {"type": "image", "source": {"media_type": kind, "data": data}}:
                parts.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})
            case {"type": "input_image", "image_url": url}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                raise ValueError(f"{name}: {part.get('type')!r} in a content must be a text, or an image with its data")
    return parts


def add_call(messages: list[Json], call_id: Any, name: Any, arguments: Any) -> None:
    """Adds a call to the last message, if that is the assistant's, or else to a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    messages[-1].setdefault("tool_calls", []).append(call)


class Events:
    """The events of a streamed answer, from the chunks of a chat. A subclass says what they are: `begin`, `open_text`,
    `add_text`, `close_text`, `call`, `end` and `fail` each return a list.

    Attributes:
        answer: the chat's, as far as it came.
        index: of the text, or the call, that is under way.
    """

    def __init__(self, body: Json) -> None:
        self.body, self.index, self.over = body, 0, False
        self.answer: Json = {}

    def of(self, chunk: Json) -> Iterator[Json]:
        """Yields the events of the next chunk."""
        if self.over:  # of an error, after which the chat's usage comes
            return
        if "error" in chunk:
            self.over = True
            yield from self.fail(chunk["error"]["message"])
            return
        if not self.answer:
            message = {"content": "", "tool_calls": []}
            self.answer = chunk | {"choices": [{"message": message, "finish_reason": None}], "usage": NO_USAGE}
            yield from self.begin()
        for choice in chunk["choices"]:
            yield from self._of_choice(choice)
        if chunk.get("usage"):
            self.answer["usage"] = chunk["usage"]
            yield from self.end()

    def _of_choice(self, choice: Json) -> Iterator[Json]:
        message, is_last = self.answer["choices"][0]["message"], bool(choice["finish_reason"])
        text, calls = choice["delta"].get("content") or "", choice["delta"].get("tool_calls") or ()
        if not message["content"] and (text or (is_last and not calls)):  # an answer of no words has a text, too
            yield from self.open_text()
        message["content"] += text
        yield from self.add_text(text) if text else ()
        if is_last:
            self.answer["choices"] = [choice | {"message": message}]
        if is_last and (message["content"] or not calls):
            yield from self.close_text()
            self.index += 1
        for call in calls:
            message["tool_calls"].append(call)
            yield from self.call(call)
            self.index += 1
