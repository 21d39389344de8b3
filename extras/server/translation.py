"""Parts of the translations of other APIs to the chat API and back: a request's fields and contents, and streams."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from extras.server.bodies import DEFAULTS, IGNORED, Json

SHARED = (  # fields that a chat has by the same name, those of vLLM's server and ours among them
    "model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls", "top_k", "min_p", "seed",
    "stop_token_ids", "chat_template_kwargs", "train",
)  # fmt: skip
NOTHING = (*DEFAULTS, "disabled", "adaptive", "standard")  # of truncation, of a type of thinking, and of speed


def chat_fields(body: Json, names: Mapping[str, str], remedies: Mapping[str, str], read: Sequence[str]) -> Json:
    """Returns the fields of a request that a chat has too, `names` by those there; raises ValueError, with what to do
    instead, for any other that asks for something, but for those that are `read` elsewhere."""
    chat: Json = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    for name, value in body.items():
        if name in names or name in SHARED:
            chat[names.get(name, name)] = value
        elif name not in (*IGNORED, *read) and not asks_for_nothing(value):
            raise ValueError(f"{name} is not part of this server: {remedies.get(name, 'leave it out')}")
    return chat


def asks_for_nothing(value: Any) -> bool:
    """Tells whether a field's value is a default, or holds nothing else."""
    return value in NOTHING or (isinstance(value, dict) and all(map(asks_for_nothing, value.values())))


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
    """The events of a streamed answer, from the chunks of a chat. A subclass says what they are: `begin()` and `end()`
    of an answer; `start`, `delta(…, text)` and `stop` of a block, which is a text or a call; and `whole()`.

    Attributes:
        answer: the chat's, as far as it came.
        index: of the block that is under way.
    """

    def __init__(self, body: Json) -> None:
        self.body, self.answer, self.index, self.failed = body, {}, 0, False

    def of(self, chunk: Json) -> Iterator[Json]:
        """Yields the events of the next chunk."""
        if self.failed or "error" in chunk:
            yield from [] if self.failed else [chunk]
            self.failed = True
            return
        if not self.answer:
            usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)  # until its end
            message = {"content": "", "tool_calls": []}
            self.answer = chunk | {"choices": [{"message": message, "finish_reason": None}], "usage": usage}
            yield from self.begin()
        for choice in chunk["choices"]:
            yield from self._of_choice(choice)
        if chunk.get("usage"):
            self.answer["usage"] = chunk["usage"]
            yield from self.end()

    def _of_choice(self, choice: Json) -> Iterator[Json]:
        message, delta = self.answer["choices"][0]["message"], choice["delta"]
        text, calls, is_last = delta.get("content") or "", delta.get("tool_calls") or (), choice["finish_reason"]
        is_first, is_text = not message["content"], bool(message["content"] or text or (is_last and not calls))
        message["content"] += text
        if is_last:
            self.answer["choices"] = [choice | {"message": message}]
        if is_text:  # an answer of no words has a text, too
            yield from self.start(self.block()) if is_first else []
            yield from self.delta(self.block(), text) if text else []
        if is_text and is_last:
            yield from self.stop(self.block())
            self.index += 1
        for call in calls:
            message["tool_calls"].append(call)
            block, arguments = self.block(), call["function"]["arguments"]
            yield from [*self.start(block), *self.delta(block, arguments), *self.stop(block)]
            self.index += 1

    def block(self) -> Json:
        answer = self.whole()
        return answer["output" if "output" in answer else "content"][self.index]
