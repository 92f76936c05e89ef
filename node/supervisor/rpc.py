"""The node's gRPC service: what is asked seldom, of the node as a whole. Decides nothing.

Every call begins with a handshake (callers.py). Gateways and peers reach engines without it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import grpc

from ...cluster.link_handshake import ACCEPTED, LEDGERS, MEMBERS, listener_ends
from ...cluster.member_calls import answer_with
from ...cluster.tls import GATEWAY
from ...core.errors import BatonError, NodeLost
from ...core.membership import Member, Role
from ...proto.v1 import node_pb2, node_pb2_grpc
from .callers import Callers, Context
from .engine_handle import EngineHandle

LEDGER_TIMEOUT_S = 10.0
_PULLER = Role.DECODE.value


class Engines(Protocol):
    """The engines of this node that are alive now, also as the directory is to have them."""

    def engines(self) -> Sequence[EngineHandle]: ...

    def members(self) -> Sequence[Member]: ...


class NodeServicer(node_pb2_grpc.NodeServicer):
    """One for a node's server."""

    def __init__(self, node: Engines, callers: Callers) -> None:
        self._node = node
        self._callers = callers

    async def GetLedgers(
        self, requests: AsyncIterator[node_pb2.GetLedgersRequest], context: Context
    ) -> None:
        async with _errors_as_status(context):
            read, write = listener_ends(requests, context, node_pb2.GetLedgersResponse)
            await self._callers.admit(context, LEDGERS, (GATEWAY,), read, write)
            await write(ACCEPTED)
            ledgers = await asyncio.gather(*(_ledger(engine) for engine in self._node.engines()))
            await context.write(node_pb2.GetLedgersResponse(ledgers=ledgers))

    async def GetMembers(
        self, requests: AsyncIterator[node_pb2.GetMembersRequest], context: Context
    ) -> None:
        async with _errors_as_status(context):
            read, write = listener_ends(requests, context, node_pb2.GetMembersResponse)
            await self._callers.admit(context, MEMBERS, (GATEWAY, _PULLER), read, write)
            await write(ACCEPTED)
            await context.write(answer_with(self._node.members(), self._callers.secret))


@asynccontextmanager
async def _errors_as_status(context: Context) -> AsyncIterator[None]:
    """A BatonError ends the call with its status and, in the trailers, the code that survives."""
    try:
        yield
    except BatonError as error:
        await context.abort(
            grpc.StatusCode[error.grpc_status],
            error.message,
            trailing_metadata=(("baton-error-code", error.code),),
        )


async def _ledger(engine: EngineHandle) -> str:
    """An engine that does not answer is said so: a ledger that is missing would look like none."""
    try:
        async with asyncio.timeout(LEDGER_TIMEOUT_S):
            return await engine.ledger()
    except (TimeoutError, NodeLost):
        return json.dumps({"incarnation": engine.incarnation, "error": "no answer"})
