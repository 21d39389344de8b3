"""An OpenAI-compatible API over one engine: /v1/models, /v1/completions, /v1/chat/completions, streaming or not.

Requests of all clients share the engine's batch (workers/engine_pump.py). What cannot be answered is refused by 4xx in
OpenAI's form of errors, before anything is generated. A client may be hostile: gate.py lets its requests in, what they
hold has bounds, and prompts are encoded beside the event loop.
"""

import asyncio
import json
import reprlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers import PreTrainedTokenizerBase

from data.chat import Prompt, as_messages, encode_prompt, parse_prompt
from data.seeding import derive_seed
from data.types import Message
from extras.server.bodies import (
    MOST_CHOICES,
    ChatBody,
    CompletionBody,
    Json,
    Part,
    ResponseBuilder,
    ScoredToken,
    TokenText,
    image_urls,
    read_piece,
    with_text,
)
from extras.server.dialects import model_card, serve_dialects
from extras.server.gate import CLIENT_GONE, RETRY_SECONDS, Gate, server_config
from extras.server.refusals import TooLong, error_body, refuse, refuse_body
from extras.server.streaming import StreamingEngine
from extras.tools.parsers import HermesParser, ToolParser, tool_kwargs
from workers.engine_pump import EngineError

LOOK_SECONDS = 0.5  # between checks whether a client that waits for a whole answer is still there
MOST_BYTES, MOST_HELD = 2 << 20, 1 << 30  # of a body, and of all at once
MOST_OPEN = 8192  # choices of all requests together that wait or are generated
ROLES = ("system", "developer", "user", "assistant", "tool")
TEMPLATE_ERRORS = (TemplateError, TypeError, AttributeError, LookupError, ArithmeticError)  # of what a client sent


@dataclass(frozen=True)
class Served:
    """The model that the API serves.

    Attributes:
        name: what clients call the model.
        vocab_size: token ids are 0 to this number − 1.
        context: most tokens of prompt and response together.
        max_tokens: of a response, where a request does not say.
        api_key: token that clients must send; None: none.
        open: "choices" that wait or are generated.
        parser: finds calls of tools in an answer.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    pump: StreamingEngine
    vocab_size: int
    context: int
    max_tokens: int
    api_key: str | None = None
    open: Counter[str] = field(default_factory=Counter)
    parser: ToolParser = field(default_factory=HermesParser)
    encoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "encoder"))

    @cached_property
    def characters(self) -> int:
        """Most characters of a prompt: no token is longer than the longest of the vocabulary."""
        return self.context * max(map(len, self.tokenizer.get_vocab()))


def http_server(served: Served, **settings: Any) -> uvicorn.Server:
    """Builds the server of the API; `settings` are uvicorn's."""
    return uvicorn.Server(server_config(build_app(served), **settings))


def check_key(api_key: str | None, path: str, headers: dict[bytes, bytes]) -> None:
    """Raises HTTPException unless the key in the headers is right, if one is asked for."""
    if api_key is None or not path.startswith("/v1"):
        return
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    token = token if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # of Anthropic's clients
    if not secrets.compare_digest(token, api_key.encode()):
        raise HTTPException(401, "the API key is missing or wrong: send the header Authorization: Bearer KEY")


