"""The node's gRPC face: Node for gateways, Handoff for pullers. Relays, and decides nothing.

Every call proves the cluster secret first, and with TLS its role. A stream belongs to one
incarnation of one engine and ends with it, by a status that says why. The handlers are coroutines,
not generators: their `finally` then runs at the moment a stream is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import grpc

from ..cluster.secret import check_secret
from ..cluster.tls import GATEWAY, check_peer_role
from ..core.errors import BatonError, InvalidRequest, NodeLost, Overloaded
from ..core.membership import Role
from ..proto.v1 import handoff_pb2, handoff_pb2_grpc, node_pb2, node_pb2_grpc
from .engine_handle import EngineHandle
from .mailbox import Mailbox

LEDGER_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0
_PULLER = Role.DECODE.value

log = logging.getLogger(__name__)

M = TypeVar("M")
Context = grpc.aio.ServicerContext[Any, Any]
_Outgoing: TypeAlias = Mailbox[node_pb2.NodeMessage] | Mailbox[handoff_pb2.PeerMessage]


class Engines(Protocol):
    """The engines of this node that are alive now."""

    def engines(self) -> Sequence[EngineHandle]: ...


class NodeServicer(node_pb2_grpc.NodeServicer):
    """Gateways' streams."""

    def __init__(self, node: Engines, secret: str | None, *, has_tls: bool = False) -> None:
        self._node = node
        self._secret = secret
        self._has_tls = has_tls

    async def Session(
        self, requests: AsyncIterator[node_pb2.GatewayMessage], context: Context
    ) -> None:
        await _check_peer(self._secret, GATEWAY if self._has_tls else None, context)
        engine = await _find_engine(self._node, context, "baton-engine")
        gateway, outgoing = engine.open_gateway()
        take = partial(engine.from_gateway, gateway)
        relaying = asyncio.create_task(_relay(requests, take, outgoing))
        try:
            await _write_all(outgoing, context)
        finally:
            relaying.cancel()
            engine.close_gateway(gateway)

    async def GetLedger(
        self, request: node_pb2.GetLedgerRequest, context: Context
    ) -> node_pb2.GetLedgerResponse:
        await _check_peer(self._secret, GATEWAY if self._has_tls else None, context)
        ledgers = await asyncio.gather(*(_ledger(engine) for engine in self._node.engines()))
        return node_pb2.GetLedgerResponse(ledgers=ledgers)


class HandoffServicer(handoff_pb2_grpc.HandoffServicer):
    """Pullers' streams: an engine of this node is the source."""

    def __init__(self, node: Engines, secret: str | None, *, has_tls: bool = False) -> None:
        self._node = node
        self._secret = secret
        self._has_tls = has_tls

    async def Link(
        self, requests: AsyncIterator[handoff_pb2.PeerMessage], context: Context
    ) -> None:
        await _check_peer(self._secret, _PULLER if self._has_tls else None, context)
        engine = await _find_engine(self._node, context, "baton-source")
        puller = _metadata(context, "baton-puller")
        if not puller:
            await abort(context, InvalidRequest("the call does not say who pulls"))
        await context.send_initial_metadata(())  # tells the puller that it is connected
        peer = engine.open_peer(puller, is_source=False)
        take = partial(engine.from_peer, puller, peer)
        relaying = asyncio.create_task(_relay(requests, take, peer.outgoing))
        try:
            await _write_all(peer.outgoing, context)
        finally:
            relaying.cancel()
            engine.close_peer(puller, peer)


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
    """Write until the mailbox ends; an error that ended it becomes the call's status.

    A write waits once gRPC has buffered some MiB for a reader that does not read.
    """
    try:
        while (message := await outgoing.get()) is not None:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(message)
    except TimeoutError:
        await abort(context, Overloaded("the stream's reader does not read"))
    except BatonError as error:
        await abort(context, error)


async def _ledger(engine: EngineHandle) -> str:
    """An engine that does not answer is said so: a ledger that is missing would look like none."""
    try:
        async with asyncio.timeout(LEDGER_TIMEOUT_S):
            return await engine.ledger()
    except (TimeoutError, NodeLost):
        return json.dumps({"incarnation": engine.incarnation, "error": "no answer"})


def _metadata(context: Context, key: str) -> str | None:
    for name, value in context.invocation_metadata() or ():
        if name == key:
            return value if isinstance(value, str) else None
    return None


async def _check_peer(secret: str | None, role: str | None, context: Context) -> None:
    """`role`: what the caller's certificate must say; None: there are none."""
    try:
        check_secret(secret, context.invocation_metadata())
        if role is not None:
            check_peer_role(context, role)
    except BatonError as error:
        await abort(context, error)


async def _find_engine(node: Engines, context: Context, key: str) -> EngineHandle:
    """The engine whose incarnation the call's metadata names."""
    wanted = _metadata(context, key)
    for engine in node.engines():
        if engine.incarnation == wanted:
            return engine
    await abort(context, NodeLost(f"engine {wanted} is not here (any more)"))


async def abort(context: Context, error: BatonError) -> NoReturn:
    """End a call with the error's status; the code that survives the wire is in the trailers."""
    await context.abort(
        grpc.StatusCode[error.grpc_status],
        error.message,
        trailing_metadata=(("baton-error-code", error.code),),
    )
    raise AssertionError("abort returns only by raising")
