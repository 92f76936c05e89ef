"""The public gRPC service, baton.v1.Inference: a front of the gateway.

Owns the translation between its messages and the front door; calls as such are grpc_calls.py's.
Beside it there is vLLM's, where its stubs are installed: with the extra `smg`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from google.protobuf.runtime_version import VersionError

from ...core.membership import Member
from ...core.request.token_ids import column
from ...core.version import version
from ...proto.v1 import inference_pb2, inference_pb2_grpc
from ..admission.front_door import FrontDoor
from ..engines.cluster_view import ClusterView
from ..engines.engine_table import EngineTable
from ..engines.wire import chunk_to_wire
from ..security.gate import Gate
from ..security.tenancy import METRICS, Caller
from ..validation.validation import check_names
from .grpc_calls import Context, answering, call_options, caller_of, send_node_names

log = logging.getLogger(__name__)


@dataclass(eq=False)
class InferenceService(inference_pb2_grpc.InferenceServicer):
    """baton.v1.Inference."""

    _door: FrontDoor
    _gate: Gate
    _table: EngineTable
    _view: ClusterView

    async def Generate(self, wire: inference_pb2.GenerateRequest, context: Context) -> None:
        await self._door.arrivals.take()
        async with (
            answering(context),
            self._door.generate(wire, self._caller(context), **call_options(context)) as generation,
        ):
            async for chunk in generation.chunks():
                if chunk.result is not None:
                    send_node_names(context, chunk.result)
                await context.write(chunk_to_wire(generation.call_id, chunk))

    async def Abort(
        self, wire: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        async with answering(context):
            check_names(wire.ids)
            num_aborted = self._door.abort(wire.ids, self._caller(context))
        return inference_pb2.AbortResponse(num_aborted=num_aborted)

    async def GetModelInfo(
        self, wire: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.ModelInfo:
        async with answering(context):
            caller = self._caller(context)
            caller.check_model("", self._door.limits.model)
        limits = self._door.limits
        members = self._view.members() if METRICS in caller.scopes else []
        members.sort(key=lambda m: (m.role.value, m.name, m.incarnation))
        return inference_pb2.ModelInfo(
            model=limits.model,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            eos_token_ids=self._door.model.eos_token_ids,
            nodes=[self._node_info(member) for member in members],
            version=version(),
        )

    async def Tokenize(
        self, wire: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        async with answering(context):
            ids = await self._door.tokenize(wire.model, wire.text, self._caller(context))
        return inference_pb2.TokenizeResponse(ids=ids)

    async def Detokenize(
        self, wire: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        async with answering(context):
            ids = column(wire.ids[:])  # a slice is read at once, the field itself id by id
            text = await self._door.detokenize(wire.model, ids, self._caller(context))
        return inference_pb2.DetokenizeResponse(text=text)

    def _caller(self, context: Context) -> Caller:
        return caller_of(context, self._gate, self._door)

    def _node_info(self, member: Member) -> inference_pb2.NodeInfo:
        engine = self._table.engines.get(member.incarnation)
        return inference_pb2.NodeInfo(
            name=member.name,
            role=member.role.value,
            incarnation=member.incarnation,
            is_ready=engine is not None and engine.is_ready,
            num_blocks=member.num_blocks,
            block_size=member.block_size,
            links=() if engine is None or engine.load is None else sorted(engine.load.links),
        )


def add_extra_services(
    server: Any, door: FrontDoor, gate: Gate, table: EngineTable
) -> tuple[str, ...]:
    """Add what can be added to `server`, a gRPC server or what stands before one; their names."""
    try:
        from . import vllm_engine
    except ImportError:
        return ()
    except VersionError as error:
        log.warning("smg-grpc-proto is installed, but does not fit protobuf here: %s", error)
        return ()
    service = vllm_engine.VllmEngineService(door, gate, table)
    vllm_engine.add_to_server(service, server)
    return (vllm_engine.SERVICE_NAME,)
