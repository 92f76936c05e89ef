"""An engine's last messages reach a gateway that is writing to it: over real sockets."""

from __future__ import annotations

import asyncio
import math
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from baton.cluster.secret import ClusterSecret
from baton.core.channels.addresses import host_id
from baton.core.channels.admission import GATEWAY
from baton.core.channels.channel import Channel
from baton.core.channels.channel_listener import AcceptPolicy, ChannelListener
from baton.core.channels.handshake import Opening
from baton.core.errors import EngineFailed
from baton.core.membership import Member, Role
from baton.core.ports import Clock
from baton.gateway.engines.engine_connection import EngineConnection, Receive
from baton.node.channels.engine_channels import EngineChannels
from baton.node.channels.inbox import Inbox
from baton.node.channels.links import Kind, Link, Received
from baton.proto.v1 import node_pb2

REASON = "the device does not answer"
NUM_ROUNDS = 30


class DyingEngine:
    """Ends each link after the gateway's 20th message, with further messages unread."""

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(16)
        welcome = node_pb2.Welcome(
            incarnation=self.incarnation, role="decode", model="demo", fingerprint="fp"
        )
        self.inbox: Inbox[Any] = Inbox()
        self.channels = EngineChannels(self.inbox, welcome)
        self.channels.links.heartbeat(node_pb2.Heartbeat())
        policy = AcceptPolicy(ClusterSecret().keys_by_id(), (GATEWAY,), lambda opening, names: None)
        self.listener = ChannelListener(
            self.incarnation, "127.0.0.1", 0, lambda port: (f"127.0.0.1:{port}",), policy
        )
        self.listener.start(self._accepted)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _accepted(self, opening: Opening, channel: Channel) -> None:
        self.inbox.put(Link(Kind.GATEWAY, opening.dialer, channel))

    def _run(self) -> None:
        """The event loop; ends when None is queued."""
        num_messages: Counter[str] = Counter()
        while True:
            for item in self.inbox.receive(math.inf):
                match item:
                    case None:
                        return
                    case Link():
                        self.channels.links.add(item)
                    case Received(link, _):
                        num_messages[link.name] += 1
                        if num_messages[link.name] == 20:
                            self.channels.links.end(EngineFailed(REASON))
                            self.channels.links.remove(link)

    def close(self) -> None:
        self.listener.close()
        self.inbox.put(None)
        self._thread.join()
        self.channels.links.close()
        self.inbox.close()


class BusyGateway:
    """Writes all the time, and records how the connection ended."""

    def __init__(self) -> None:
        self.lost_by: list[tuple[str, bool]] = []
        self._writing: asyncio.Task[None] | None = None

    def linked(self, engine: EngineConnection, welcome: object, load: object) -> Receive:
        self._writing = asyncio.create_task(self._write(engine))
        return self.receive

    async def _write(self, engine: EngineConnection) -> None:
        while True:
            for _ in range(10):
                engine.cancel("f" * 32, 0)
            await asyncio.sleep(0)

    def heartbeat(self, engine: EngineConnection, load: object) -> None: ...

    def receive(self, outputs: object, tokens: object) -> None: ...

    def ended(self, engine: EngineConnection) -> None: ...

    def lost(self, engine: EngineConnection, reason: str, *, has_died: bool) -> None:
        self.lost_by.append((reason, has_died))
        assert self._writing is not None
        self._writing.cancel()


@pytest.fixture
def engine() -> Iterator[DyingEngine]:
    engine = DyingEngine()
    yield engine
    engine.close()


@pytest.mark.parametrize("by_tcp", [False, True], ids=["unix", "tcp"])
async def test_a_gateway_that_is_writing_hears_why_the_engine_died(
    engine: DyingEngine, by_tcp: bool
) -> None:
    """A failed write does not discard messages that were received before it."""
    address = f"127.0.0.1:{engine.listener.port}"
    host = "f" * 32 if by_tcp else host_id().hex()
    member = Member(
        *(engine.incarnation, Role.DECODE, "d", "127.0.0.1:1", "demo", "fp", 512, 16, 66),
        engine_address=address,
        host_id=host,
    )
    gateway = BusyGateway()
    for _ in range(NUM_ROUNDS):
        await EngineConnection(member, ClusterSecret(), gateway, Clock(), 1.2).run()
    assert gateway.lost_by == [(REASON, True)] * NUM_ROUNDS
