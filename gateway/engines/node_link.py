"""The link to one engine: `Node.Session` over grpc.aio, from connecting to its loss.

Owns one connection attempt and what flows over it: checks the Welcome against what the directory
promised, sends dispatches and cancels, hands on heartbeats and outputs, and takes a silent engine
for lost. An engine of this host gets and says everything but heartbeats directly
(direct_channel.py); the stream stands for the link all the same, and the loss of either is its end.
Reports the loss exactly once, and only of a link that was up. Whoever wants another try makes
another NodeLink.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import grpc

from ...cluster.link_handshake import SESSION, dial
from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls, open_channel
from ...core.channels.same_host import host_id
from ...core.errors import EngineFailed, Unauthenticated
from ...core.membership import Member
from ...core.ports import Clock
from ...core.request.request import Request, Ticket
from ...proto.v1 import node_pb2, node_pb2_grpc
from ..request.engine_link import EngineOutput, PlainToken, Work
from .direct_channel import DirectWay, open_direct
from .engine_table import ReportedLoad
from .node_clock import NodeClock
from .wire import dispatch_message, load_from_wire, output_from_wire, tokens_from_wire

_Stream = Any  # grpc.aio.StreamStreamCall[GatewayMessage, NodeMessage]; grpc has no types

_CONNECT_TIMEOUT_S = 3.0
_LAST_WORDS_S = 0.5  # what a broken stream, or a dead engine's channel, may still bring

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # our back-off, not one shared with earlier channels
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),  # without it a stopped peer is noticed after a minute
    ("grpc.enable_http_proxy", 0),
)


class LinkEvents(Protocol):
    """Whom a link tells. `lost` comes last, and only after `linked`.

    `has_died`: the node lives, and says that the engine's process has ended.
    """

    def linked(self, link: NodeLink) -> None: ...

    def heartbeat(self, link: NodeLink, load: ReportedLoad) -> None: ...

    def outputs(
        self, link: NodeLink, outputs: Sequence[EngineOutput], tokens: Sequence[PlainToken]
    ) -> None: ...

    def lost(self, link: NodeLink, reason: str, *, has_died: bool) -> None: ...


class NodeLink:
    """One connection attempt to `member`; `run` lives as long as the stream."""

    def __init__(
        self,
        member: Member,
        secret: ClusterSecret,
        events: LinkEvents,
        clock: Clock,
        silence_s: float,
        tls: ClusterTls | None = None,
    ) -> None:
        self.member = member
        self._tls = tls
        self._secret = secret
        self._events = events
        self._clock = clock
        self._silence_s = silence_s
        self._outgoing: asyncio.Queue[Callable[[], node_pb2.GatewayMessage]] = asyncio.Queue()
        self._direct: DirectWay | None = None  # settled before `linked`
        self.max_num_seqs = 0  # by its Welcome
        self._node_clock = NodeClock(member.name, clock)
        self._last_heard_s = clock.monotonic_s()
        self._has_died = False
        self._is_lost = False

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket, deadline_remaining_s: float
    ) -> None:
        make = partial(dispatch_message, request, work, ticket, deadline_remaining_s)
        if self._direct is not None:
            self._direct.send(make())
        else:  # made when it is written: a long prompt for the other engine does not wait for it
            self._outgoing.put_nowait(make)

    def cancel(self, request_id: str, attempt: int) -> None:
        cancel = node_pb2.Cancel(request_id=request_id, attempt=attempt)
        if self._direct is not None:
            self._direct.send(node_pb2.GatewayMessage(cancel=cancel))
        else:
            self._outgoing.put_nowait(partial(node_pb2.GatewayMessage, cancel=cancel))

    async def run(self) -> str:
        """Connect and serve the stream until it ends; returns why it did.

        Raises nothing of the network's. Cancelling it closes the stream.
        """
        member = self.member
        async with open_channel(
            member.address, self._tls, member.role.value, CHANNEL_OPTIONS
        ) as channel:
            stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
            stream: _Stream = stub.Session()
            welcome = await self._connect(stream)
            if isinstance(welcome, str):
                stream.cancel()
                return welcome
            self.max_num_seqs = welcome.max_num_seqs
            is_ours = welcome.direct.host_id == host_id()
            self._node_clock = NodeClock(self.member.name, self._clock, is_ours=is_ours)
            accepted = await open_direct(welcome)
            self._direct = None if accepted is None else DirectWay(accepted, self._hear_directly)
            return await self._serve(stream)

    async def _connect(self, stream: _Stream) -> node_pb2.Welcome | str:
        """Wait for the Welcome and check it; returns what is wrong, if something is."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await dial(
                    *(stream, node_pb2.GatewayMessage, self._secret, SESSION),
                    listener=self.member.incarnation,
                    address=self.member.address,
                )
                message = await stream.read()
        except TimeoutError:
            return f"no welcome within {_CONNECT_TIMEOUT_S:g} s"
        except Unauthenticated as error:
            return error.message
        except grpc.aio.AioRpcError as error:
            return _reason(error)
        if message is grpc.aio.EOF or not message.HasField("welcome"):
            return "no welcome"
        welcome: node_pb2.Welcome = message.welcome
        member = self.member
        for field in ("incarnation", "role", "model", "fingerprint"):
            expected = member.role.value if field == "role" else getattr(member, field)
            if getattr(welcome, field) != expected:
                return f"{field} is {getattr(welcome, field)!r}, announced was {expected!r}"
        return welcome

    async def _serve(self, stream: _Stream) -> str:
        """Run all directions and the watch over silence; the first to end ends the link."""
        self._last_heard_s = self._clock.monotonic_s()
        self._events.linked(self)
        reason = "closed by the gateway"
        reading = asyncio.create_task(self._read(stream))
        writing = asyncio.create_task(self._write(stream))
        tasks = (reading, writing, asyncio.create_task(self._watch_silence()))
        direct = asyncio.Future[str]() if self._direct is None else self._direct.over
        ends = (*tasks, direct)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() or direct.done():
                # A write to a stream that the node has just ended fails while the last words are
                # still unread; the status is lost then, grpc.aio puts INTERNAL in its place. And
                # it is the stream that says why a channel ended.
                await asyncio.wait([reading], timeout=_LAST_WORDS_S)
            if self._has_died and self._direct is not None:
                await asyncio.wait([direct], timeout=_LAST_WORDS_S)
            reason = next(end for end in ends if end.done()).result()
        finally:
            for task in tasks:
                task.cancel()
            if self._direct is not None:
                self._direct.close()
            stream.cancel()
            self._is_lost = True
            self._events.lost(self, reason, has_died=self._has_died)
        return reason

    async def _read(self, stream: _Stream) -> str:
        call_soon = asyncio.get_running_loop().call_soon
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                self._last_heard_s = self._clock.monotonic_s()
                if message.HasField("outputs"):
                    # Once the next read waits: gRPC's threads fetch a step while we pass one on.
                    call_soon(self._pass_on, *_step_from_wire(message.outputs, self._node_clock))
                elif message.HasField("heartbeat"):
                    self._events.heartbeat(self, load_from_wire(message.heartbeat))
                elif message.HasField("engine_ended"):
                    self._has_died = True
                    return "its process ended"
        except grpc.aio.AioRpcError as error:
            return _reason(error)
        except EngineFailed as error:
            return error.message
        return "the node ended the stream"

    def _pass_on(self, outputs: Sequence[EngineOutput], tokens: Sequence[PlainToken]) -> None:
        if not self._is_lost:
            self._events.outputs(self, outputs, tokens)

    def _hear_directly(self, message: node_pb2.NodeMessage) -> None:
        self._last_heard_s = self._clock.monotonic_s()
        try:
            self._pass_on(*_step_from_wire(message.outputs, self._node_clock))
        except EngineFailed as error:
            assert self._direct is not None
            self._direct.refuse(error.message)

    async def _write(self, stream: _Stream) -> str:
        try:
            while True:
                make_message = await self._outgoing.get()
                await stream.write(make_message())
        except grpc.aio.AioRpcError as error:
            return _reason(error)
        except asyncio.InvalidStateError:  # what grpc.aio raises on writing to an ended stream
            return "the node ended the stream"

    async def _watch_silence(self) -> str:
        """Return once the engine was silent for too long.

        Where this process itself stood still, what the engine sent is still unread: its silence is
        counted anew.
        """
        period_s = self._silence_s / 8
        while True:
            before_s = self._clock.monotonic_s()
            await asyncio.sleep(period_s)
            now_s = self._clock.monotonic_s()
            if now_s - before_s > 2 * period_s:
                self._last_heard_s = now_s
            if now_s - self._last_heard_s > self._silence_s:
                return f"no heartbeat for {self._silence_s:g} s"


def _step_from_wire(
    step: node_pb2.StepOutputs, clock: NodeClock
) -> tuple[Sequence[EngineOutput], Sequence[PlainToken]]:
    """Raises EngineFailed."""
    return [output_from_wire(one, clock) for one in step.outputs], tokens_from_wire(step.tokens)


def _reason(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
