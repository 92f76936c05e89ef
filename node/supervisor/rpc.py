"""The node's gRPC server: calls about the node as a whole, each of which begins with a handshake,
and gRPC's health service: serving if every engine progresses.

Callers must prove that they hold the cluster's key and, with TLS, their role; the number of
unauthenticated callers is limited. Gateways and peers connect to engines without this server.
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
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from ...cluster.known_nodes import ACCEPTED, LEDGERS, MEMBERS, answer_with
from ...cluster.secret import ClusterSecret
from ...cluster.tls import GATEWAY, ClusterTls, bind, check_peer_role
from ...core.channels.admission import ADMIT_S
from ...core.channels.handshake import Listener
from ...core.errors import BatonError, NodeLost, Overloaded, Unauthenticated
from ...core.membership import Member, Role
from ...core.process import descriptors
from ...proto.v1 import node_pb2, node_pb2_grpc
from .engine_handle import EngineHandle

LEDGER_TIMEOUT_S = 10.0
MAX_PENDING = 64  # unauthenticated callers
_PULLER = Role.DECODE.value

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Callers:
    """Authenticates the callers of a node's server. `addresses`: those at which it is dialled."""

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
        """The body runs once the caller is accepted. `roles`: with TLS, the certificate must be
        that of one of them.

        A BatonError ends the call with its gRPC status and, in the trailers, its `code`. It does so
        after a message of the caller: grpc.aio's client loses the status of a call that ends while
        it writes.
        """
        try:
            await self._shake_hands(context, requests, response, purpose, roles)
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
        roles: Sequence[str],
    ) -> None:
        if self.num_pending >= MAX_PENDING:
            raise Overloaded("too many callers are still in the handshake")
        self.num_pending += 1
        try:
            async with asyncio.timeout(ADMIT_S):
                keys = self.secret.keys_by_id()
                listener = Listener(lambda o: keys.get(o.key_id), (purpose,), self.addresses)
                opening = (await anext(requests)).handshake
                if self.has_tls:
                    check_peer_role(context, *roles)
                challenge = listener.challenge(opening)
                await context.write(response(handshake=challenge))
                listener.check((await anext(requests)).handshake)
                await context.write(response(handshake=ACCEPTED))
        except TimeoutError:
            raise Unauthenticated("the handshake takes too long") from None
        except DecodeError:
            raise Unauthenticated("the message is no part of a handshake") from None
        except StopAsyncIteration:
            raise Unauthenticated("the stream ended during the handshake") from None
        finally:
            self.num_pending -= 1


class Engines(Protocol):
    """The engines of this node that are alive now, and their entries for the directory."""

    def engines(self) -> Sequence[EngineHandle]: ...

    def members(self) -> Sequence[Member]: ...


class NodeServicer(node_pb2_grpc.NodeServicer):
    """The node's service."""

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
    """The engine's ledger. If none is received, an error is listed in its place: the engine must
    not look absent."""
    try:
        async with asyncio.timeout(LEDGER_TIMEOUT_S):
            return await engine.ledger()
    except (TimeoutError, NodeLost):
        return json.dumps({"incarnation": engine.incarnation, "error": "no answer"})


SERVICES = ("", "baton.v1.Node")
_MAX_METADATA_BYTES = 16 << 10
_OPTIONS = (
    ("grpc.keepalive_time_ms", 400),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),  # else a stopped peer is detected after 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),  # or a second node would share the port without an error
    ("grpc.max_concurrent_streams", 128),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.server_handshake_timeout_ms", 10000),
    # Clients may ping every 1 to 2 s, and late pings arrive together; a flood ends a connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 20),
)


def make_server(host: str, port: int, tls: ClusterTls | None = None) -> tuple[grpc.aio.Server, int]:
    """A server bound to host:port, not yet started, and its port. Raises StartupFailed."""
    most = ("grpc.max_allowed_incoming_connections", descriptors.for_grpc())
    server = grpc.aio.server(options=(*_OPTIONS, most))
    return server, bind(server, host, port, tls.files if tls else None, flag="--port")


class NodeHealth:
    """Keeps `servicer` up to date with `is_ready`: the end of an engine is reported at once by
    `changed`, missing heartbeats are found by polling."""

    def __init__(self, is_ready: Callable[[], bool], look_s: float) -> None:
        self.servicer = health_aio.HealthServicer()
        self.changed = asyncio.Event()  # poll now
        self._is_ready = is_ready
        self._look_s = look_s

    async def run(self) -> None:
        """Poll and report until cancelled."""
        reported: bool | None = None
        while True:
            is_ready = self._is_ready()
            if is_ready != reported:
                reported = is_ready
                await self._report(is_ready)
            try:
                async with asyncio.timeout(self._look_s):
                    await self.changed.wait()
            except TimeoutError:
                continue
            self.changed.clear()

    async def _report(self, is_ready: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        for service in SERVICES:
            await self.servicer.set(service, answer.SERVING if is_ready else answer.NOT_SERVING)
