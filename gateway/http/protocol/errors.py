"""The middleware around every route: turns failures into errors in the form of OpenAI's API.

What only HTTP can refuse (a body's size, an unknown path) is a `Refusal`. A stream that has begun
cannot change its status: its failure is sent as its last event. The error for an unknown path names
what to use instead, from a table of names; the routes themselves are in app.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from ....core.errors import BatonError, Cancelled
from ....core.request.text_parameters import is_label
from .app_state import APP_STATE, STREAM

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID_HEADER = "X-Request-ID"
REQUEST_ID = web.RequestKey("request_id", str)  # the client's id of the request, or ours
NUM_EVENTS = web.RequestKey("num_events", int)  # events sent, in streams that number them

_LAST_WRITE_S = 0.25
_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"  # with the errors of their own APIs
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MAX_SHOWN_PATH = 200

_CHAT = "use POST /v1/chat/completions"
_TEXT = "use POST /v1/completions"
_TEXT_ALONE = "this server only generates text"
_NO_VECTORS = (
    "there are no embeddings and no scores here: the deployment passes the KV of decoders from "
    "prefill to decode, and what pools hidden states needs no decode; run an embedding server"
)
_STATELESS = "nothing is kept between requests: send the whole chat to POST /v1/chat/completions"
_NO_FILES = "files are not supported: send requests one by one"
_RUN_BATCH = f"{_NO_FILES}, or a file of them with `baton run-batch --url`"
_OPERATED = "a deployment is operated with `baton` and its nodes' own flags, not over HTTP"

# By the first one or two parts of the path after a leading /v1.
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("chat", "api/chat", "interactions"), _CHAT),
    "messages/batches": _NO_FILES,
    "responses": "for stored responses use GET and DELETE /v1/responses/{response_id}",
    **dict.fromkeys(("complete", "generate", "generate_stream", "invocations", "infer"), _TEXT),
    **dict.fromkeys(("api/generate", "engines", "inference"), _TEXT),
    **dict.fromkeys(("embeddings", "embed", "api/embed", "api/embeddings"), _NO_VECTORS),
    **dict.fromkeys(("pooling", "score", "rerank", "v2/rerank", "classify"), _NO_VECTORS),
    "moderations": _TEXT_ALONE,
    **dict.fromkeys(("audio", "images", "videos", "realtime"), _TEXT_ALONE),
    **dict.fromkeys(("assistants", "threads", "conversations", "vector_stores"), _STATELESS),
    **dict.fromkeys(("files", "uploads", "batches"), _RUN_BATCH),
    "fine_tuning": _NO_FILES,
    **dict.fromkeys(("api/tags", "api/show", "get_model_info"), "use GET /v1/models"),
    **dict.fromkeys(("info", "get_server_info", "get_load"), "use GET /server_info"),
    **dict.fromkeys(("ping", "healthz", "livez"), "use GET /live"),
    **dict.fromkeys(("readyz", "health_generate"), "use GET /ready"),
    **dict.fromkeys(("docs", "redoc", "swagger"), "use GET /openapi.json"),
    **dict.fromkeys(("pause", "resume", "sleep", "wake_up", "update_weights"), _OPERATED),
    **dict.fromkeys(("reset_prefix_cache", "flush_cache", "collective_rpc"), _OPERATED),
    **dict.fromkeys(("start_profile", "stop_profile"), _OPERATED),
}
_OURS = (  # routes that clients request without /v1, or with one /v1 too many
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/tokenize", "/detokenize", "/metrics", "/load", "/health"),
)
_RENAMED = {path.removeprefix("/v1").lstrip("/"): path for path in _OURS}
_ROUTES = (
    "there are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, "
    "/tokenize, /detokenize, and what GET /openapi.json lists"
)


class Refusal(BatonError):
    """A request that the HTTP layer refuses. `is_fatal`: the connection is closed, and the rest of
    the request is not read."""

    def __init__(self, status: int, code: str, message: str, *, is_fatal: bool = False) -> None:
        super().__init__(message)
        self.http_status = status
        self.code = code
        self.is_fatal = is_fatal


def error_text(error: BatonError, path: str = "") -> str:
    """`{"error": {"message", "type", "param", "code"}}`; Anthropic's has an outer `type`."""
    status = error.http_status
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    details = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    if not path.startswith(_MESSAGES):
        return json.dumps({"error": details})
    details["type"] = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else kind)
    return json.dumps({"type": "error", "error": details})


