"""Requests and responses of an OpenAI-compatible API: bodies that are checked, and the JSON that answers them.

Fields are those of api.openai.com, and of vLLM's server: top_k, min_p, return_token_ids, and stop_token_ids with
ignore_eos. What this server does not do is refused unless it is left at the value that asks for nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data.types import SamplingParams

Text = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
Json = dict[str, Any]

IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
DEFAULTS = (None, 0, False, "", [], {}, "none", {"type": "text"})  # values that ask for nothing
NOT_HERE = (
    "frequency_penalty", "presence_penalty", "logit_bias", "suffix", "echo", "tools", "tool_choice", "functions",
    "function_call", "response_format", "audio", "modalities", "prediction", "reasoning_effort", "web_search_options",
)  # fmt: skip
ALTERNATIVES = "this server knows the log-prob of each sampled token, and not those of others"


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Body(BaseModel):
    """The fields that both kinds of request have."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, lt=1)
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    ignore_eos: bool | None = None

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def without_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name in NOT_HERE:
            if name in body and body[name] not in DEFAULTS:
                raise ValueError(f"{name} is not part of this server: leave it out, or serve by rollout.name=vllm")
        return {name: value for name, value in body.items() if name not in (*NOT_HERE, *IGNORED)}

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

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=0)

    object_name = chunk_name = "text_completion"

    @model_validator(mode="after")
    def check(self) -> "CompletionBody":
        if self.logprobs:
            raise ValueError(f"logprobs={self.logprobs}: {ALTERNATIVES}: set logprobs=0")
        return self

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[Json] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)

    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    @model_validator(mode="after")
    def check(self) -> "ChatBody":
        if self.top_logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs}: {ALTERNATIVES}: leave it out")
        return self

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


@dataclass
class Part:
    """New text of a choice, and the tokens behind it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.text + other.text,
            self.token_ids + other.token_ids,
            self.log_probs + other.log_probs,
            other.finish_reason,
        )


class ResponseBuilder:
    """Builds the JSON of one answer, whole or in chunks; every chunk has the same id.

    Args:
        token_text: token id → its text.
    """

    def __init__(self, body: CompletionBody | ChatBody, prompts: Sequence[list[int]], token_text: Any) -> None:
        self.body, self.prompts, self.token_text = body, prompts, token_text
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
        if self.is_chat:
            role = {"role": "assistant"} if place == "message" else {}
            choice[place] = {**role, "content": part.text}
        else:
            choice["text"] = part.text
        if self.body.wants_log_probs:
            choice["logprobs"] = self.chat_log_probs(part) if self.is_chat else self.log_probs(part)
        if self.body.return_token_ids:
            choice |= {"token_ids": part.token_ids, "prompt_token_ids": self.prompts[index // (self.body.n or 1)]}
        return choice

    def chat_log_probs(self, part: Part) -> Json:
        entries = []
        for token_id, log_prob in zip(part.token_ids, part.log_probs, strict=True):
            token = self.token_text(token_id)
            entries.append({"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}

    def log_probs(self, part: Part) -> Json:
        tokens = [self.token_text(token_id) for token_id in part.token_ids]
        return {"tokens": tokens, "token_logprobs": part.log_probs, "top_logprobs": None, "text_offset": None}


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
