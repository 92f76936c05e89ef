"""Control streams from a puller's engine to every source that the directory shows.

    directory ─► sources of the same model ─► one task each: dial Handoff.Link, relay, back off

A source that leaves the directory keeps its open stream, since the directory is a hint, but is not
dialled again. One whose fingerprint differs is dialled once: the engines compare field by field,
and the one that refuses says which. What is said on a stream is the business of its two engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from ...cluster.link_handshake import HANDOFF, dial
from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls
from ...core.channels.addresses import host_of
from ...core.errors import BatonError
from ...core.membership import Member, Role
from ...core.ports import Directory
from ...proto.v1 import handoff_pb2, handoff_pb2_grpc
from .engine_handle import EngineHandle, PeerStream
from .grpc_channels import open_node_channel

CONNECT_TIMEOUT_S = 5.0
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
STEADY_S = 1.0  # a link that stood so long was fine: what ends it is a new story


class Links:
    """All links of one puller engine."""

    def __init__(
        self,
        engine: EngineHandle,
        secret: ClusterSecret,
        report: Callable[[str], None],
        tls: ClusterTls | None = None,
    ) -> None:
        self._engine = engine
        self._secret = secret
        self._tls = tls
        self._report = report
        self._sources: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refused: set[str] = set()  # of another make, and told so

    async def run(self, directory: Directory) -> None:
        """Follow the directory until cancelled; then every stream ends."""
        try:
            async for members in directory.watch():
                self._sources = {m.incarnation: m for m in members if self._is_source(m)}
                self._refused &= self._sources.keys()
                for incarnation in self._sources.keys() - self._tasks.keys() - self._refused:
                    self._tasks[incarnation] = asyncio.create_task(self._keep_linked(incarnation))
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_source(self, member: Member) -> bool:
        return member.role is Role.PREFILL and member.model == self._engine.welcome.model

    def _is_alike(self, member: Member) -> bool:
        return member.fingerprint == self._engine.welcome.fingerprint

    async def _keep_linked(self, incarnation: str) -> None:
        """Dial one source for as long as the directory shows it."""
        delay_s, last_reason = FIRST_DELAY_S, ""
        now_s = asyncio.get_running_loop().time
        while member := self._sources.get(incarnation):
            began_s = now_s()
            reason, was_linked = await self._link(member)
            if self._engine.is_over:
                break
            if was_linked and not self._is_alike(member):
                self._report(f"not linked to {member.name} ({member.address}): {reason}")
                self._refused.add(incarnation)
                break
            if was_linked and now_s() - began_s > STEADY_S:
                delay_s = FIRST_DELAY_S
            if reason != last_reason:
                self._report(f"no link to {member.name} ({member.address}): {reason}")
                last_reason = reason
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        del self._tasks[incarnation]

    async def _link(self, member: Member) -> tuple[str, bool]:
        """One stream from dialling to its end: why it ended, and whether it ever stood."""
        async with open_node_channel(member.address, self._tls, member.role) as channel:
            stub = handoff_pb2_grpc.HandoffStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Link()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await dial(
                        *(call, handoff_pb2.PeerMessage, self._secret, HANDOFF),
                        dialer=self._engine.incarnation,
                        listener=member.incarnation,
                        address=member.address,
                    )
            except (grpc.aio.AioRpcError, BatonError, TimeoutError) as error:
                call.cancel()
                return _reason(error), False
            peer = self._engine.open_peer(
                member.incarnation, is_source=True, host=host_of(member.address)
            )
            try:
                return await self._relay(call, member.incarnation, peer), True
            finally:
                self._engine.close_peer(member.incarnation, peer)
                call.cancel()

    async def _relay(
        self, call: grpc.aio.StreamStreamCall[Any, Any], incarnation: str, peer: PeerStream
    ) -> str:
        """Pass messages both ways until either way ends; says why."""

        async def outwards() -> None:
            while (message := await peer.outgoing.get()) is not None:
                await call.write(message)

        async def inwards() -> None:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._engine.from_peer(incarnation, peer, message)

        ways = [asyncio.create_task(outwards()), asyncio.create_task(inwards())]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            error = next(iter(done)).exception()
            return _reason(error) if error else "the stream was closed"
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    if isinstance(error, BatonError):
        return error.message
    return "no connection in time" if isinstance(error, TimeoutError) else str(error)
