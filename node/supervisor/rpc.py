"""The node's gRPC face: Node for gateways, Handoff for pullers. Relays, and decides nothing.

Every call begins with a handshake (callers.py). A stream belongs to one incarnation of one engine
and ends with it, by a status that says why. The handlers are coroutines, not generators: their
`finally` then runs at the moment a stream is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

import grpc

from ...cluster.link_handshake import ACCEPTED, HANDOFF, LEDGERS, MEMBERS, SESSION, listener_ends
from ...cluster.member_calls import answer_with
from ...cluster.tls import GATEWAY
from ...core.errors import BatonError, NodeLost, Overloaded, PermissionDenied
from ...core.membership import Member, Role
from ...proto.v1 import handoff_pb2, handoff_pb2_grpc, node_pb2, node_pb2_grpc
from .callers import Callers, Context
from .engine_handle import EngineHandle
from .mailbox import Mailbox

LEDGER_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
_PULLER = Role.DECODE.value

log = logging.getLogger(__name__)

M = TypeVar("M")
_Outgoing: TypeAlias = Mailbox[node_pb2.NodeMessage] | Mailbox[handoff_pb2.PeerMessage]


class Engines(Protocol):
    """The engines of this node that are alive now, as the directory is to have them, and the
    cluster's as it has them."""

    def engines(self) -> Sequence[EngineHandle]: ...

    def members(self) -> Sequence[Member]: ...

    async def is_member(self, incarnation: str) -> bool: ...


class NodeServicer(node_pb2_grpc.NodeServicer):
    """Gateways' streams, and what is asked of a node as a whole."""

    def __init__(self, node: Engines, callers: Callers) -> None:
        self._node = node
        self._callers = callers

    async def Session(
        self, requests: AsyncIterator[node_pb2.GatewayMessage], context: Context
    ) -> None:
        async with _errors_as_status(context):
            read, write = listener_ends(requests, context, node_pb2.NodeMessage)
            opening = await self._callers.admit(context, SESSION, (GATEWAY,), read, write)
            engine = _find_engine(self._node, opening.listener)
            await write(ACCEPTED)
            gateway, outgoing = engine.open_gateway()
            take = partial(engine.from_gateway, gateway)
            relaying = asyncio.create_task(_relay(requests, take, outgoing))
            try:
                await _write_all(outgoing, context)
            finally:
                relaying.cancel()
                engine.close_gateway(gateway)

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


class HandoffServicer(handoff_pb2_grpc.HandoffServicer):
    """Pullers' streams: an engine of this node is the source."""

    def __init__(self, node: Engines, callers: Callers) -> None:
        self._node = node
        self._callers = callers

    async def Link(
        self, requests: AsyncIterator[handoff_pb2.PeerMessage], context: Context
    ) -> None:
        async with _errors_as_status(context):
            read, write = listener_ends(requests, context, handoff_pb2.PeerMessage)
            opening = await self._callers.admit(context, HANDOFF, (_PULLER,), read, write)
            engine, puller = _find_engine(self._node, opening.listener), opening.dialer
            if not await self._node.is_member(puller):
                raise PermissionDenied(f"engine {puller} is not in the directory")
            await write(ACCEPTED)
            peer = engine.open_peer(puller, is_source=False)
            take = partial(engine.from_peer, puller, peer)
            relaying = asyncio.create_task(_relay(requests, take, peer.outgoing))
            try:
                await _write_all(peer.outgoing, context)
            finally:
                relaying.cancel()
                engine.close_peer(puller, peer)


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


async def _relay(
    requests: AsyncIterator[M], take: Callable[[M], None], outgoing: _Outgoing
) -> None:
    """Pass on what comes in until it ends, and the stream with it; with a status if it broke."""
    try:
        async for message in requests:
            try:
                take(message)
            except Exception as error:  # nobody waits for this task: the stream would stay open
                log.exception("a stream's messages could not be passed on")
                name = type(error).__name__
                outgoing.end(BatonError(f"a message could not be passed on ({name})"))
                return
    except Exception as error:  # gRPC's own: the call broke, or the server is being stopped
        log.debug("a stream cannot be read any more: %r", error)
        outgoing.end(BatonError("the stream cannot be read"))
    outgoing.end()


async def _write_all(outgoing: _Outgoing, context: Context) -> None:
    """Write until the mailbox ends; raises the BatonError that ended it.

    A write waits once gRPC has buffered some MiB for a reader that does not read.
    """
    try:
        while (message := await outgoing.get()) is not None:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(message)
    except TimeoutError:
        raise Overloaded("the stream's reader does not read") from None


async def _ledger(engine: EngineHandle) -> str:
    """An engine that does not answer is said so: a ledger that is missing would look like none."""
    try:
        async with asyncio.timeout(LEDGER_TIMEOUT_S):
            return await engine.ledger()
    except (TimeoutError, NodeLost):
        return json.dumps({"incarnation": engine.incarnation, "error": "no answer"})


def _find_engine(node: Engines, incarnation: str) -> EngineHandle:
    for engine in node.engines():
        if engine.incarnation == incarnation:
            return engine
    raise NodeLost(f"engine {incarnation} is not here (any more)")
