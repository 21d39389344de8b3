"""Serves OpenAI's Responses and Anthropic's Messages by the route of chats, in a server and in a session."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import ModuleType
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError

from extras.server import anthropic_messages, responses, translation
from extras.server.bodies import ChatBody, Json

# Anthropic's clients add /v1/messages to their address, which may be the one of OpenAI's clients, with /v1.
DIALECTS = {"responses": responses, "messages": anthropic_messages, "v1/messages": anthropic_messages}
Chat = Callable[[ChatBody, Request], Awaitable[Response]]


def serve_dialects(app: FastAPI, base: str, chat: Chat) -> None:
    """Adds the routes of DIALECTS below `base`, answered by `chat`, and a 404 for all others that names all of them."""
    for path, dialect in DIALECTS.items():
        app.add_api_route(f"{base}/{path}", route_of(dialect, chat), methods=["POST"])
    routes = [route for route in app.routes if isinstance(route, APIRoute) and "/v1/v1/" not in route.path]
    served = ", ".join(
        f"{method} {route.path.removeprefix('/s/{key}')}" for route in routes for method in route.methods
    )

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def nothing(request: Request) -> None:
        raise HTTPException(404, f"{request.method} {request.url.path} is not served here; what is: {served}")


def route_of(dialect: ModuleType, chat: Chat) -> Callable[[Json, Request], Awaitable[Response]]:
    async def respond(body: Json, request: Request) -> Response:
        try:
            chat_body = ChatBody.model_validate(dialect.to_chat(body))
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        response = await chat(chat_body, request)
        if isinstance(response, StreamingResponse):
            response.body_iterator = in_events(dialect.Events(body), response.body_iterator)
            return response
        return JSONResponse(dialect.from_chat(json.loads(response.body), body))

    return respond


async def in_events(events: translation.Events, chunks: Any) -> AsyncIterator[str]:
    """Yields the chunks of a streamed chat, as they come, as the events of another API."""
    async with aclosing(chunks):
        async for chunk in chunks:
            if (text := chunk.removeprefix("data: ")) != "[DONE]\n\n":
                for event in events.of(json.loads(text)):
                    yield f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def model_card(name: str, context: int) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "nano-verl", "max_model_len": context}
