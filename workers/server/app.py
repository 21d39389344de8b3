"""An OpenAI-compatible API over one engine: /v1/models, /v1/completions, /v1/chat/completions, streaming or not.

Requests of all clients share the engine's batch (workers/engine_pump.py). What cannot be answered is refused by 4xx in
OpenAI's form of errors, before anything is generated.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers import PreTrainedTokenizerBase

from data.chat import encode_prompt, parse_prompt
from data.seeding import derive_seed
from workers.engine_pump import AsyncEngine, EngineError
from workers.server.bodies import ChatBody, CompletionBody, Json, Part, ResponseBuilder, error_body
from workers.server.text import TokenText

LOOK_SECONDS = 0.5  # between looks at whether a client that waits for a whole answer is still there
CLIENT_GONE = 499  # nobody reads it


@dataclass(frozen=True)
class Served:
    """The model that the API serves.

    Attributes:
        name: what clients call the model.
        vocab_size: token ids are 0 to this number − 1.
        context: most tokens of prompt and response together.
        max_tokens: of a response, where a request does not say.
        api_key: token that clients must send; None: none.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    pump: AsyncEngine
    vocab_size: int
    context: int
    max_tokens: int
    api_key: str | None = None


def build_app(served: Served) -> FastAPI:
    """Returns the API as an ASGI application."""
    app = FastAPI(title="nano-verl", docs_url=None, redoc_url=None, openapi_url=None)
    guarded = [Depends(api_key_check(served.api_key))]

    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> Json:
        return {"object": "list", "data": [model_card(served)]}

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def model(name: str) -> Json:
        check_model(served, name)
        return model_card(served)

    @app.post("/v1/completions", dependencies=guarded)
    async def completions(body: CompletionBody, request: Request) -> Response:
        check_model(served, body.model)
        return await answer(served, body, completion_prompts(body, served.tokenizer), request)

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(body: ChatBody, request: Request) -> Response:
        check_model(served, body.model)
        return await answer(served, body, [chat_prompt(body, served.tokenizer)], request)

    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(StarletteHTTPException, refuse)
    return app


def api_key_check(api_key: str | None) -> Callable[[Request], Awaitable[None]]:
    """Returns the check that every guarded route runs: the token of the Authorization header, if one is asked for."""

    async def check(request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if api_key is None:
            return
        if scheme.lower() != "bearer" or not secrets.compare_digest(token.encode(), api_key.encode()):
            raise HTTPException(401, "the API key is missing or wrong: send the header Authorization: Bearer KEY")

    return check


async def refuse_body(_: Request, error: RequestValidationError) -> JSONResponse:
    """400, with the place and the reason of one thing that is wrong: of what may be written in several ways, that which
    is wrong in the nearest one."""
    first = max(error.errors(), key=lambda found: len(found["loc"]))
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    return JSONResponse(error_body(f"{place}: {first['msg']}" if place else first["msg"]), 400)


async def refuse(_: Request, error: StarletteHTTPException) -> JSONResponse:
    kinds = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}
    kind = kinds.get(error.status_code, "invalid_request_error")
    return JSONResponse(error_body(error.detail, kind), error.status_code)


def check_model(served: Served, name: str) -> None:
    if name != served.name:
        raise HTTPException(404, f"there is no model {name!r} here; the one that is served is {served.name!r}")


def model_card(served: Served) -> Json:
    card = {"id": served.name, "object": "model", "created": 0, "owned_by": "nano-verl"}
    return {**card, "max_model_len": served.context}