def build_app(served: Served) -> FastAPI:
    """Returns the API as an ASGI application."""
    app = bare_app()
    app.add_middleware(Gate, check=partial(check_key, served.api_key), most=MOST_BYTES, most_held=MOST_HELD)

    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [model_card(served.name, served.context)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        check_model(served, name)
        return model_card(served.name, served.context)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await answer(served, body, completion_prompts(body), request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await answer(served, body, [chat_prompt(body, "images" in vars(served.tokenizer))], request)

    serve_dialects(app, "/v1", chat)
    return app


def bare_app() -> FastAPI:
    """Returns an application without routes, which refuses in OpenAI's form of errors."""
    app = FastAPI(title="nano-verl", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(StarletteHTTPException, refuse)
    return app


def check_model(served: Served, name: str) -> None:
    if name != served.name:
        raise HTTPException(404, f"there is no model {name!r} here; the one that is served is {served.name!r}")


def completion_prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    """Returns every prompt of the body, a text or token ids."""
    return [prompt] if isinstance(prompt := body.prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


def chat_prompt(body: ChatBody, reads_images: bool = False) -> list[Message]:
    """Returns the messages of the body as a prompt; raises HTTPException if they are not one."""
    try:
        messages = parse_prompt(body.messages)
        if strange := [each["role"] for each in messages if each["role"] not in ROLES]:  # a template writes it as it is
            raise ValueError(f"the role {reprlib.repr(strange[0])} is none of {', '.join(ROLES)}")
        return [with_text(each, reads_images) for each in messages]
    except ValueError as error:
        raise HTTPException(400, f"messages: {error}") from error


async def encode(served: Served, prompt: Prompt | list[int], for_template: Json) -> list[int]:
    """Returns the token ids of a prompt, which may be ids; raises HTTPException if it is longer than any that fits, if
    the chat template does not write it, or if an image cannot be read."""
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], dict)):
        return prompt
    texts = [prompt] if isinstance(prompt, str) else ["".join(map(str, message.values())) for message in prompt]
    images = [url for message in as_messages(prompt) for url in image_urls(message.get("content"))]
    characters = sum(map(len, texts)) + len(str(for_template or "")) - sum(map(len, images))
    if characters > served.characters or len(texts) + len(images) > served.context:
        size = f"{characters} characters in {len(texts)} messages, more than {served.context} tokens can hold"
        raise TooLong(400, f"the prompt has {size} (data.max_prompt_length + max_response_length)")
    encoding = partial(encode_prompt, tokenizer=served.tokenizer, **for_template)
    if images:
        encoding = partial(served.tokenizer.images.encode, images=images, key="image_url", encode=encoding)
    try:
        return await asyncio.get_running_loop().run_in_executor(served.encoder, encoding, prompt)
    except (ValueError, *TEMPLATE_ERRORS) as error:
        raise HTTPException(400, f"messages: they cannot be encoded: {error}") from error


def tokens_left(served: Served, body: CompletionBody | ChatBody, prompt: Sequence[int]) -> int:
    """Returns the most tokens of the response to `prompt`; refuses a prompt that does not fit or is empty."""
    if not prompt:
        raise HTTPException(400, "the prompt has no tokens: a response needs one to follow")
    if not 0 <= min(prompt) <= max(prompt) < served.vocab_size:
        raise HTTPException(400, f"the prompt has token ids beyond the model's, which are 0 to {served.vocab_size - 1}")
    room = served.context - len(prompt)
    length = min(served.max_tokens, room) if body.longest is None else body.longest
    if not (0 if body.longest == 0 else 1) <= length <= room:
        size = f"{len(prompt)} tokens and the response is to have {max(length, 1)}, together more than the"
        limit = f"{served.context} of this server (data.max_prompt_length + max_response_length)"
        raise TooLong(400, f"the prompt has {size} {limit}")
    return length


def check_engine(served: Served, body: CompletionBody | ChatBody) -> None:
    """Refuses ignore_eos without the model's stop token ids, at which all responses stop, and an echo with log-probs if
    the engine does not sample from the model of this process."""
    engine = served.pump.engine
    stops = {stop for stop in engine.stop_ids if stop < served.vocab_size}
    if body.ignore_eos and not stops.issubset(body.stop_token_ids or ()):
        raise HTTPException(400, f"ignore_eos: responses of this server stop at {sorted(stops)}: add stop_token_ids")
    if body.alternatives is not None and (engine.module is None or engine.own_weights or engine.elsewhere):
        raise HTTPException(400, f"echo: {type(engine).__name__} has no log-probs of prompts: leave logprobs out")


def admit(served: Served, choices: int, request: Request) -> None:
    """Counts the choices of a request until it is over; refuses it where they would be too many together."""
    if served.open["choices"] + choices > MOST_OPEN:
        detail = f"the server is busy with {served.open['choices']} choices, and takes {MOST_OPEN} at once"
        raise HTTPException(503, f"{detail}: come again later", {"Retry-After": str(RETRY_SECONDS)})
    served.open["choices"] += choices
    request.scope["ending"].callback(served.open.subtract, choices=choices)


async def answer(
    served: Served, body: CompletionBody | ChatBody, inputs: Sequence[Prompt | list[int]], request: Request
) -> Response:
    """Answers a request with all of its choices, whole or as a stream of events."""
    check_model(served, body.model)
    if not inputs:
        raise HTTPException(400, "prompt is empty")
    if len(inputs) * (body.n or 1) > MOST_CHOICES:
        size = f"{len(inputs)} prompts with n={body.n or 1}"
        raise HTTPException(400, f"{size}: a request has at most {MOST_CHOICES} choices, send several")
    check_engine(served, body)
    admit(served, len(inputs) * (body.n or 1), request)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    prompts: list[list[int]] = []
    limits: list[int] = []
    for_template = {**tool_kwargs(body.tools or [], served.parser, served.tokenizer), **body.for_template}
    for prompt in inputs:  # one after the other, so that none is encoded behind one that does not fit
        prompts.append(await encode(served, prompt, for_template))
        limits.append(tokens_left(served, body, prompts[-1]))
    choices = [
        parts(served, body, prompt, limit, derive_seed(seed, "choice", index, number))
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for number in range(body.n or 1)
    ]
    form = ResponseBuilder(body, prompts, lambda token_id: served.tokenizer.decode([token_id]), served.parser)
    if body.stream:
        return StreamingResponse(events(form, choices), media_type="text/event-stream")
    work = echo(served, form, inputs, choices) if body.echo or body.alternatives is not None else gather_parts(choices)
    return JSONResponse(form.whole(await while_awaited(request, work)))


async def while_awaited(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of `work`, which is cancelled when the client leaves; raises HTTPException for its errors."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([working], timeout=LOOK_SECONDS))[0]:
            if await request.is_disconnected():
                raise HTTPException(CLIENT_GONE, "the client has left")
        return working.result()
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    except EngineError as error:
        raise HTTPException(500, str(error)) from error
    finally:
        working.cancel()


async def parts(
    served: Served, body: CompletionBody | ChatBody, prompt: list[int], max_tokens: int, seed: int
) -> AsyncIterator[Part]:
    """Yields a choice, piece by piece; it ends with the engine's request, or before a stop string."""
    if max_tokens == 0:  # of an echo
        yield Part(finish_reason="length")
        return
    text, piecewise = TokenText(served.tokenizer, body.stops), bool(body.stream or body.stops)
    async with aclosing(served.pump.answer(prompt, body.sampling(max_tokens), seed, piecewise)) as pieces:
        async for piece in pieces:
            if piece.finish_reason == "aborted":
                raise EngineError("the engine gave the request up")
            yield read_piece(text, piece)
            if text.stopped:
                return


async def gather_parts(choices: Sequence[AsyncIterator[Part]]) -> list[Part]:
    """Returns every choice whole."""
    answers = [Part() for _ in choices]
    async with aclosing(merge_streams(choices)) as pieces:
        async for index, part in pieces:
            answers[index] += part
    return answers


async def echo(
    served: Served, form: ResponseBuilder, inputs: Sequence[str | list[int]], choices: Sequence[AsyncIterator[Part]]
) -> list[Part]:
    """Returns every choice whole, of an echo behind its prompt; with log-probs of both, where prompts are scored."""
    answers, body = await gather_parts(choices), form.body
    for index, part in enumerate(answers):
        prompt, ids = (each[index // (body.n or 1)] for each in (inputs, form.prompts))
        before = (prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)) if body.echo else ""
        part.text = before + part.text
        if body.alternatives is not None:
            work = partial(score_tokens, served.pump, [*ids, *part.token_ids], body.alternatives)
            part.scored = await asyncio.get_running_loop().run_in_executor(served.pump.thread, work)
    return answers


@torch.no_grad()
def score_tokens(pump: StreamingEngine, token_ids: list[int], alternatives: int) -> list[ScoredToken]:
    """Scores tokens by the model that the engine samples from, in the engine's thread, between its steps."""
    module = pump.engine.module
    ids = torch.tensor(token_ids, device=module.device)
    with pump.precision():
        logits = module(input_ids=ids[None], attention_mask=torch.ones_like(ids[None]), use_cache=False).logits[0, :-1]
    candidates = torch.cat([logits.topk(min(alternatives, logits.shape[-1])).indices, ids[1:, None]], dim=-1)
    sums = torch.cat([part.float().logsumexp(-1) for part in logits.split(1024)])  # in float32, a part at a time
    scores = logits.gather(-1, candidates).float() - sums[:, None]
    by_token = [dict(zip(*row, strict=True)) for row in zip(candidates.tolist(), scores.tolist(), strict=True)]
    return [*zip(token_ids, [None, *scores[:, -1].tolist()], [None, *by_token], strict=True)]


async def events(form: ResponseBuilder, choices: Sequence[AsyncIterator[Part]]) -> AsyncIterator[str]:
    """Yields the choices as server-sent events, each as soon as it is there."""
    if form.is_chat:
        for index in range(len(choices)):
            yield event(form.opening(index))
    try:
        for index, part in enumerate(await gather_parts(choices) if form.body.schemas else ()):
            yield event(form.chunk(index, part))  # whole, as a call is read at its end
        async with aclosing(merge_streams([] if form.body.schemas else choices)) as pieces:
            async for index, part in pieces:
                if part.token_ids or part.finish_reason:
                    yield event(form.chunk(index, part))
    except (ValueError, EngineError) as error:
        yield event(error_body(str(error), "server_error"))
    if (options := form.body.stream_options) and options.include_usage:
        yield event(form.closing())
    yield "data: [DONE]\n\n"


def event(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def merge_streams(streams: Sequence[AsyncIterator[Part]]) -> AsyncIterator[tuple[int, Part]]:
    """Yields (index, item) of several streams, in the order in which they come; all are closed at the end."""
    pieces: asyncio.Queue[tuple[int, Part] | asyncio.Task[None]] = asyncio.Queue()

    async def drain(index: int, stream: AsyncIterator[Part]) -> None:
        async with aclosing(stream):
            async for item in stream:
                pieces.put_nowait((index, item))

    running = {asyncio.ensure_future(drain(*each)) for each in enumerate(streams)}
    for task in running:
        task.add_done_callback(pieces.put_nowait)
    try:
        while running:
            piece = await pieces.get()
            if isinstance(piece, asyncio.Task):
                running.discard(piece)
                piece.result()
            else:
                yield piece
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
