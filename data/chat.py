"""Encodes chat messages as token ids: whole prompts, and what follows an answer in a conversation.

A policy's answer is never encoded again: its ids stay as they were sampled, and what the chat template writes between
it and the next answer is appended to them. Only the template writes special tokens: where a user, a tool or an
environment spells one out, as `<|im_end|>`, it is encoded as the text that it is.
"""

import json
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once
from configs.import_utils import find
from data.pretrained import template_terminator
from data.types import Message

Prompt = str | list[Message]
WriteCall = Callable[[str, dict[str, Any]], str] | None  # of a tool's name and arguments
QUESTION, ANSWER = "question-0417", "answer-0417"  # stand for the turns before an increment
START = [{"role": "user", "content": QUESTION}]
THOUGHT = "thought-0417"
THOUGHTFUL = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
WRITTEN_OUT = re.compile(r"""\[\{\s*['"](role|content)['"]\s*:""")  # a list of messages, as str or json.dumps writes it
MARK = re.compile(r"(text|parts|calls)-0417-(\d+)-\d+-")  # stands for what a message of this number says
THOUGHTS = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)
ASKS_FOR_NONE = re.compile(r"content\W{0,3} (?:is|==) none", re.IGNORECASE)  # in templates, as DeepSeek's
BREAK = "\ufdd0"  # within the name of a special token that is text; Unicode keeps it out of all texts


class Answer(str):
    """An answer as text without special tokens, which knows the tokens that were sampled.

    `stopped`: whether the last of them ended it. `cut`: how many of its last characters, from a stop string on, are not
    part of it.
    """

    def __new__(cls, token_ids: list[int], tokenizer: Any, stopped: bool, cut: int = 0) -> "Answer":
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        answer = super().__new__(cls, text[: len(text) - cut])
        answer.token_ids, answer.tokenizer, answer.stopped, answer.cut = token_ids, tokenizer, stopped, cut
        return answer

    def __reduce__(self) -> tuple[Any, ...]:  # a copy is the text alone
        return str, (str(self),)

    @property
    def ending(self) -> str:
        """Returns the special token that ended the answer, or ""."""
        last = self.token_ids[-1:]
        is_text = not self.stopped or self.tokenizer.decode(last, skip_special_tokens=True)
        return "" if is_text else self.tokenizer.decode(last)

    @property
    def sampled(self) -> str:
        """Returns the text with its special tokens, but for the `ending`."""
        text = self.tokenizer.decode(self.token_ids).removesuffix(self.ending)
        return text[: len(text) - self.cut]


def parse_prompt(value: Any) -> Prompt:
    """Reads a prompt column's value: a string, or chat messages, as `clean_messages` has them."""
    if isinstance(value, np.ndarray):  # pandas makes it of a list in a parquet file
        value = value.tolist()
    if isinstance(value, str):
        if WRITTEN_OUT.match(value):  # a model would read brackets and quotes
            raise ValueError(f"the prompt is {reprlib.repr(value)}, a text: give the list itself, and in CSV JSON.")
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"the prompt is {reprlib.repr(value)}; it must be a string or a list of chat messages.")
    for message in value:
        match message:
            case {"role": str(), "content": str() | list()} | {"role": str(), "tool_calls": list()}:
                pass
            case _:
                shown = reprlib.repr(message)
                raise ValueError(f"the prompt holds {shown}; a chat message needs a 'role' and a 'content'.")
    return clean_messages(value)


def clean_messages(
    messages: Iterable[Message], tokenizer: PreTrainedTokenizerBase | None = None, write_call: WriteCall = None
) -> list[Message]:
    """Returns messages as templates take them: without the nulls that parquet adds, arguments as values, and calls
    beside an empty content, or None if the template asks for that. Given a tokenizer without images, contents in parts
    are texts; `write_call` puts calls into contents."""
    joins, cleaned = tokenizer is not None and vars(tokenizer).get("images") is None, []
    for message in messages:
        message = {key: item for key, item in message.items() if item is not None}
        if isinstance(parts := message.get("content"), list):
            parts = [{k: v for k, v in it.items() if v is not None} if isinstance(it, dict) else it for it in parts]
            message["content"] = join_texts(parts) if joins else parts
        if calls := [*map(read_call, message.pop("tool_calls", ()))]:
            message.setdefault("content", "")
            if write_call:
                texts = [write_call(*map(call.get("function", call).get, ("name", "arguments"))) for call in calls]
                message["content"] = "\n".join(filter(None, (message["content"], *texts)))
            else:
                message["tool_calls"] = calls
                if not message["content"] and tokenizer and ASKS_FOR_NONE.search(str(tokenizer.chat_template)):
                    message["content"] = None
        cleaned.append(message)
    return cleaned


