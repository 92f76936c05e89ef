"""Around every route: failures become OpenAI's error bodies, and the request's name is echoed.

A stream that has begun cannot change its status any more: its failure is its last event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from ....core.errors import BatonError, Cancelled
from ...validation.validation import is_label
from .app_state import APP_STATE, STREAM
from .connections import check_head
from .errors import Refusal, error_body, error_response, routing_error_response

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID_HEADER = "X-Request-ID"
REQUEST_ID = web.RequestKey("request_id", str)  # the client's name for it, or ours

_LAST_WRITE_S = 0.25


@web.middleware
async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost middleware."""
    name = request.headers.get(REQUEST_ID_HEADER, "")
    if is_label(name):  # others are not echoed, and refused where they would be used
        request[REQUEST_ID] = name
    try:
        check_head(request)
        return await handler(request)
    except web.HTTPException as error:
        return routing_error_response(request, error)
    except (BatonError, Refusal) as error:
        return await _refuse(request, error)
    except ConnectionError:  # of the client's: it went away, and nobody reads what we answer
        stream: web.StreamResponse | None = request.get(STREAM)
        return web.Response(status=Cancelled.http_status) if stream is None else stream
    except Exception:  # the edge: a bug costs one call, and its words stay here
        log.exception("an HTTP call failed by a bug")
        return await _refuse(request, BatonError("internal error"))


async def _refuse(request: web.Request, error: BatonError | Refusal) -> web.StreamResponse:
    stream: web.StreamResponse | None = request.get(STREAM)
    if stream is None:
        response = error_response(error)
        if request.app[APP_STATE].door.is_draining:
            response.force_close()  # the next request finds another gateway
        return response
    stream.force_close()
    try:
        async with asyncio.timeout(_LAST_WRITE_S):  # whoever does not read hears nothing
            await stream.write(f"data: {json.dumps(error_body(error))}\n\n".encode())
            await stream.write_eof()
    except (TimeoutError, OSError):
        if request.transport is not None:
            request.transport.abort()
    return stream


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, errors too: what the client calls its request. Not what software we are."""
    response.headers["Server"] = "baton"
    if name := request.get(REQUEST_ID):
        response.headers[REQUEST_ID_HEADER] = name
