"""The connection to one engine: its messages, in both directions, on one stream (engine_stream.py).

    Welcome, checked ─► heartbeat ─► `linked` ─► dispatches out, outputs and heartbeats in ─► `lost`

At its end it is determined whether the engine's process has ended while its node lives.

Stamps are times of the node's monotonic clock; hosts' wall clocks are never compared:

    same host      the clock is the same: the age of a stamp is exact
    another host   the newest stamp of a message gets the time of its arrival, the others keep their
                   distance to it: intervals between stamps are exact, the delivery counts as
                   waiting before them
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls
from ...core.channels.frames import MAX_UNSENT_BYTES, encode_payload
from ...core.errors import BatonError, EngineFailed, HostLost, InvalidRequest, NodeLost
from ...core.membership import Member
from ...core.ports import Clock
from ...core.request.request import Request, Ticket
from ...core.request.timeline import Stamp
from ...proto import codec
from ...proto.v1 import node_pb2
from ..request.engine_link import EngineOutput, PlainToken, TransferSummary
from .engine_stream import EngineStream, has_ended
from .reported_load import ReportedLoad, load_from_wire

# Called with the outputs of each step of a linked engine: LinkedEngine.receive.
Receive: TypeAlias = Callable[[Sequence[EngineOutput], Sequence[PlainToken]], None]
Loaded: TypeAlias = str | BatonError  # an adapter's digest, or why it is not loaded
_order_numbers = itertools.count(1)  # over all connections


class ConnectionEvents(Protocol):
    """Callbacks of a connection. `linked` returns the receiver of outputs. `ended`: no dispatch
    reaches the engine any more. `lost`: the last call, once, only after `linked`, and when the
    cause is known; `has_died`: the node lives, and the engine's process has ended."""

    def linked(
        self, engine: EngineConnection, welcome: node_pb2.Welcome, load: ReportedLoad
    ) -> Receive: ...

    def heartbeat(self, engine: EngineConnection, load: ReportedLoad) -> None: ...

    def ended(self, engine: EngineConnection) -> None: ...

    def lost(self, engine: EngineConnection, reason: str, *, has_died: bool) -> None: ...


