"""What a gRPC server does with bytes that are no message: INVALID_ARGUMENT, in our words.

    add_XServicer_to_server(servicer, Parsing(server))
Left to itself, gRPC answers UNKNOWN with a Python class' name, and logs a trace for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ...core.errors import BatonError, InvalidRequest

Abort = Callable[[Any, BatonError], Any]


class Parsing:
    """A server as generated code sees it while it adds a service. `abort(context, error)` ends a
    call with the error's status."""

    def __init__(self, server: grpc.aio.Server, abort: Abort) -> None:
        self._server = server
        self._abort = abort

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        parsing = [_Handlers(handler, self._abort) for handler in handlers]
        self._server.add_generic_rpc_handlers(tuple(parsing))

    def add_registered_method_handlers(self, service: str, methods: Mapping[str, Any]) -> None:
        """The same handlers once more, for servers that look them up faster: ours would not be
        asked then."""


class _Handlers(grpc.GenericRpcHandler):
    """The handlers of a service, each with a parser that does not raise."""

    def __init__(self, inner: Any, abort: Abort) -> None:
        self._inner = inner
        self._abort = abort
        self._by_method: dict[str, Any] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        found = self._by_method.get(details.method)
        if found is None and (handler := self._inner.service(details)) is not None:
            found = self._by_method[details.method] = _tolerant(handler, self._abort)
        return found


def _tolerant(handler: Any, abort: Abort) -> Any:
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
            await abort(
                context,
                InvalidRequest("the bytes are no message of this method", code="invalid_encoding"),
            )
        return await behavior(request, context)

    return make(judged, parse_or_none, handler.response_serializer)