def completion_prompts(body: CompletionBody, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Returns the token ids of every prompt of the body."""
    prompts = body.prompt
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        prompts = [prompts]
    return [encode_prompt(prompt, tokenizer) if isinstance(prompt, str) else prompt for prompt in prompts]


def chat_prompt(body: ChatBody, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        return encode_prompt(parse_prompt(body.messages), tokenizer)
    except (ValueError, TemplateError) as error:
        raise HTTPException(400, f"messages: {error}") from error


def tokens_left(served: Served, body: CompletionBody | ChatBody, prompt: Sequence[int]) -> int:
    """Returns the most tokens of the response to `prompt`; refuses what does not fit, or is no prompt."""
    if not prompt:
        raise HTTPException(400, "the prompt has no tokens: a response needs one to follow")
    if not 0 <= min(prompt) <= max(prompt) < served.vocab_size:
        raise HTTPException(400, f"the prompt has token ids beyond the model's, which are 0 to {served.vocab_size - 1}")
    room = served.context - len(prompt)
    asked = min(served.max_tokens, room) if body.longest is None else body.longest
    if not 0 < asked <= room:
        raise HTTPException(
            400,
            f"the prompt has {len(prompt)} tokens and the response is to have {max(asked, 1)}, together more than the "
            f"{served.context} of this server (data.max_prompt_length + max_response_length)",
        )
    return asked


def check_stops(served: Served, body: CompletionBody | ChatBody) -> None:
    """Refuses ignore_eos, unless the token ids that the model stops at are named too: all its responses stop there."""
    stops = {stop for stop in served.pump.engine.stop_ids if stop < served.vocab_size}
    if body.ignore_eos and not stops.issubset(body.stop_token_ids or ()):
        raise HTTPException(400, f"ignore_eos: responses of this server stop at {sorted(stops)}: add stop_token_ids")


async def answer(
    served: Served, body: CompletionBody | ChatBody, prompts: list[list[int]], request: Request
) -> Response:
    """Answers a request with all of its choices, whole or as a stream of events."""
    if not prompts:
        raise HTTPException(400, "prompt is empty")
    check_stops(served, body)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    limits = [tokens_left(served, body, prompt) for prompt in prompts]
    choices = [
        parts(served, body, prompt, limit, derive_seed(seed, "choice", place, number))
        for place, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for number in range(body.n or 1)
    ]
    form = ResponseBuilder(body, prompts, lambda token_id: served.tokenizer.decode([token_id]))
    if body.stream:
        return StreamingResponse(events(form, choices), media_type="text/event-stream")
    working = asyncio.ensure_future(gather_parts(choices))
    try:
        while not (await asyncio.wait([working], timeout=LOOK_SECONDS))[0]:
            if await request.is_disconnected():
                return Response(status_code=CLIENT_GONE)
        return JSONResponse(form.whole(working.result()))
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
    text = TokenText(served.tokenizer, body.stops)
    piecewise = bool(body.stream or body.stops)
    async with aclosing(served.pump.answer(prompt, body.sampling(max_tokens), seed, piecewise)) as pieces:
        async for piece in pieces:
            part = Part(finish_reason=piece.finish_reason)
            for token_id, log_prob in zip(piece.token_ids, piece.log_probs, strict=True):
                part += Part(text.push(token_id), [token_id], [log_prob], part.finish_reason)
                if text.stopped:
                    break
            if piece.finish_reason is not None:
                part.text += text.finish()
            if text.stopped:
                part.finish_reason = "stop"
            yield part
            if text.stopped:
                return


async def gather_parts(choices: Sequence[AsyncIterator[Part]]) -> list[Part]:
    """Returns every choice whole."""
    found = [Part() for _ in choices]
    async with aclosing(merge_streams(choices)) as pieces:
        async for index, part in pieces:
            found[index] += part
    return found


async def events(form: ResponseBuilder, choices: Sequence[AsyncIterator[Part]]) -> AsyncIterator[str]:
    """Yields the choices as server-sent events, each as soon as it is there."""
    if form.is_chat:
        for index in range(len(choices)):
            yield event(form.opening(index))
    try:
        async with aclosing(merge_streams(choices)) as pieces:
            async for index, part in pieces:
                if part.token_ids or part.finish_reason:
                    yield event(form.chunk(index, part))
    except (ValueError, EngineError) as error:
        yield event(error_body(str(error), "server_error"))
    options = form.body.stream_options
    if options is not None and options.include_usage:
        yield event(form.closing())
    yield "data: [DONE]\n\n"


def event(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def merge_streams(streams: Sequence[AsyncIterator[Part]]) -> AsyncIterator[tuple[int, Part]]:
    """Yields (index, item) of several streams, in the order in which they come; all are closed at the end."""
    waiting = {asyncio.ensure_future(anext(stream, None)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, item = waiting.pop(task), task.result()
                if item is not None:
                    waiting[asyncio.ensure_future(anext(streams[index], None))] = index
                    yield index, item
    finally:
        for task in waiting:
            task.cancel()
        for task in waiting:
            with suppress(asyncio.CancelledError, ValueError, EngineError):
                await task
        for stream in streams:
            await stream.aclose()
