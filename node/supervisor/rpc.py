"""The node's gRPC service: calls about the node as a whole, each of which begins with a handshake.

Whoever proves the cluster's key, and with TLS its role, may call; few callers that have proven
nothing yet are served at once. Gateways and peers reach engines without it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from ...cluster.known_nodes import ACCEPTED, LEDGERS, MEMBERS, answer_with
from ...cluster.secret import ClusterSecret
from ...cluster.tls import GATEWAY, check_peer_role
from ...core.channels.admission import ADMIT_S
from ...core.channels.handshake import Listener
from ...core.errors import BatonError, NodeLost, Overloaded, Unauthenticated
from ...core.membership import Member, Role
from ...proto.v1 import node_pb2, node_pb2_grpc
from .engine_handle import EngineHandle

LEDGER_TIMEOUT_S = 10.0
MAX_PENDING = 64  # callers that have proven nothing yet
_PULLER = Role.DECODE.value

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Callers:
    """One for a node's server. `addresses`: what others dial to reach it."""

    secret: ClusterSecret
    addresses: Collection[str]
    has_tls: bool = False
    num_pending: int = 0

    @asynccontextmanager
    async def admitted(
        self,
        context: Context,
        requests: AsyncIterator[Any],
        response: Callable[..., Any],
        purpose: bytes,
        *roles: str,
    ) -> AsyncIterator[None]:
        """The body runs once the caller is accepted. `roles`: one of them is the certificate's
        where there are any.

        A BatonError ends the call with its status and, in the trailers, the code that survives.
        """
        try:
            if self.has_tls:
                check_peer_role(context, *roles)
            await self._shake_hands(context, requests, response, purpose)
            yield
        except BatonError as error:
            await context.abort(
                grpc.StatusCode[error.grpc_status],
                error.message,
                trailing_metadata=(("baton-error-code", error.code),),
            )

    async def _shake_hands(
        self,
        context: Context,
        requests: AsyncIterator[Any],
        response: Callable[..., Any],
        purpose: bytes,
    ) -> None:
        if self.num_pending >= MAX_PENDING:
            raise Overloaded("too many callers have not proven yet who they are")
        self.num_pending += 1
        try:
            async with asyncio.timeout(ADMIT_S):
                keys = self.secret.keys_by_id()
                listener = Listener(lambda o: keys.get(o.key_id), (purpose,), self.addresses)
                challenge = listener.challenge((await anext(requests)).handshake)
                await context.write(response(handshake=challenge))
                listener.check((await anext(requests)).handshake)
                await context.write(response(handshake=ACCEPTED))
        except TimeoutError:
            raise Unauthenticated("the handshake takes too long") from None
        except DecodeError:
            raise Unauthenticated("what came is no message of a handshake") from None
        except StopAsyncIteration:
            raise Unauthenticated("the stream ended within the handshake") from None
        finally:
            self.num_pending -= 1


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
        response = node_pb2.GetLedgersResponse
        async with self._callers.admitted(context, requests, response, LEDGERS, GATEWAY):
            ledgers = await asyncio.gather(*(_ledger(engine) for engine in self._node.engines()))
            await context.write(response(ledgers=ledgers))

    async def GetMembers(
        self, requests: AsyncIterator[node_pb2.GetMembersRequest], context: Context
    ) -> None:
        response = node_pb2.GetMembersResponse
        async with self._callers.admitted(context, requests, response, MEMBERS, GATEWAY, _PULLER):
            await context.write(answer_with(self._node.members(), self._callers.secret))


async def _ledger(engine: EngineHandle) -> str:
    """One that does not answer is listed as such: a ledger that is missing would look like none."""
    try:
        async with asyncio.timeout(LEDGER_TIMEOUT_S):
            return await engine.ledger()
    except (TimeoutError, NodeLost):
        return json.dumps({"incarnation": engine.incarnation, "error": "no answer"})
