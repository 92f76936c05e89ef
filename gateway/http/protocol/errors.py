"""Errors as OpenAI's clients read them: one body for all, whatever raised it.

Knows no route. What only HTTP can refuse (a body's size, an unknown path) is a `Refusal`; all else
is a BatonError of core/errors.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from ....core.errors import BatonError
from .absent_routes import what_exists

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MAX_SHOWN_PATH = 200


class Refusal(Exception):
    """A request that HTTP itself refuses. The connection is closed if `is_fatal`: its rest is not
    worth reading."""

    def __init__(self, status: int, code: str, message: str, *, is_fatal: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.is_fatal = is_fatal


def error_body(error: BatonError | Refusal) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`"""
    if isinstance(error, Refusal):
        return _body(error.status, error.code, error.message, None)
    return _body(error.http_status, error.code, error.message, error.param)


def _body(status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: BatonError | Refusal) -> web.Response:
    """A whole answer; says when to try again where that can help."""
    headers: dict[str, str] = {}
    status = error.status if isinstance(error, Refusal) else error.http_status
    if isinstance(error, BatonError) and error.is_retryable and status in (429, 503):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = _json(status, error_body(error), headers)
    if isinstance(error, Refusal) and error.is_fatal:
        response.force_close()
    return response


def routing_error_response(request: web.Request, error: web.HTTPException) -> web.Response:
    """For what aiohttp itself refuses: unknown paths and methods."""
    path = request.raw_path[:_MAX_SHOWN_PATH]
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    if error.status == 404:
        exists = what_exists(request.path[:_MAX_SHOWN_PATH])
        message, code = f"Invalid URL ({request.method} {path}): {exists}", "not_found"
    elif error.status == 405:
        message, code = f"Not allowed to {request.method} on {path}", "method_not_allowed"
    else:
        message, code = HTTPStatus(error.status).phrase, "http_error"
    return _json(error.status, _body(error.status, code, message, None), headers)


def _json(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> web.Response:
    return web.Response(
        text=json.dumps(body), status=status, headers=headers, content_type="application/json"
    )
