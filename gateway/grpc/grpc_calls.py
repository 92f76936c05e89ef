"""What gRPC services of the gateway do with a call: who makes it, how it fails, its traces.

    add_XServicer_to_server(servicer, Parsing(server))
answers bytes that are no message with INVALID_ARGUMENT, in our text. Left to itself, gRPC answers
UNKNOWN with a Python class' name, and logs a trace for each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ...core.errors import BatonError, InvalidRequest, Unauthenticated
from ..admission.front_door import FrontDoor
from ..request.output_chunk import RequestResult
from ..security.gate import Gate
from ..security.tenancy import Caller

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_PUSHBACK = "grpc-retry-pushback-ms"  # what gRPC's own retries obey, where a client has them
_MAX_TRACE = 512  # characters


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[None]:
    """End the call with a typed error's status; no trace or path of ours reaches the caller."""
    try:
        yield
    except BatonError as error:
        await abort(context, error)
    except Exception:  # the edge: a bug costs one call, and its text stays here
        log.exception("a call failed by a bug")
        await abort(context, BatonError("internal error"))


async def abort(context: Context, error: BatonError) -> None:
    """End a call with the error's status; what programs want to know is in the trailers."""
    metadata = [("baton-error-code", error.code)]
    if error.param:
        metadata.append(("baton-error-param", error.param))
    if error.is_retryable and error.grpc_status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
        after_ms = str(math.ceil(error.retry_after_s * 1000))
        metadata += [("retry-after-ms", after_ms), (_PUSHBACK, after_ms)]
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


def call_options(context: Context) -> dict[str, Any]:
    """For FrontDoor.generate: the client's deadline, and the W3C trace context of the call."""

    def trace(key: str) -> str:
        values = [value for name, value in context.invocation_metadata() or () if name == key]
        if len(values) != 1 or not isinstance(values[0], str) or len(values[0]) > _MAX_TRACE:
            return ""
        return values[0]

    traces = {key: trace(key) for key in ("traceparent", "tracestate")}
    return {"timeout_s": context.time_remaining(), **traces}


def send_node_names(context: Context, result: RequestResult) -> None:
    """Who served the call, in its trailers: as ASCII, which is what metadata can carry."""
    names = {"x-prefill-node": result.prefill_node, "x-decode-node": result.decode_node or ""}
    ascii_names = [(key, name.encode("ascii", "replace").decode()) for key, name in names.items()]
    context.set_trailing_metadata(tuple(ascii_names))


@dataclass(frozen=True, slots=True)
class Parsing:
    """A server as generated code sees it while it adds a service."""

    _server: grpc.aio.Server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(tuple(map(_Handlers, handlers)))

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        """The same handlers once more, for servers that look them up faster, past ours."""


class _Handlers(grpc.GenericRpcHandler):
    """The handlers of a service, each with a parser that does not raise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._by_method: dict[str, Any] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        found = self._by_method.get(details.method)
        if found is None and (handler := self._inner.service(details)) is not None:
            found = self._by_method[details.method] = _tolerant(handler)
        return found


def _tolerant(handler: Any) -> Any:
    """The same for whole requests; a stream of requests keeps its own parser."""
    if handler.request_streaming:
        return handler
    parse: Any = handler.request_deserializer
    make: Any = grpc.unary_unary_rpc_method_handler
    behavior = handler.unary_unary
    if handler.response_streaming:
        make, behavior = grpc.unary_stream_rpc_method_handler, handler.unary_stream

    def parse_or_none(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return None

    async def judged(request: Any, context: Any) -> Any:
        if request is None:
            message = "the bytes are no message of this method"
            await abort(context, InvalidRequest(message, code="invalid_encoding"))
        return await behavior(request, context)

    return make(judged, parse_or_none, handler.response_serializer)
