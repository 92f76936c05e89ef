"""The connection to one engine: what is sent to it and what comes, as messages of a stream.

    Welcome, checked ─► `linked` ─► dispatches out, outputs and heartbeats in ─► `lost`, once

Owns one attempt. Of an engine whose stream ended, it is looked whether its process has ended while
its node lives. Whoever wants another try makes another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls
from ...core.channels.frames import MAX_UNSENT_BYTES, encode_payload
from ...core.errors import BatonError, EngineFailed, HostLost
from ...core.membership import Member
from ...core.ports import Clock
from ...core.request.request import Request, Ticket
from ...proto import codec
from ...proto.v1 import node_pb2
from ..request.engine_link import EngineOutput, PlainToken, Work
from .engine_stream import EngineStream, has_ended, is_local
from .reported_load import ReportedLoad, load_from_wire
from .wire import NodeClock, output_from_wire, tokens_from_wire

# Takes what a linked engine's steps bring: LinkedEngine.receive.
Receive: TypeAlias = Callable[[Sequence[EngineOutput], Sequence[PlainToken]], None]


class ConnectionEvents(Protocol):
    """Whom a connection reports to. `lost` comes last, and only after `linked`, which returns what
    takes the outputs. `ended`: no dispatch reaches the engine any more; `lost` follows once it is
    known why.

    `has_died`: the node lives, and the engine's process has ended.
    """

    def linked(self, engine: EngineConnection, welcome: node_pb2.Welcome) -> Receive: ...

    def heartbeat(self, engine: EngineConnection, load: ReportedLoad) -> None: ...

    def adapter_loaded(
        self, engine: EngineConnection, order_id: int, found: str | BatonError
    ) -> None: ...

    def ended(self, engine: EngineConnection) -> None: ...

    def lost(self, engine: EngineConnection, reason: str, *, has_died: bool) -> None: ...


class EngineConnection:
    """One attempt to reach `member`; `run` lives as long as the connection."""

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
        self._stream = EngineStream(member, secret, self._take, clock, silence_s, tls)
        self._node_clock = NodeClock(member.name, clock, is_ours=is_local(member))
        self._has_said_why = self._has_died = False
        self._receive: Receive | None = None  # while it is linked

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        wire_work = getattr(node_pb2, f"WORK_{work.name}")
        wire = codec.dispatch_to_wire(request, wire_work, ticket, deadline_remaining_s)
        self._send(node_pb2.GatewayMessage(dispatch=wire))

    def cancel(self, request_id: str, attempt: int) -> None:
        cancel = node_pb2.Cancel(request_id=request_id, attempt=attempt)
        self._send(node_pb2.GatewayMessage(cancel=cancel))

    def set_promise(self, epoch: int, leader: str, tbt_target_s: float | None) -> None:
        """Order it to promise that, or nothing; its heartbeats show whether it does."""
        order = node_pb2.SetPromise(epoch=epoch, leader=leader, tbt_target_s=tbt_target_s)
        self._send(node_pb2.GatewayMessage(set_promise=order))

    def load_adapter(self, order_id: int, name: str, path: str) -> None:
        """Order it to read the adapter into its host memory; answered by `adapter_loaded`."""
        order = node_pb2.LoadAdapter(order_id=order_id, name=name, path=path)
        self._send(node_pb2.GatewayMessage(load_adapter=order))

    def _send(self, message: node_pb2.GatewayMessage) -> None:
        """Never waits; where the stream is over, it goes nowhere."""
        transport = self._stream.transport
        if transport is None or transport.is_closing():
            return
        transport.write(encode_payload(message.SerializeToString()))
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._stream.end("the engine does not read")

    async def run(self) -> str:
        """Connect and serve until the connection ends; returns why it did.

        Raises nothing of the network's. Cancelling it closes the connection.
        """
        reason = "closed by the gateway"
        try:
            reason = await self._stream.serve()
            if self._receive is not None and not self._has_said_why:
                self._events.ended(self)
                self._has_died = self._stream.is_over and await has_ended(self.member)
        finally:
            self._stream.abort()
            if self._receive is not None:
                self._receive = None
                self._events.lost(self, reason, has_died=self._has_died)
        return reason

    def _take(self, message: node_pb2.NodeMessage) -> None:
        match message.WhichOneof("body"):
            case "outputs":
                self._pass_on(message.outputs)
            case "heartbeat":
                if self._receive is not None:
                    self._events.heartbeat(self, load_from_wire(message.heartbeat))
            case "adapter_loaded":
                loaded = message.adapter_loaded
                refusal = codec.error_from_wire(loaded.error) if loaded.HasField("error") else None
                if self._receive is not None:
                    self._events.adapter_loaded(self, loaded.order_id, refusal or loaded.digest)
            case "welcome":
                self._link(message.welcome)
            case "engine_ended":
                error = codec.error_from_wire(message.engine_ended)
                self._has_said_why, self._has_died = True, not isinstance(error, HostLost)
                self._stream.end(error.message)
            case "refused":
                self._stream.end(codec.error_from_wire(message.refused).message)

    def _pass_on(self, step: node_pb2.StepOutputs) -> None:
        try:
            outputs = [output_from_wire(output, self._node_clock) for output in step.outputs]
            tokens = tokens_from_wire(step.tokens)
        except EngineFailed as error:
            self._stream.end(error.message)
            return
        if self._receive is not None:
            self._receive(outputs, tokens)

    def _link(self, welcome: node_pb2.Welcome) -> None:
        """Check what the directory promised; the engine counts from now on."""
        member = self.member
        for field in ("incarnation", "role", "model", "fingerprint"):
            expected = member.role.value if field == "role" else getattr(member, field)
            if (found := getattr(welcome, field)) != expected:
                self._stream.end(f"{field} is {found!r}, announced was {expected!r}")
                return
        if self._receive is None:
            self._receive = self._events.linked(self, welcome)
            self._stream.welcomed()
