"""How a gateway's link to an engine ends, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.cluster.link_handshake import ACCEPTED, SESSION, admit, listener_ends
from baton.cluster.secret import ClusterSecret, handshake_key
from baton.core.channels.handshake import Listener
from baton.core.membership import Member, Role
from baton.core.ports import SystemClock
from baton.gateway.engines.node_link import NodeLink
from baton.proto.v1 import node_pb2, node_pb2_grpc

ENGINE = "a" * 32
WELCOME = node_pb2.Welcome(incarnation=ENGINE, role="decode", model="demo", fingerprint="fp")


class NodeOfADyingEngine(node_pb2_grpc.NodeServicer):
    """Its engine ends after the gateway's 20th message."""

    address = ""

    async def Session(
        self,
        requests: AsyncIterator[node_pb2.GatewayMessage],
        context: grpc.aio.ServicerContext[object, object],
    ) -> None:
        read, write = listener_ends(requests, context, node_pb2.NodeMessage)
        await admit(Listener(lambda _: handshake_key(None), SESSION, (self.address,)), read, write)
        await write(ACCEPTED)
        await context.write(node_pb2.NodeMessage(welcome=WELCOME))
        for _ in range(20):
            await anext(requests)
        await context.write(node_pb2.NodeMessage(engine_ended=node_pb2.EngineEnded()))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine process ended")


class BusyGateway:
    """Writes all the time, and notes how the link ended."""

    def __init__(self) -> None:
        self.has_died: list[bool] = []
        self._writing: asyncio.Task[None] | None = None

    def linked(self, link: NodeLink) -> None:
        self._writing = asyncio.create_task(self._write(link))

    async def _write(self, link: NodeLink) -> None:
        while True:
            for _ in range(10):
                link.cancel("f" * 32, 0)
            await asyncio.sleep(0)

    def heartbeat(self, link: NodeLink, load: object) -> None: ...

    def outputs(self, link: NodeLink, outputs: object, tokens: object) -> None: ...

    def lost(self, link: NodeLink, reason: str, *, has_died: bool) -> None:
        self.has_died.append(has_died)
        assert self._writing is not None
        self._writing.cancel()


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    node = NodeOfADyingEngine()
    node_pb2_grpc.add_NodeServicer_to_server(node, server)
    node.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield node.address
    await server.stop(None)


async def test_a_gateway_that_is_writing_hears_that_the_engine_died(address: str) -> None:
    """A failed write makes grpc.aio forget the status of the stream, and its trailers."""
    member = Member(ENGINE, Role.DECODE, "d", address, "demo", "fp", 512, 16, 66)
    gateway = BusyGateway()
    for _ in range(30):
        await NodeLink(member, ClusterSecret(), gateway, SystemClock(), 1.2).run()
    assert gateway.has_died == [True] * 30
