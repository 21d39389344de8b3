"""Refuses requests in OpenAI's form of errors, which is one of Anthropic's, too."""

from typing import Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException


class TooLong(HTTPException):
    """A prompt, or a prompt with its response, has more tokens than there is room for."""


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    return {"type": "error", "error": {"message": message, "type": kind, "param": None, "code": code}}


async def refuse_body(_: Request, error: RequestValidationError) -> JSONResponse:
    """Answers 400 with the place and the reason of one error; where a value may have several forms, the error of the
    form that fits it best."""
    first = max(error.errors(), key=lambda item: len(item["loc"]))
    path = ".".join(str(part) for part in first["loc"] if part != "body")
    return JSONResponse(error_body(f"{path}: {first['msg']}" if path else first["msg"]), 400)


async def refuse(_: Request | None, error: StarletteHTTPException) -> JSONResponse:
    kinds = {401: "authentication_error", 404: "not_found_error", **dict.fromkeys((500, 503), "server_error")}
    kind = kinds.get(error.status_code, "invalid_request_error")
    code = "context_length_exceeded" if isinstance(error, TooLong) else None  # which agents look for
    return JSONResponse(error_body(error.detail, kind, code), error.status_code, error.headers)