def join_texts(parts: list[Any]) -> str:
    """Joins parts of text by line feeds; raises ValueError for other parts."""
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise ValueError('a part of a content must be {"type": "text", "text": …}: this model reads text alone')
    return "\n".join(texts)


def read_call(call: Any) -> dict[str, Any]:
    """Returns a tool call whose arguments are a dictionary: JSON texts are read, and without any it is empty."""
    match call:
        case {"function": {"name": str()} as function} | ({"name": str()} as function):
            with suppress(TypeError, ValueError):
                arguments = function.get("arguments")
                arguments = json.loads(arguments or "null") if isinstance(arguments, str) else arguments
                function = function | {"arguments": {} if arguments is None else {**arguments}}
                return call | {"function": function} if "function" in call else function
    raise ValueError('tool_calls holds {"function": {"name": …, "arguments": JSON}}')


def as_messages(prompt: Prompt | None) -> list[Message]:
    """Returns a prompt's messages; a text is a user's, and None has none."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])


def encode_prompt(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, tool_text: str = "", write_call: WriteCall = None, **kwargs: Any
) -> list[int]:
    """Encodes a prompt, up to where the answer starts; `tool_text` ends its system message, `write_call` writes calls.

    Chat messages go through the tokenizer's template with `kwargs`, or without one become `role: content` lines. Of the
    special tokens that they and tools spell out, an assistant's are tokens. A string is encoded as it is.

    Raises:
        ValueError: the template leaves out what a message says; names its role, and the remedy.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    messages = clean_messages(prompt, tokenizer, write_call)
    messages = [message if message["role"] == "assistant" else as_text(message, tokenizer) for message in messages]
    if tool_text:
        messages = told_of_tools(messages, as_text(tool_text, tokenizer))
    if "tools" in kwargs:
        kwargs["tools"] = as_text(kwargs["tools"], tokenizer)
    text = render(messages, tokenizer, generation_prompt=True, **kwargs)
    return encode_pieces(text, tokenizer, begins_text=tokenizer.chat_template is None)