class EngineConnection:
    """One attempt to connect to `member`; `run` takes as long as the connection lasts."""

    def __init__(
        self,
        member: Member,
        secret: ClusterSecret,
        events: ConnectionEvents,
        clock: Clock,
        silence_s: float,
        tls: ClusterTls | None = None,
    ) -> None:
        self.member = member
        self._events = events
        self._clock = clock
        self._stream = EngineStream(member, secret, self.take, clock, silence_s, tls)
        self._has_died: bool | None = None  # the process, while its node lives; None: unknown
        self._welcome: node_pb2.Welcome | None = None
        self._receive: Receive | None = None  # while it is linked
        self._orders: dict[int, asyncio.Future[Loaded]] = {}  # without a reply yet

    @property
    def is_starting(self) -> bool:
        """Whether the engine has sent its Welcome, and no heartbeat yet."""
        return self._welcome is not None and self._receive is None and not self._stream.is_over

    def dispatch(
        self, request: Request, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        """Send a request to compute as a whole, or with a ticket, this engine's part of it."""
        wire = codec.dispatch_to_wire(request, ticket, deadline_remaining_s)
        self._send(node_pb2.GatewayMessage(dispatch=wire))

    def cancel(self, request_id: str, attempt: int) -> None:
        cancel = node_pb2.Cancel(request_id=request_id, attempt=attempt)
        self._send(node_pb2.GatewayMessage(cancel=cancel))

    def set_promise(self, epoch: int, leader: str, tbt_target_s: float | None) -> None:
        """Order it to promise this TBT, or None; its heartbeats show whether it does."""
        order = node_pb2.SetPromise(epoch=epoch, leader=leader, tbt_target_s=tbt_target_s)
        self._send(node_pb2.GatewayMessage(set_promise=order))

    def load_adapter(self, name: str, path: str) -> asyncio.Future[Loaded]:
        """Order it to read the adapter into host memory; the result is NodeLost if the connection
        ends first."""
        order = node_pb2.LoadAdapter(order_id=next(_order_numbers), name=name, path=path)
        self._orders[order.order_id] = future = asyncio.get_running_loop().create_future()
        self._send(node_pb2.GatewayMessage(load_adapter=order))
        return future

    def _resolve_order(self, number: int, found: Loaded) -> None:
        if (future := self._orders.pop(number, None)) is not None and not future.done():
            future.set_result(found)

    def _send(self, message: node_pb2.GatewayMessage) -> None:
        """Never blocks; the message is dropped if the stream is over."""
        transport = self._stream.transport
        if transport is None or transport.is_closing():
            return
        transport.write(encode_payload(message.SerializeToString()))
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._stream.end("the engine does not read its messages")

    async def run(self) -> str:
        """Connect and serve until the connection ends; returns the reason.

        Raises no network errors. Cancelling it closes the connection.
        """
        reason = "closed by the gateway"
        try:
            reason = await self._stream.serve()
            if self._receive is not None and self._has_died is None:
                self._events.ended(self)
                self._has_died = self._stream.is_over and await has_ended(self.member)
        finally:
            self._stream.abort()
            for number in [*self._orders]:
                self._resolve_order(number, NodeLost("a node was lost"))
            if self._receive is not None:
                self._receive = None
                self._events.lost(self, reason, has_died=bool(self._has_died))
        return reason

    def take(self, message: node_pb2.NodeMessage) -> None:
        """Handle one message of the engine."""
        match message.WhichOneof("body"):
            case "outputs":
                self._pass_on(message.outputs)
            case "heartbeat" if self._welcome is not None:
                load = load_from_wire(message.heartbeat)
                if self._receive is None:  # the first one: the engine is linked now
                    self._receive = self._events.linked(self, self._welcome, load)
                else:
                    self._events.heartbeat(self, load)
            case "adapter_loaded":
                loaded = message.adapter_loaded
                refusal = codec.error_from_wire(loaded.error) if loaded.HasField("error") else None
                self._resolve_order(loaded.order_id, refusal or loaded.digest)
            case "welcome":
                if self._stream.accepts(message.welcome):
                    self._welcome = message.welcome
            case "engine_ended":
                error = codec.error_from_wire(message.engine_ended)
                self._has_died = not isinstance(error, HostLost)
                self._stream.end(error.message)
            case "refused":
                self._stream.end(codec.error_from_wire(message.refused).message)

    def _pass_on(self, step: node_pb2.StepOutputs) -> None:
        outputs = [self._output(wire) for wire in step.outputs]
        try:
            tokens = tokens_from_wire(step.tokens)
        except ValueError:
            self._stream.end("its columns of tokens do not match")
            return
        if self._receive is not None:
            self._receive(outputs, tokens)

    def _output(self, wire: node_pb2.RequestOutput) -> EngineOutput:
        """An output that cannot be decoded becomes an error of its attempt."""
        try:
            stamps = self._stamps(wire.events)
            logprobs = tuple(map(codec.logprobs_from_wire, wire.logprobs))
            prompt_logprobs = tuple(map(codec.logprobs_from_wire, wire.prompt_logprobs))
        except InvalidRequest as error:
            broken = EngineFailed(f"unreadable output: {error.message}")
            return EngineOutput(wire.request_id, wire.attempt, error=broken)
        transfer, moved = None, wire.transfer
        if wire.HasField("transfer"):
            transfer = TransferSummary(moved.bytes, moved.cached_tokens, moved.transport)
        return EngineOutput(
            request_id=wire.request_id,
            attempt=wire.attempt,
            first_index=wire.first_index,
            token_ids=tuple(wire.token_ids),
            finish_reason=codec.FINISH_FROM_WIRE.get(wire.finish_reason),
            error=codec.error_from_wire(wire.error) if wire.HasField("error") else None,
            stamps=stamps,
            cached_tokens=wire.cached_tokens if wire.HasField("cached_tokens") else None,
            transfer=transfer,
            logprobs=logprobs,
            first_prompt_index=wire.first_prompt_index,
            prompt_logprobs=prompt_logprobs,
        )

    def _stamps(self, received: Sequence[node_pb2.NodeEvent]) -> tuple[Stamp, ...]:
        """The stamps of a message that has just come, on our clock. Raises InvalidRequest."""
        if not received:
            return ()
        newest_ns = max(event.monotonic_ns for event in received)
        our_ns = int(self._clock.monotonic_s() * 1e9)
        is_same_clock = self._stream.is_local and newest_ns <= our_ns
        ahead_ns = self._clock.unix_ns() - (our_ns if is_same_clock else newest_ns)
        node = self.member.name
        return tuple(
            Stamp(codec.event_from_wire(event.event), event.monotonic_ns + ahead_ns, node)
            for event in received
        )


def tokens_from_wire(wire: node_pb2.PlainTokens) -> list[PlainToken]:
    """A step's plain tokens. Raises ValueError if the columns do not match."""
    return [*zip(wire.request_ids, wire.attempts, wire.indices, wire.token_ids, strict=True)]
