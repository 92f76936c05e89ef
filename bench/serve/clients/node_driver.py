"""Baton's engines without disaggregation: each request is prefilled and decoded by one of them.

Speaks Node.Session to every engine that the directory names and deals requests to them in turn, as
`WORK_LOCAL`. No gateway is in the way, so what is measured is the engines at their best: the same
scheduler, chunked prefill, one message a step.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, NamedTuple

import grpc

from baton.cluster.link_handshake import SESSION, dial
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret
from baton.core.membership import Member
from baton.core.request.request import Request, SamplingParams
from baton.proto import codec
from baton.proto.v1 import node_pb2, node_pb2_grpc

from .driver import Driver, DriverError

CLUSTER = "bench"
_SECRET_VARIABLE = "BATON_CLUSTER_SECRET"  # not on a command line
_DEADLINE_S = 600.0
_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class _Said(NamedTuple):
    """What a step said of a request."""

    num_tokens: int = 0
    is_over: bool = False
    error: str = ""


class _Engine:
    """One engine's stream."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._writing = asyncio.Lock()
        self._queues: dict[str, asyncio.Queue[_Said]] = {}

    async def read(self) -> None:
        """Sort what is said by request until the stream ends."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                for request_id in message.outputs.tokens.request_ids:
                    self._put(request_id, _Said(1))
                for output in message.outputs.outputs:
                    error = (output.error.code or "error") if output.HasField("error") else ""
                    said = _Said(len(output.token_ids), bool(output.finish_reason), error)
                    self._put(output.request_id, said)
        finally:
            for request_id in self._queues:
                self._put(request_id, _Said(error="the engine is gone"))

    def _put(self, request_id: str, said: _Said) -> None:
        if queue := self._queues.get(request_id):
            queue.put_nowait(said)

    async def stream(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = Request(secrets.token_hex(16), 0, tuple(prompt_ids), sampling)
        queue = self._queues[request.request_id] = asyncio.Queue()
        dispatch = codec.dispatch_to_wire(request, node_pb2.WORK_LOCAL, None, _DEADLINE_S)
        is_over = False
        try:
            await self._send(node_pb2.GatewayMessage(dispatch=dispatch))
            while not is_over:
                said = await queue.get()
                is_over = said.is_over or bool(said.error)
                if said.error:
                    raise DriverError(said.error)
                if said.num_tokens:
                    yield said.num_tokens
        finally:
            del self._queues[request.request_id]
            if not is_over:
                cancel = node_pb2.Cancel(request_id=request.request_id)
                await self._send(node_pb2.GatewayMessage(cancel=cancel))

    async def _send(self, message: node_pb2.GatewayMessage) -> None:
        async with self._writing:
            await self._call.write(message)


class NodeDriver:
    """Deals requests to engines in turn."""

    def __init__(self, engines: Sequence[_Engine], first: int) -> None:
        self._turn = itertools.cycle([*engines[first:], *engines[:first]])

    async def stream(self, prompt_ids: Sequence[int], num_tokens: int) -> AsyncIterator[int]:
        async with aclosing(next(self._turn).stream(prompt_ids, num_tokens)) as counts:
            async for count in counts:
                yield count


def _secret() -> ClusterSecret:
    return ClusterSecret(os.environ.get(_SECRET_VARIABLE))


async def members(redis_url: str, num_engines: int = 1) -> tuple[Member, ...]:
    """The cluster's engines, once there are so many."""
    directory = RedisDirectory(redis_url, CLUSTER, _secret())
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
    """A driver over all engines that are in the directory now; its first request is number `first`.

    Client processes begin with different engines: with few requests each, all get their share.
    """
    async with AsyncExitStack() as stack:
        engines, readers = [], []
        for member in await members(redis_url):
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(member.address, _OPTIONS)
            )
            stream = node_pb2_grpc.NodeStub(channel).Session()
            ends = (stream, node_pb2.GatewayMessage, _secret(), SESSION)
            await dial(*ends, listener=member.incarnation, address=member.address)
            engine = _Engine(stream)
            engines.append(engine)
            readers.append(asyncio.create_task(engine.read()))
        try:
            yield NodeDriver(engines, first % len(engines))
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
