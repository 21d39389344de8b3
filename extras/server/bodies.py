"""Requests and responses of an OpenAI-compatible API: bodies that are checked, the JSON that answers them, and the text
of a response while its tokens come.

Everything in a request has a bound, so that it can only fail by itself. Fields are those of api.openai.com, and of
vLLM's server: top_k, min_p, return_token_ids, and stop_token_ids with ignore_eos. Fields that this server does not
support are refused, unless they have the value that asks for nothing.
"""

import inspect
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PreTrainedTokenizerBase

from data.chat import Answer, clean_messages, encode_prompt, render
from data.types import Completion, SamplingParams
from extras.server.streaming import Piece
from extras.tools.parsers import ParsedAnswer, ToolParser, parse_answer
from workers.rollout import COLDEST

MOST_CHOICES = 256  # of a request: prompts times n
MOST_FIELDS = 100
TOKENS = 1 << 31  # no model has as many
Text = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=TOKENS)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]  # a list of a million wrong things has one error
Json = dict[str, Any]

IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention",
)  # fmt: skip
DEFAULTS = (None, 0, False, "", [], {}, "none", {"type": "text"})  # values that ask for nothing
NOT_HERE = (
    "frequency_penalty", "presence_penalty", "logit_bias", "suffix", "functions", "function_call", "response_format",
    "audio", "modalities", "moderation", "prediction", "reasoning_effort", "verbosity", "web_search_options",
)  # fmt: skip
NEUTRAL = {"repetition_penalty": 1, "length_penalty": 1, "stop": "", "modalities": ["text"], "verbosity": "medium"}
OUR_OWN = {  # arguments of templates that a request may not set
    name
    for function in (PreTrainedTokenizerBase.apply_chat_template, encode_prompt, render)
    for name in inspect.signature(function).parameters
}
BROKEN = "\ufffd"  # what a decoder writes for bytes that are not a whole character yet
ALTERNATIVES = "this server knows the log-prob of each sampled token, and not those of others"
MOST_ALTERNATIVES = 5  # to each token of an echo
MOST_OF_PROMPTS = 256  # alternatives to each token of a prompt (prompt_logprobs)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Body(BaseModel):
    """The fields that both kinds of request have."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: int | None = Field(None, ge=1, lt=TOKENS)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=TOKENS)
    min_p: float | None = Field(None, ge=0, lt=1)
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    ignore_eos: bool | None = None
    echo: bool | None = None
    parallel_tool_calls: bool | None = None
    train: bool | None = None  # false: a session learns nothing from the answer

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    not_here: ClassVar[tuple[str, ...]] = NOT_HERE
    for_template: ClassVar[Json] = {}
    schemas: ClassVar[list[Json]] = []

    @model_validator(mode="before")
    @classmethod
    def without_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if len(body) > MOST_FIELDS:
            raise ValueError(f"a request has at most {MOST_FIELDS} fields, and this one {len(body)}")
        check_characters(body)
        neutral = NEUTRAL | {"best_of": body.get("n") or 1}
        body = {name: value for name, value in body.items() if value not in (None, neutral.get(name))}
        for name in cls.not_here:
            if name in body and body[name] not in DEFAULTS:
                raise ValueError(f"{name} is not part of this server: leave it out (extras.server: rollout.name=vllm)")
        return {name: value for name, value in body.items() if name not in (*cls.not_here, *IGNORED)}

    @model_validator(mode="after")
    def check_sampling(self) -> "Body":
        if self.temperature and self.temperature < COLDEST:
            raise ValueError(f"temperature={self.temperature:g}: it must be 0, which is greedy, or {COLDEST} or more")
        return self

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Returns the sampling that is asked for, with `max_tokens` of response; by default, temperature 1 alone."""
        temperature = 1.0 if self.temperature is None else float(self.temperature)
        return SamplingParams(
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_k=-1 if self.top_k in (None, 0) else self.top_k,
            top_p=1.0 if self.top_p is None else float(self.top_p),
            max_tokens=max_tokens,
            min_p=self.min_p or 0.0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionBody(Body):
    """POST /v1/completions: one prompt or several, as texts or as token ids."""

    prompt: str | Ids | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: int | None = Field(None, ge=0, lt=TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_OF_PROMPTS)

    object_name = chunk_name = "text_completion"
    not_here = (*NOT_HERE, "tools", "tool_choice")
    tools: ClassVar[None] = None

    @model_validator(mode="after")
    def check(self) -> "CompletionBody":
        if self.logprobs and not self.echo:
            raise ValueError(f"logprobs={self.logprobs}: {ALTERNATIVES}: set logprobs=0, or echo")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0: only an echo may be without a response: set 1 or more")
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            name = "echo" if self.echo else "prompt_logprobs"
            raise ValueError(f"{name} has an answer whole: leave stream out")
        return self

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def alternatives(self) -> int | None:
        """Counts the likeliest tokens that are scored beside each token of the prompt; None: no prompt is scored."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


class ChatBody(Body):
    """POST /v1/chat/completions."""

    not_here = (*NOT_HERE, "echo")
    alternatives: ClassVar[None] = None
    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    tools: Annotated[list[Json], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none"] | None = None

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    @model_validator(mode="after")
    def check(self) -> "ChatBody":
        if self.top_logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs}: {ALTERNATIVES}: leave it out")
        for tool in self.tools or ():
            match tool:
                case {"type": "function", "function": {"name": str()}}:
                    pass
                case _:
                    raise ValueError('a tool is {"type": "function", "function": {"name": …}}')
        if reserved := [name for name in self.chat_template_kwargs or () if name in OUR_OWN]:
            raise ValueError(f"chat_template_kwargs may not hold {reserved[0]}, which this server sets itself")
        return self

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def for_template(self) -> Json:
        return self.chat_template_kwargs or {}

    @property
    def schemas(self) -> list[Json]:
        """Lists the tools whose calls are read; the prompt shows `tools` in any case, as vLLM's server has it."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


# A token's id, its log-prob, and those of the likeliest tokens in its place, from the first on, and of itself, by id.
ScoredToken = tuple[int, float | None, dict[int, float] | None]  # None: it follows nothing


@dataclass
class Part:
    """New text of a choice, and the tokens behind it; where prompts are scored, the prompt's and these, `scored`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    scored: list[ScoredToken] | None = None
    stop_reason: str | None = None  # the stop string that ended it
    answer: Answer | None = None  # the whole, known at its end

    def __add__(self, other: "Part") -> "Part":
        token_ids, log_probs = self.token_ids + other.token_ids, self.log_probs + other.log_probs
        text, reason = self.text + other.text, other.finish_reason
        return Part(text, token_ids, log_probs, reason, stop_reason=other.stop_reason, answer=other.answer)


class ResponseBuilder:
    """Builds the JSON of one answer, whole or in chunks; every chunk has the same id.

    Args:
        token_text: token id → its text.
        parser: finds calls of the tools in an answer.
    """

    def __init__(
        self, body: CompletionBody | ChatBody, prompts: Sequence[list[int]], token_text: Any, parser: ToolParser
    ) -> None:
        self.body, self.prompts, self.token_text, self.parser = body, prompts, token_text, parser
        self.is_chat = isinstance(body, ChatBody)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid4().hex}"
        self.created = int(time.time())
        self.tokens = 0  # of all responses

    def whole(self, parts: Sequence[Part]) -> Json:
        """Returns the answer of all choices."""
        choices = [self.choice(index, part, "message") for index, part in enumerate(parts)]
        return {**self.envelope(self.body.object_name), "choices": choices, "usage": self.usage()}

    def opening(self, index: int) -> Json:
        """Returns the chunk that begins a choice of a chat."""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**self.envelope(self.body.chunk_name), "choices": [choice]}

    def chunk(self, index: int, part: Part) -> Json:
        """Returns the chunk of a new part of a choice."""
        return {**self.envelope(self.body.chunk_name), "choices": [self.choice(index, part, "delta")]}

    def closing(self) -> Json:
        """Returns the chunk of stream_options.include_usage."""
        return {**self.envelope(self.body.chunk_name), "choices": [], "usage": self.usage()}

    def envelope(self, name: str) -> Json:
        return {"id": self.id, "object": name, "created": self.created, "model": self.body.model}

    def usage(self) -> Json:
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}

    def choice(self, index: int, part: Part, place: str) -> Json:
        self.tokens += len(part.token_ids)
        choice: Json = {"index": index, "finish_reason": part.finish_reason, "logprobs": None}
        choice |= {"stop_reason": part.stop_reason} if part.stop_reason else {}  # as vLLM's server has it
        if self.is_chat:
            role = {"role": "assistant"} if place == "message" else {}
            choice[place] = {**role, "content": part.text, **self.calls(part)}
            choice |= {"finish_reason": "tool_calls"} if "tool_calls" in choice[place] else {}
        else:
            choice["text"] = part.text
        if self.body.wants_log_probs:
            choice["logprobs"] = self.chat_log_probs(part) if self.is_chat else self.log_probs(part)
        if part.scored is not None and self.body.prompt_logprobs is not None:
            length = len(self.prompts[index // (self.body.n or 1)])
            choice["prompt_logprobs"] = [top and self.prompt_entry(top) for _, _, top in part.scored[:length]]
        if self.body.return_token_ids:
            choice |= {"token_ids": part.token_ids, "prompt_token_ids": self.prompts[index // (self.body.n or 1)]}
        return choice

    def prompt_entry(self, log_probs: dict[int, float]) -> Json:
        """Returns the log-probs of tokens in one place, by id, as vLLM's server has them."""
        return {
            str(token): {"logprob": log_prob, "decoded_token": self.token_text(token)}
            for token, log_prob in log_probs.items()
        }

    def calls(self, part: Part) -> Json:
        """Returns the content and the calls of an answer that calls tools; {}: its text is the content."""
        schemas = {tool["function"]["name"]: tool for tool in self.body.schemas}
        parsed = parse_answer(self.parser, part.answer or part.text, schemas) if schemas else ParsedAnswer(part.text)
        calls = [
            {"index": index, "id": uuid4().hex[:9], "type": "function"}  # Mistral's template takes no other length
            | {"function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
            for index, call in enumerate(parsed.calls[: 1 if self.body.parallel_tool_calls is False else None])
        ]
        content = {"content": parsed.text} if self.parser.marks_text else {}
        return {"content": parsed.text or None, "tool_calls": calls} if calls else content

    def chat_log_probs(self, part: Part) -> Json:
        entries = []
        for token_id, log_prob in zip(part.token_ids, part.log_probs, strict=True):
            token = self.token_text(token_id)
            entries.append({"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}

    def log_probs(self, part: Part) -> Json:
        if part.scored is None or not self.body.echo:
            tokens = [self.token_text(token_id) for token_id in part.token_ids]
            return {"tokens": tokens, "token_logprobs": part.log_probs, "top_logprobs": None, "text_offset": None}
        ids, log_probs, likeliest = zip(*part.scored, strict=True)
        tokens = [self.token_text(token_id) for token_id in ids]
        tops = [top and {self.token_text(each): top[each] for each in reversed(top)} for top in likeliest]
        offsets = [*accumulate(map(len, tokens[:-1]), initial=0)]
        top_log_probs = tops if self.body.logprobs else None  # of ids that are spelt alike, the likeliest counts
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": top_log_probs, "text_offset": offsets}


def check_characters(body: Json) -> None:
    """Raises ValueError if a text in `body` has half a character: JSON can spell it, but no tokenizer reads it."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the body holds {error.object[error.start]!r}, which is half a character") from error


def with_text(message: Json, reads_images: bool = False) -> Json:
    """Returns a message as templates take it: as `clean_messages` does, and the content as `as_string` does."""
    [message] = clean_messages([message])
    if not all("function" in call for call in message.get("tool_calls") or ()):
        raise ValueError('tool_calls holds {"function": {"name": …, "arguments": JSON}}')
    return message | {name: as_string(message[name], reads_images) for name in ("content",) if name in message}


def as_string(content: Any, reads_images: bool) -> Any:
    """Returns the content of a message as templates take it: parts of text are joined by line feeds, and beside images,
    where the model `reads_images`, parts stay parts."""
    if not isinstance(content, list):
        return content
    urls = image_urls(content) if reads_images else []
    if not all(isinstance(url, str) and url.startswith("data:image/") for url in urls):
        raise ValueError("an image_url is no data: URL of an image (data:image/…), and this server fetches none")
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) + len(urls) < len(content):
        reads = "text, and images by image_url" if reads_images else "text alone"
        raise ValueError(f'a part of a content must be {{"type": "text", "text": …}}: this server reads {reads}')
    return content if urls else "\n".join(texts)


def image_urls(content: Any) -> list[Any]:
    """Lists what the parts of a content have as URLs of images."""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    images = [part.get("image_url") for part in parts if part.get("type") == "image_url"]
    return [image.get("url") if isinstance(image, dict) else image for image in images]


class TokenText:
    """Turns tokens into text piece by piece; the pieces joined are the text of all, up to the first stop string.

    Special tokens have no text. Text that may become a stop string is held back until that is decided.

    Attributes:
        stopped: the stop string that came, or ""; no token after that one belongs to the response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stopped = ""
        self.ids: list[int] = []
        self.start = self.end = 0  # ids before `end` are text; ids from `start` on are decoded again, as context
        self.pending = ""

    def push(self, token_id: int) -> str:
        """Takes one more token, and returns the text that is certain now."""
        self.ids.append(token_id)
        known, text = self._decode_window()
        if len(text) > len(known) and not text.endswith(BROKEN):
            self.start, self.end = self.end, len(self.ids)
            self.pending += text[len(known) :]
        return self._release(count_held_back(self.pending, self.stops))

    def finish(self) -> str:
        """Returns the rest, when no more tokens come."""
        if self.stopped:
            return ""
        known, text = self._decode_window()
        self.start = self.end = len(self.ids)
        self.pending += text[len(known) :]
        return self._release(0)

    def _decode_window(self) -> tuple[str, str]:
        """Returns a window of the ids as text: without those that are not text yet, and with them."""
        windows = self.ids[self.start : self.end], self.ids[self.start :]
        known, text = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in windows)
        return known, text

    def _release(self, held_back: int) -> str:
        """Returns the pending text up to a stop string; without one, all but its last `held_back` characters."""
        places = [(start, stop) for stop in self.stops if (start := self.pending.find(stop)) >= 0]
        cut, self.stopped = min(places) if places else (len(self.pending) - held_back, "")
        text, self.pending = self.pending[:cut], self.pending[cut:]
        return text


def count_held_back(text: str, stops: Sequence[str]) -> int:
    """Counts the characters at the end of `text` that may begin one of the stop strings."""
    return max((size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0)


def read_piece(text: TokenText, piece: Piece | Completion) -> Part:
    """Returns new tokens with their text, up to the first stop string."""
    part = Part(finish_reason=piece.finish_reason)
    for token_id, log_prob in zip(piece.token_ids, piece.log_probs, strict=True):
        part += Part(text.push(token_id), [token_id], [log_prob], part.finish_reason)
        if text.stopped:
            break
    if piece.finish_reason is not None:
        part.text += text.finish()
    if text.stopped:
        part.finish_reason, part.stop_reason = "stop", text.stopped
    if part.finish_reason is not None:
        part.answer = Answer(text.ids, text.tokenizer, piece.finish_reason == "stop", cut=len(text.pending))
    return part
