"""Baton's engines without disaggregation: each request is prefilled and decoded by one engine.

Dials every engine in the directory, as a gateway would, and distributes whole requests round-robin.
Without a gateway, this measures the engines at their best: the same scheduler, chunked prefill, one
message per step.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret
from baton.core.channels.addresses import host_id
from baton.core.channels.admission import GATEWAY, dial
from baton.core.channels.frames import LENGTH_BYTES, decode_length, encode_payload
from baton.core.membership import Member
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.loadgen.driver import Driver, DriverError
from baton.proto import codec
from baton.proto.v1 import node_pb2

CLUSTER = "bench"
_SECRET_VARIABLE = "BATON_CLUSTER_SECRET"  # not on a command line
_DEADLINE_S = 600.0


class _Reported(NamedTuple):
    """The part of a step's outputs that concerns one request."""

    num_tokens: int = 0
    is_over: bool = False
    error: str = ""


class _Engine:
    """The channel of one engine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._queues: dict[str, asyncio.Queue[_Reported]] = {}

    async def read(self) -> None:
        """Distribute outputs to their requests until the channel ends."""
        try:
            while True:
                message = await self._next()
                for request_id in message.outputs.tokens.request_ids:
                    self._put(request_id, _Reported(1))
                for output in message.outputs.outputs:
                    error = (output.error.code or "error") if output.HasField("error") else ""
                    event = _Reported(len(output.token_ids), bool(output.finish_reason), error)
                    self._put(output.request_id, event)
        finally:
            for request_id in self._queues:
                self._put(request_id, _Reported(error="the engine is gone"))

    async def _next(self) -> node_pb2.NodeMessage:
        """The next message. Raises asyncio.IncompleteReadError, OSError."""
        length = decode_length(await self._reader.readexactly(LENGTH_BYTES))
        return node_pb2.NodeMessage.FromString(await self._reader.readexactly(length))

    def _put(self, request_id: str, event: _Reported) -> None:
        if queue := self._queues.get(request_id):
            queue.put_nowait(event)

    async def stream(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = Request(secrets.token_hex(16), 0, tuple(prompt_ids), sampling)
        queue = self._queues[request.request_id] = asyncio.Queue()
        dispatch = codec.dispatch_to_wire(request, None, _DEADLINE_S)
        is_over = False
        try:
            await self._send(node_pb2.GatewayMessage(dispatch=dispatch))
            while not is_over:
                event = await queue.get()
                is_over = event.is_over or bool(event.error)
                if event.error:
                    raise DriverError(event.error)
                if event.num_tokens:
                    yield event.num_tokens
        finally:
            del self._queues[request.request_id]
            if not is_over:
                cancel = node_pb2.Cancel(request_id=request.request_id)
                await self._send(node_pb2.GatewayMessage(cancel=cancel))

    async def _send(self, message: node_pb2.GatewayMessage) -> None:
        self._writer.write(encode_payload(message.SerializeToString()))
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


class NodeDriver:
    """Distributes requests round-robin to engines."""

    def __init__(self, engines: Sequence[_Engine], first: int) -> None:
        self._turn = itertools.cycle([*engines[first:], *engines[:first]])

    async def stream(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        async with aclosing(next(self._turn).stream(prompt_ids, num_tokens)) as counts:
            async for count in counts:
                yield count


def _secret() -> ClusterSecret:
    return ClusterSecret(os.environ.get(_SECRET_VARIABLE))


async def members(redis_url: str, num_engines: int = 1) -> tuple[Member, ...]:
    """The cluster's engines, once there are at least `num_engines`."""
    directory = RedisDirectory(RedisClient(redis_url, CLUSTER, _secret()))
    try:
        async with aclosing(directory.watch()) as watch:  # type: ignore[type-var]
            async for found in watch:
                if len(found) >= num_engines:
                    return tuple(found)
        raise AssertionError("a watch does not end")
    finally:
        await directory.close()


@asynccontextmanager
async def connect_nodes(redis_url: str, first: int) -> AsyncIterator[Driver]:
    """A driver over all engines in the directory; its first request goes to engine number `first`.

    Client processes begin with different engines, so that all get their share of few requests.
    """
    engines = [await _connect(member) for member in await members(redis_url)]
    readers = [asyncio.create_task(engine.read()) for engine in engines]
    try:
        yield NodeDriver(engines, first % len(engines))
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for engine in engines:
            engine.close()


async def _connect(member: Member) -> _Engine:
    connection = await asyncio.to_thread(
        dial,
        *(GATEWAY, _secret().dialing_key),
        dialer=secrets.token_hex(16),
        listener=member.incarnation,
        address=None if member.host_id == host_id().hex() else member.engine_address,
    )
    connection.setblocking(False)
    return _Engine(*await asyncio.open_connection(sock=connection))
