"""The gRPC front of the gateway: baton.v1.Inference's Generate, and what every gRPC service needs
for a call (its caller, its error status, its trace context).

Owns the translation between gRPC messages and the front door. vLLM's service (vllm_engine.py) is
served beside it if its stubs are installed: the extra `smg`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ...core.errors import BatonError, InvalidRequest, Unauthenticated
from ...proto import codec
from ...proto.v1 import inference_pb2, inference_pb2_grpc
from ..admission.front_door import FrontDoor
from ..request.output_chunk import OutputChunk, RequestResult
from ..security.accepted_keys import AcceptedKeys
from ..security.caller import Caller, anyone

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_PUSHBACK = "grpc-retry-pushback-ms"  # read by gRPC's retries, if the client has enabled them
_MAX_TRACE = 512  # characters


async def abort(context: Context, error: BatonError) -> None:
    """End a call with the error's status; the error's fields are in the trailing metadata."""
    metadata = [("baton-error-code", error.code)]
    if error.param:
        metadata.append(("baton-error-param", error.param))
    if error.is_retryable and error.grpc_status in ("RESOURCE_EXHAUSTED", "UNAVAILABLE"):
        after_ms = str(math.ceil(error.retry_after_s * 1000))
        metadata += [("retry-after-ms", after_ms), (_PUSHBACK, after_ms)]
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(metadata))


@dataclass(eq=False)
class GrpcFront:
    """The base of the gRPC services: the front door, and the callers' API keys."""

    _door: FrontDoor
    _keys: AcceptedKeys | None  # None: no API key is required

    def _caller(self, context: Context) -> Caller:
        """The caller, by its API key. Raises Unauthenticated."""
        if self._keys is None:
            return anyone("grpc", context.peer())
        metadata = context.invocation_metadata() or ()
        try:
            return self._keys.caller([v for k, v in metadata if k == "authorization"], "grpc")
        except Unauthenticated as error:
            self._door.feed.call_refused(anyone("grpc"), error)
            raise


def call_options(context: Context) -> dict[str, Any]:
    """Options of FrontDoor.generate: the client's deadline, and the W3C trace context."""
    options: dict[str, Any] = {"timeout_s": context.time_remaining()}
    for key in ("traceparent", "tracestate"):
        values = [value for name, value in context.invocation_metadata() or () if name == key]
        if len(values) == 1 and isinstance(values[0], str) and len(values[0]) <= _MAX_TRACE:
            options[key] = values[0]
    return options


def send_node_names(context: Context, result: RequestResult) -> None:
    """Send the names of the call's nodes in its trailing metadata, which is ASCII."""
    names = {"x-prefill-node": result.prefill_node, "x-decode-node": result.decode_node or ""}
    ascii_names = [(key, name.encode("ascii", "replace").decode()) for key, name in names.items()]
    context.set_trailing_metadata(tuple(ascii_names))


class TypedErrors(grpc.aio.ServerInterceptor):
    """Around every method: a call that fails, or whose bytes cannot be parsed, ends with the status
    of a typed error. By default gRPC returns UNKNOWN with the name of a Python class."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        return handler and with_typed_errors(handler)


def with_typed_errors(handler: Any) -> Any:
    """The handler of a method; unchanged if it takes a stream of requests."""
    if handler.request_streaming:
        return handler
    make: Any = grpc.unary_unary_rpc_method_handler
    behavior = handler.unary_unary
    if handler.response_streaming:
        make, behavior = grpc.unary_stream_rpc_method_handler, handler.unary_stream

    async def answer(data: bytes, context: Any) -> Any:
        try:
            try:
                request = handler.request_deserializer(data)
            except DecodeError as error:
                message = "the bytes are no message of this method"
                raise InvalidRequest(message, code="invalid_encoding") from error
            return await behavior(request, context)
        except (grpc.aio.AbortError, NotImplementedError):  # it has set its own status
            raise
        except BatonError as error:
            await abort(context, error)
        except Exception:  # a bug fails one call, and its text stays in our log
            log.exception("a call failed by a bug")
            await abort(context, BatonError("internal error"))

    return make(answer, None, handler.response_serializer)


class GenerateService(GrpcFront, inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference's Generate; unary_methods.py has its other methods."""

    async def Generate(self, wire: inference_pb2.GenerateRequest, context: Context) -> None:
        await self._door.arrivals.take()
        caller = self._caller(context)
        async with self._door.generate(wire, caller, **call_options(context)) as generation:
            async for chunk in generation.chunks():
                if chunk.result is not None:
                    send_node_names(context, chunk.result)
                await context.write(chunk_to_wire(generation.record.call_id, chunk))


def chunk_to_wire(request_id: str, chunk: OutputChunk) -> inference_pb2.GenerateChunk:
    """A chunk for the client. A sample's last one has its finish reason and its result."""
    wire = inference_pb2.GenerateChunk(
        id=request_id,
        text=chunk.text,
        token_ids=chunk.token_ids,
        index=chunk.index,
        sample_index=chunk.sample_index,
    )
    if chunk.logprobs:
        wire.logprobs.extend(map(codec.logprobs_to_wire, chunk.logprobs))
    if chunk.prompt_logprobs:
        wire.prompt_logprobs.extend(map(codec.logprobs_to_wire, chunk.prompt_logprobs))
    if (result := chunk.result) is not None:
        wire.finish_reason = codec.FINISH_TO_WIRE[result.finish_reason]
        if isinstance(result.matched_stop, int):
            wire.matched_stop_id = result.matched_stop
        else:
            wire.matched_stop = result.matched_stop or ""
        fields = codec.same_fields(result, inference_pb2.Result)
        if (transfer := result.transfer) is not None:
            fields["transfer_bytes"] = transfer.num_bytes
            fields["transfer_cached_tokens"] = transfer.cached_tokens
            fields["transport"] = transfer.transport
        fields["timeline"] = codec.stamps_to_wire(result.timeline)
        wire.result.CopyFrom(inference_pb2.Result(**fields))
    return wire