def told_of_tools(messages: list[Message], descriptions: str) -> list[Message]:
    """Returns the messages whose system message, a new one if there is none, ends with `descriptions`."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": descriptions}, *messages]
    content = messages[0]["content"]
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": f"\n\n{descriptions}"}]
    else:
        content = f"{content}\n\n{descriptions}"
    return [{**messages[0], "content": content}, *messages[1:]]


def render(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, generation_prompt: bool, **template_kwargs: Any
) -> str:
    """Returns the messages as the text that the template makes of them, or `plain_chat` without one; raises ValueError
    if the template leaves out what one of them says."""
    if tokenizer.chat_template is None:
        return plain_chat(messages, generation_prompt)
    kwargs = {"tokenize": False, "add_generation_prompt": generation_prompt, **template_kwargs}
    text = tokenizer.apply_chat_template(messages, **kwargs)
    check_writes(messages, tokenizer, **kwargs)
    return text


def check_writes(messages: list[Message], tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> None:
    """Raises ValueError if the chat template leaves out a text or a call of these messages; thoughts it may cut."""
    shape = json.dumps([with_marks(message, number) for number, message in enumerate(messages)], default=str)
    facts = json.dumps(template_kwargs, default=str), tokenizer, str(tokenizer.chat_template)
    if mark := MARK.match(lost_mark(shape, *facts)):
        message, name = messages[int(mark[2])], tokenizer.name_or_path or type(tokenizer).__name__
        role = f"{message['role']} with tool calls" if "tool_calls" in message else message["role"]
        remedy = "" if message["role"] == "assistant" else "say it as system or user, or "
        raise ValueError(
            f"the chat template of {name} leaves out the {mark[1]} of a message of the role {role}: {remedy}set "
            "model.custom_chat_template to one that writes it."
        )


def with_marks(message: Message, number: int) -> Message:
    """Returns a message with a mark in place of each text and call that a template has to write; thoughts have none."""
    marks = (f"-0417-{number}-{serial}-" for serial in count())

    def mark(kind: str, text: str) -> str:
        pieces = THOUGHTS.split(text) if message["role"] == "assistant" else [text]
        return "<think>\n0417\n</think>".join(kind + next(marks) if piece.strip() else piece for piece in pieces)

    def mark_call(call: dict[str, Any]) -> dict[str, Any]:
        function, name = call.get("function", call), "calls" + next(marks)
        if call_id := str(call.get("id") or ""):  # Kimi K2's template writes it instead of the name, which it holds
            call = call | {"id": name if call_id.startswith(f"functions.{function['name']}") else "0" * len(call_id)}
        changed = {"name": name, "arguments": {"calls" + next(marks): 0} if function["arguments"] else {}}
        return call | ({"function": function | changed} if "function" in call else changed)

    marked = {key: "0" * min(len(item), 9) if isinstance(item, str) else item for key, item in message.items()}
    marked |= {key: message[key] for key in ("role", "name") if key in message}
    if isinstance(content := message.get("content"), str):
        marked["content"] = mark("text", content)
    elif isinstance(content, list):
        texts = [mark("parts", str(part["text"])) if "text" in part else None for part in content]
        marked["content"] = [part | {"text": text} if text else part for part, text in zip(content, texts, strict=True)]
    if "tool_calls" in message:
        marked["tool_calls"] = [*map(mark_call, message["tool_calls"])]
    return marked


@lru_cache(maxsize=1024)
def lost_mark(shape: str, kwargs: str, tokenizer: PreTrainedTokenizerBase, _template: str) -> str:
    """Returns the first mark of the messages in `shape` that the template does not write; "" if there is none.

    What is said beside calls need not be written once others speak: gpt-oss's template takes it for a thought.
    """
    messages = json.loads(shape)

    def write(end: int) -> str:
        with suppress(TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return tokenizer.apply_chat_template(messages[:end], **json.loads(kwargs))
        return shape  # who renders the messages themselves gets the error

    text = write(len(messages))
    for mark in MARK.finditer(shape):
        number = int(mark[2])
        may_be_thought = mark[1] != "calls" and messages[number].get("tool_calls")
        if mark[0] not in text and not (may_be_thought and mark[0] in write(number + 1)):
            return mark[0]
    return ""


def as_text(value: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Returns `value` with a BREAK in each special token that its texts spell out: a template makes no token of it."""
    if isinstance(value, dict):
        return {key: as_text(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list):
        return [as_text(item, tokenizer) for item in value]
    specials = special_tokens(tokenizer)
    while isinstance(value, str) and specials.search(value):  # the rest of one may contain another
        value = specials.sub(lambda match: match[0][0] + BREAK + match[0][1:], value)
    return value


@lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Matches the special tokens of a tokenizer, the longest first; one of a single character is a text like others."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted({name for name in added.union(tokenizer.all_special_tokens) if len(name) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def encode_pieces(text: str, tokenizer: PreTrainedTokenizerBase, begins_text: bool) -> list[int]:
    """Returns the token ids of a text, cut at every BREAK; `begins_text`: behind those that begin a text."""
    first, *rest = text.split(BREAK)
    ids = tokenizer.encode(first, add_special_tokens=begins_text)
    for piece in rest:
        ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


def plain_chat(messages: list[Message], generation_prompt: bool = True) -> str:
    """Writes `role: content` lines, for tokenizers without a chat template."""
    notice_once(
        "the tokenizer has no chat template: messages become 'role: content' lines, unless custom_chat_template is set."
    )
    if any(message.get("tool_calls") or not isinstance(message.get("content"), str) for message in messages):
        raise ValueError("messages with parts or tool calls need a tokenizer with a chat template.")
    lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return lines + ("assistant:" if generation_prompt else "")


class ChatFormat:
    """A tokenizer's chat template, as one conversation after the other goes through it.

    `template_kwargs` go to the template, and what `tool_kwargs` (extras/tools/parsers.py) returned into prompts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        self.tokenizer, self.template_kwargs = tokenizer, template_kwargs
        self.terminator = template_terminator(tokenizer)

    def prompt_ids(self, messages: Prompt) -> list[int]:
        """Returns the token ids of a prompt, up to where the answer starts."""
        return encode_prompt(messages, self.tokenizer, **self.template_kwargs)

    def text(self, token_ids: list[int], stopped: bool = False) -> Answer:
        """Returns an answer as text, without special tokens; `stopped`: whether it ended by a stop id."""
        return Answer(token_ids, self.tokenizer, stopped)

    def increment(
        self, messages: list[Message], stopped: bool, last_id: int | None = None, calls: Sequence[Any] = ()
    ) -> list[int]:
        """Encodes what follows an answer: the end of its turn, `messages`, and the start of the next answer.

        Args:
            stopped: whether the answer ended by a stop id, which then stands for the special token that ends a turn.
            last_id: that id; it also stands for the token by which the next turn begins, as in GLM's layout.
            calls: of tools, in the answer: some templates write a tool's name from there.

        Raises:
            ValueError: the template does not write these messages behind an answer; names it and the remedy.
        """
        text, end = self._behind(*as_text([messages, [*calls]], self.tokenizer))
        ids = encode_pieces(text, self.tokenizer, begins_text=False)
        return ids[self.end_of_turn(ids, end, last_id) :] if stopped else ids

    def end_of_turn(self, ids: list[int], *stop_ids: int | None) -> int:
        """Counts the tokens at the start of `ids` that end a turn: white space, the template's token, `stop_ids`."""
        count = 0
        for end in dict.fromkeys((self.terminator, *stop_ids)):
            position = ids.index(end, count) if end in ids[count:] else len(ids)
            if position < len(ids) and not self.tokenizer.decode(ids[count:position]).strip():
                count = position + 1
        return count

    def increment_text(self, messages: list[Message], calls: Sequence[Any] = ()) -> str:
        """Returns the text that the template writes behind an answer with these calls when `messages` follow it."""
        return self._behind(messages, calls)[0]

    def _behind(self, messages: list[Message], calls: Sequence[Any]) -> tuple[str, int | None]:
        """Returns the text behind an answer, and the token that ends that there: in gpt-oss's template another than at
        the end of all."""
        specials = special_tokens(self.tokenizer)
        try:
            text = self.text_behind({"role": "assistant", "content": ANSWER}, messages)
            end = re.match(rf"\s*({specials.pattern})(?=\s*(?:{specials.pattern}))", text)
            return text, self.tokenizer.convert_tokens_to_ids(end[1]) if end and self.terminator is not None else None
        except ValueError:
            if not any(message["role"] == "tool" for message in messages):
                raise
            if behind := find("optional", "behind_calls")(self, messages, calls):
                return behind[0], self.tokenizer.convert_tokens_to_ids(behind[1])
            raise

    def text_behind(self, answer: Message, messages: list[Message]) -> str:
        """Returns what the template writes behind the ANSWER in a message when `messages` follow it."""
        try:
            rendered = self.render([*START, answer, *messages], generation_prompt=True)
            starts = tuple(self.render(START, generation_prompt) for generation_prompt in (True, False))
        except TemplateError as error:
            raise self._refusal(f"refuses {messages_named(messages)} after an answer ({error})") from error
        if rendered.count(ANSWER) != 1 or not rendered.startswith(starts):
            raise self._refusal(f"writes what comes before {messages_named(messages)} otherwise than without them")
        return rendered.partition(ANSWER)[2]

    def check_keeps_thoughts(self, role: str) -> None:
        """Raises ValueError if the template leaves out what earlier answers thought once a message of `role` follows:
        the policy would be trained with it in view, and asked without."""
        turns = [*START, {"role": "assistant", "content": THOUGHTFUL}]
        reply = {"role": role, "content": QUESTION}
        if THOUGHT not in self.render([*turns, reply], generation_prompt=True):
            raise self._refusal(f"drops the thoughts of an answer before {messages_named([reply])}")

    def render(self, messages: list[Message], generation_prompt: bool) -> str:
        """Returns the messages as the text that the template makes of them."""
        messages = clean_messages(messages, self.tokenizer, self.template_kwargs.get("write_call"))
        return render(messages, self.tokenizer, generation_prompt, **self.template_kwargs)

    def _refusal(self, problem: str) -> ValueError:
        name = self.tokenizer.name_or_path or type(self.tokenizer).__name__
        remedy = "set model.custom_chat_template to one that only appends, or, for an environment, env.history=turns"
        return ValueError(f"the chat template of {name} {problem}: {remedy}.")


def messages_named(messages: list[Message]) -> str:
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    return f"messages of the role {roles}"