def _error_event(error: BatonError, request: web.Request) -> str:
    """The last event of a stream that failed."""
    if request.path.startswith(_MESSAGES):
        return f"event: error\ndata: {error_text(error, request.path)}\n\n"
    if not request.path.startswith(_RESPONSES):
        return f"data: {error_text(error)}\n\n"
    number = request.get(NUM_EVENTS, 0)
    details = {"type": "error", "sequence_number": number, "code": error.code}
    details |= {"message": error.message, "param": error.param}
    return f"event: error\ndata: {json.dumps(details)}\n\n"


def error_response(error: BatonError, path: str = "") -> web.Response:
    """The error as a whole response, with Retry-After if a retry can help."""
    headers: dict[str, str] = {}
    status = error.http_status
    if error.is_retryable and status in (429, 503):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    response = web.Response(
        text=error_text(error, path),
        status=status,
        headers=headers,
        content_type="application/json",
    )
    if isinstance(error, Refusal) and error.is_fatal:
        response.force_close()
    return response


@web.middleware
async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware: turns exceptions into responses."""
    name = request.headers.get(REQUEST_ID_HEADER, "")
    if is_label(name):  # other ids are not echoed, and are refused where they are used
        request[REQUEST_ID] = name
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _routing_error(request, error)
    except BatonError as error:
        return await _refuse(request, error)
    except ConnectionError:  # the client went away, and nobody reads the answer
        stream: web.StreamResponse | None = request.get(STREAM)
        return web.Response(status=Cancelled.http_status) if stream is None else stream
    except Exception:  # a bug fails one call only, and its text is not sent
        log.exception("an HTTP call failed by a bug")
        return await _refuse(request, BatonError("internal error"))


async def _refuse(request: web.Request, error: BatonError) -> web.StreamResponse:
    stream: web.StreamResponse | None = request.get(STREAM)
    if stream is None:
        response = error_response(error, request.path)
        if request.app[APP_STATE].door.is_draining:
            response.force_close()  # the next request goes to another gateway
        return response
    stream.force_close()
    try:
        async with asyncio.timeout(_LAST_WRITE_S):  # a client that does not read gets no event
            await stream.write(_error_event(error, request).encode())
            await stream.write_eof()
    except (TimeoutError, OSError):
        if request.transport is not None:
            request.transport.abort()
    return stream


def _routing_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """The response to what aiohttp itself refuses: unknown paths and methods."""
    path = request.raw_path[:_MAX_SHOWN_PATH]
    message, code = HTTPStatus(error.status).phrase, "http_error"
    if error.status == 404:
        exists = _what_exists(request.path[:_MAX_SHOWN_PATH])
        message, code = f"Invalid URL ({request.method} {path}): {exists}", "not_found"
    elif error.status == 405:
        message, code = f"Not allowed to {request.method} on {path}", "method_not_allowed"
    response = error_response(Refusal(error.status, code, message), request.path)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _what_exists(path: str) -> str:
    """The second half of the error message for an unknown `path`: what to use instead."""
    name = path.lower().strip("/")
    while name == "v1" or name.startswith("v1/"):
        name = name.removeprefix("v1").lstrip("/")
    if name in _RENAMED:
        return f"the path is {_RENAMED[name]}"
    first_two = "/".join(name.split("/")[:2])
    first = name.partition("/")[0]
    return _INSTEAD.get(first_two) or _INSTEAD.get(first) or _ROUTES


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Set the request's id on every response, errors too, and hide aiohttp's name and version."""
    response.headers["Server"] = "baton"
    if name := request.get(REQUEST_ID):
        response.headers[REQUEST_ID_HEADER] = name
