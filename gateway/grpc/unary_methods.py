"""The public gRPC service, baton.v1.Inference, with its unary methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.errors import InvalidRequest
from ...core.membership import Member
from ...core.request.token_ids import column
from ...core.version import version
from ...proto.codec import same_fields
from ...proto.v1 import inference_pb2
from ..admission.front_door import FrontDoor
from ..admission.text_calls import detokenize, tokenize
from ..engines.cluster_view import ClusterView
from ..engines.engine_table import EngineTable
from ..security.caller import ADMIN, INFER, METRICS, Caller
from .service import Context, GenerateService

_MAX_ABORTED = 1024  # of one call


@dataclass(eq=False)
class InferenceService(GenerateService):
    """baton.v1.Inference."""

    _table: EngineTable
    _view: ClusterView

    async def Abort(
        self, wire: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        check_names(wire.ids)
        num_aborted = abort_calls(self._door, wire.ids, self._caller(context))
        return inference_pb2.AbortResponse(num_aborted=num_aborted)

    async def GetModelInfo(
        self, wire: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.ModelInfo:
        caller, limits = self._caller(context), self._door.limits
        caller.check_model("", limits.model)
        members = self._view.members() if METRICS in caller.scopes else []
        return inference_pb2.ModelInfo(
            **same_fields(limits, inference_pb2.ModelInfo),
            eos_token_ids=self._door.model.eos_token_ids,
            nodes=[self._node_info(member) for member in members],
            version=version(),
        )

    async def Tokenize(
        self, wire: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        ids = await tokenize(self._door, wire.model, wire.text, self._caller(context))
        return inference_pb2.TokenizeResponse(ids=ids)

    async def Detokenize(
        self, wire: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        ids = column(wire.ids[:])  # a slice is read at once, the field itself id by id
        text = await detokenize(self._door, wire.model, ids, self._caller(context))
        return inference_pb2.DetokenizeResponse(text=text)

    def _node_info(self, member: Member) -> inference_pb2.NodeInfo:
        engine = self._table.engines.get(member.incarnation)
        fields = same_fields(member, inference_pb2.NodeInfo) | {
            "role": member.role.value,
            "is_ready": engine is not None and engine.is_ready,
            "links": () if engine is None else sorted(engine.load.links),
        }
        return inference_pb2.NodeInfo(**fields)


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidRequest for more requests to abort than one call may name."""
    if len(names) > _MAX_ABORTED:
        raise InvalidRequest(f"ids has more than {_MAX_ABORTED} items", "ids", "array_too_long")


def abort_calls(door: FrontDoor, names: Sequence[str], caller: Caller) -> int:
    """Cancel calls of the caller's tenant by gateway id or label; returns the number that ran.

    With the scope `admin`: calls of any tenant. Raises PermissionDenied.
    """
    if ADMIN in caller.scopes:
        return door.sessions.abort(names)
    caller.check_scope(INFER)
    return door.sessions.abort(names, caller.tenant)
