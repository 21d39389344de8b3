"""Serves OpenAI's Responses and Anthropic's Messages by the route of chats, in a server and in a session."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError

from extras.server import anthropic_messages, responses
from extras.server.bodies import ChatBody, Json
from extras.server.translation import Events

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@dataclass(frozen=True)
class Dialect:
    """An API as a translation of the chat API: of a request, of an answer, of a stream, and of fields' names."""

    to_chat: Callable[[Json], Json]
    from_chat: Callable[[Json, Json], Json]
    events: type[Events]
    names: dict[str, str]


RESPONSES = Dialect(responses.to_chat, responses.from_chat, responses.ResponseEvents, responses.NAMES)
MESSAGES = Dialect(
    anthropic_messages.to_chat, anthropic_messages.from_chat, anthropic_messages.MessageEvents, anthropic_messages.NAMES
)
# Anthropic's clients add /v1/messages to their address, which may be the one of OpenAI's clients, with /v1.
DIALECTS = {"responses": RESPONSES, "messages": MESSAGES, "v1/messages": MESSAGES}


def serve_dialects(app: FastAPI, base: str, chat: Callable[[ChatBody, Request], Awaitable[Response]]) -> None:
    """Adds the routes of DIALECTS below `base`, answered by `chat`, and a 404 for all others that names all of them."""

    def route(dialect: Dialect) -> Callable[[Json, Request], Awaitable[Response]]:
        async def respond(body: Json, request: Request) -> Response:
            return translate(dialect, body, await chat(chat_body(dialect, body), request))

        return respond

    for path, dialect in DIALECTS.items():
        app.add_api_route(f"{base}/{path}", route(dialect), methods=["POST"])
    routes = [route for route in app.routes if isinstance(route, APIRoute) and "/v1/v1/" not in route.path]
    served = ", ".join(
        f"{method} {route.path.removeprefix('/s/{key}')}" for route in routes for method in route.methods
    )

    async def nothing_here(request: Request) -> None:
        raise HTTPException(404, f"{request.method} {request.url.path} is not served here; what is: {served}")

    app.add_api_route("/{path:path}", nothing_here, methods=METHODS)


def chat_body(dialect: Dialect, body: Json) -> ChatBody:
    """Returns the body of the chat that a request asks for; raises what a chat's route does, by the request's names."""
    try:
        return ChatBody.model_validate(dialect.to_chat(body))
    except ValidationError as error:
        names = {chat: name for name, chat in dialect.names.items()}
        errors = [{**each, "loc": tuple(names.get(part, part) for part in each["loc"])} for each in error.errors()]
        raise RequestValidationError(errors) from error
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


def translate(dialect: Dialect, body: Json, response: Response) -> Response:
    """Returns the response of a chat in another API, whole or as a stream."""
    if isinstance(response, StreamingResponse):
        response.body_iterator = in_events(dialect.events(body), response.body_iterator)
        return response
    return with_content(response, dialect.from_chat(json.loads(response.body), body))


def with_content(response: Response, content: Json) -> Response:
    response.body = response.render(content)
    response.headers["content-length"] = str(len(response.body))
    return response


async def in_events(events: Events, chunks: Any) -> AsyncIterator[str]:
    """Yields the chunks of a streamed chat, as they come, as the events of another API."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if (text := chunk.removeprefix("data: ")) != "[DONE]\n\n":
                for event in events.of(json.loads(text)):
                    yield f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def model_card(name: str, context: int) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "nano-verl", "max_model_len": context}


def in_its_form(handler: Callable[[Any, Any], Awaitable[Response]]) -> Callable[[Request, Any], Awaitable[Response]]:
    """Makes the answer of a handler of errors one in the form of the API that was asked."""

    async def handle(request: Request, error: Any) -> Response:
        response = await handler(request, error)
        if request.url.path.endswith("/messages"):
            message = json.loads(response.body)["error"]["message"]
            return with_content(response, anthropic_messages.error(message, response.status_code))
        return response

    return handle
