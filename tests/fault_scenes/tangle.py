"""A proxy between two processes that doubles, holds back and loses the messages that pass it.

    gateway ══ Node.Session ══► Tangle ══► node
    puller  ══ Handoff.Link ══► Tangle ══► source

Real gRPC on both sides. gRPC itself neither doubles nor shuffles, so what it does is what a bug in
a relay would do. It knows two messages, the source's Hello and the node's Welcome, which lose the
token with which others would speak with the engine directly and pass it by; `on_data_port` gets the
source's data port.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc

from baton.proto.v1 import handoff_pb2, node_pb2

DOUBLE, SWAP, LOSE = "double", "swap", "lose"


class Tangle(grpc.GenericRpcHandler):
    """In front of a node that makes `address` known; say where it is: `target`.

    `mishaps`: what befalls how many of the messages of a direction: `("Link", "back")` and so on,
    each a share by kind. `counts` notes what was done. What begins a stream is left alone: the
    handshake, and the message behind it.
    """

    def __init__(
        self, seed: int, on_data_port: Callable[[int], object] = lambda port: None
    ) -> None:
        self.mishaps: dict[tuple[str, str], dict[str, float]] = {}
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.address = self.target = ""
        self._on_data_port = on_data_port
        self._random = random.Random(seed)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Tangle:
        self._server = grpc.aio.server(options=(("grpc.http2.max_ping_strikes", 0),))
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)
        if self._channel is not None:
            await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def relay(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._relay(details.method, requests, context)

        return grpc.stream_stream_rpc_method_handler(relay)

    async def _relay(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        name = method.rpartition("/")[2]
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.target)
        call = self._channel.stream_stream(method)()

        async def onwards() -> None:
            async for message in self._tangled(requests, (name, "on")):
                await call.write(message)
            await call.done_writing()

        writing = asyncio.create_task(onwards())
        try:
            async for message in self._tangled(call, (name, "back")):
                await context.write(self._as_said(name, message))
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), [*error.trailing_metadata()])
        finally:
            call.cancel()
            writing.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await writing

    async def _tangled(
        self, messages: AsyncIterator[bytes], way: tuple[str, str]
    ) -> AsyncIterator[bytes]:
        """The messages of one direction as the other side gets them."""
        held: bytes | None = None
        num_left_alone = 3
        async for message in messages:
            mishap = None if num_left_alone else self._draw(way)
            num_left_alone = max(0, num_left_alone - 1)
            if mishap == SWAP and held is None:
                held = message
                continue
            if mishap != LOSE:
                yield message
            if mishap == DOUBLE:
                yield message
            if held is not None:
                yield held
                held = None

    def _draw(self, way: tuple[str, str]) -> str | None:
        """What befalls the next message of this direction."""
        left = self._random.random()
        for kind, share in self.mishaps.get(way, {}).items():
            if left < share:
                self.counts[*way, kind] += 1
                return kind
            left -= share
        return None

    def _as_said(self, name: str, message: bytes) -> bytes:
        """As it comes from an engine that nobody speaks with directly."""
        if name == "Link":
            said = handoff_pb2.PeerMessage.FromString(message)
            if said.HasField("hello"):
                said.hello.ClearField("direct_token")
                self._on_data_port(said.hello.access.port)
            return said.SerializeToString()
        if name != "Session":
            return message
        told = node_pb2.NodeMessage.FromString(message)
        if told.HasField("welcome"):
            told.welcome.ClearField("direct")
        return told.SerializeToString()
