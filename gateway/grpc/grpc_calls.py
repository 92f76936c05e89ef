"""What gRPC services of the gateway do with a call: who makes it, how it fails, its traces."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from ...core.errors import BatonError, Unauthenticated
from ..admission.front_door import FrontDoor
from ..request.caller import Caller
from ..request.output_chunk import RequestResult
from ..security.gate import Gate

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

ERROR_CODE = "baton-error-code"
ERROR_PARAM = "baton-error-param"
RETRY_AFTER = "retry-after-ms"
_PUSHBACK = "grpc-retry-pushback-ms"  # what gRPC's own retries obey, where a client has them
_MAX_TRACE = 512  # characters


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """End the call with a typed error's status; no trace or path of ours reaches the caller."""
    try:
        yield
    except BatonError as error:
        await abort(context, error)
    except Exception:  # the edge: a bug costs one call, and its words stay here
        log.exception("a call failed by a bug")
        await abort(context, BatonError("internal error"))


async def abort(context: Context, error: BatonError) -> None:
    """End a call with the error's status; what programs want to know is in the trailers."""
    metadata = [(ERROR_CODE, error.code)]
    if error.param:
        metadata.append((ERROR_PARAM, error.param))
    if error.is_retryable and error.grpc_status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
        after_ms = str(math.ceil(error.retry_after_s * 1000))
        metadata += [(RETRY_AFTER, after_ms), (_PUSHBACK, after_ms)]
    status = grpc.StatusCode[error.grpc_status]
    await context.abort(status, error.message, tuple(metadata))


def caller_of(context: Context, gate: Gate, door: FrontDoor) -> Caller:
    """Raises Unauthenticated."""
    metadata = context.invocation_metadata() or ()
    try:
        shown = [v for k, v in metadata if k == "authorization"]
        return gate.caller(shown, "grpc", context.peer())
    except Unauthenticated as error:
        door.turned_away("grpc", error)
        raise


def trace(context: Context, key: str) -> str:
    """A piece of the W3C trace context that came with the call."""
    values = [value for name, value in context.invocation_metadata() or () if name == key]
    if len(values) != 1 or not isinstance(values[0], str) or len(values[0]) > _MAX_TRACE:
        return ""
    return values[0]


def tell_nodes(context: Context, result: RequestResult) -> None:
    """Who served the call, in its trailers."""
    prefill, decode = _ascii(result.prefill_node), _ascii(result.decode_node or "")
    context.set_trailing_metadata((("x-prefill-node", prefill), ("x-decode-node", decode)))


def _ascii(name: str) -> str:
    """A node's name as gRPC metadata can carry it."""
    return name.encode("ascii", "replace").decode()
