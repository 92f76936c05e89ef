"""The connection to one engine, from dialling to its loss: a unix socket on its host, else TCP.

    dial ─► handshake ─► Welcome, checked ─► `linked` ─► dispatches out, outputs and heartbeats in
                                                         ─► `lost`, exactly once

Owns one attempt. An engine that is silent is taken for lost; of one whose connection ended, it is
looked whether its process has ended while its node lives. Whoever wants another try makes another.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Protocol, cast

from google.protobuf.message import DecodeError

from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls, role_name
from ...core.channels.admission import (
    GATEWAY,
    MAX_REFUSAL_BYTES,
    THIS_HOST,
    check_verdict,
)
from ...core.channels.frames import (
    LENGTH_BYTES,
    MAX_UNSENT_BYTES,
    BrokenStream,
    FrameBuffer,
    decode_length,
    encode_payload,
)
from ...core.channels.handshake import CHALLENGE_BYTES, Dialer
from ...core.errors import BatonError, EngineFailed, HostLost, NodeLost
from ...core.membership import Member
from ...core.ports import Clock
from ...core.request.request import Request, Ticket
from ...proto import codec
from ...proto.v1 import node_pb2
from ..request.engine_link import EngineOutput, PlainToken, Work
from .engine_sockets import has_ended, is_local, open_socket
from .reported_load import ReportedLoad
from .wire import NodeClock, load_from_wire, output_from_wire, tokens_from_wire

_WORK_TO_WIRE = {
    Work.PREFILL: node_pb2.WORK_PREFILL,
    Work.DECODE: node_pb2.WORK_DECODE,
    Work.LOCAL: node_pb2.WORK_LOCAL,
}
_CONNECT_TIMEOUT_S = 3.0
_CLOSED = "the engine closed the connection"


class OutputReceiver(Protocol):
    """Who takes what a linked engine's steps bring: linked_engine.LinkedEngine."""

    def receive(self, outputs: Sequence[EngineOutput], tokens: Sequence[PlainToken]) -> None: ...


class ConnectionEvents(Protocol):
    """Whom a connection reports to. `lost` comes last, and only after `linked`, which returns who
    takes the outputs.

    `has_died`: the node lives, and the engine's process has ended.
    """

    def linked(self, engine: EngineConnection, welcome: node_pb2.Welcome) -> OutputReceiver: ...

    def heartbeat(self, engine: EngineConnection, load: ReportedLoad) -> None: ...

    def adapter_loaded(
        self, engine: EngineConnection, order_id: int, found: str | BatonError
    ) -> None: ...

    def lost(self, engine: EngineConnection, reason: str, *, has_died: bool) -> None: ...


class EngineConnection(asyncio.Protocol):
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
        self._secret = secret
        self._events = events
        self._clock = clock
        self._silence_s = silence_s
        self._tls = tls
        self._is_local = is_local(member)
        self._node_clock = NodeClock(member.name, clock, is_ours=self._is_local)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_lost = False  # the transport
        self._received = bytearray()  # of the handshake
        self._arrived = asyncio.Event()
        self._frames: FrameBuffer | None = None  # from the first frame on
        self._welcome: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[str] = self._loop.create_future()  # why nothing more will come
        self._last_received_s = clock.monotonic_s()
        self._has_said_why = self._has_died = False
        self._receiver: OutputReceiver | None = None  # while it is linked

    # -- out ---------------------------------------------------------------------------------------

    def dispatch(
        self, request: Request, work: Work, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        wire = codec.dispatch_to_wire(request, _WORK_TO_WIRE[work], ticket, deadline_remaining_s)
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
        """Never waits; where the connection is over, it goes nowhere."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode_payload(message.SerializeToString()))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._end("the engine does not read")

    # -- life --------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Connect and serve until the connection ends; returns why it did.

        Raises nothing of the network's. Cancelling it closes the connection.
        """
        reason = "closed by the gateway"
        try:
            reason = await self._connect_and_serve()
            if self._receiver is not None and not self._has_said_why:
                self._has_died = self._over.done() and await has_ended(self.member)
        finally:
            if self._transport is not None and not self._is_lost:
                self._transport.abort()  # what closes by itself would first send all that waits
            if self._receiver is not None:
                self._receiver = None
                self._events.lost(self, reason, has_died=self._has_died)
        return reason

    async def _connect_and_serve(self) -> str:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._connect()
                await asyncio.wait((self._welcome, self._over), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            return f"no welcome within {_CONNECT_TIMEOUT_S:g} s"
        except (OSError, BatonError) as error:
            return str(error)
        silence = asyncio.create_task(self._watch_silence())
        try:
            await asyncio.wait((self._over, silence), return_when=asyncio.FIRST_COMPLETED)
            return self._over.result() if self._over.done() else silence.result()
        finally:
            silence.cancel()

    async def _connect(self) -> None:
        """Raises OSError, BatonError."""
        member = self.member
        context = None if self._tls is None or self._is_local else self._tls.client_context()
        name = None if context is None else role_name(member.role.value)
        sock = await open_socket(member)
        await self._loop.create_connection(
            lambda: self, sock=sock, ssl=context, server_hostname=name
        )
        ours = Dialer(
            self._secret.dialing_key,
            GATEWAY,
            dialer=secrets.token_hex(16),
            listener=member.incarnation,
            address=THIS_HOST if self._is_local else member.engine_address,
        )
        assert self._transport is not None
        self._transport.write(ours.opening)
        self._transport.write(ours.answer(await self._read(CHALLENGE_BYTES)))
        length = decode_length(await self._read(LENGTH_BYTES), 0, MAX_REFUSAL_BYTES)
        check_verdict(await self._read(length))
        self._frames = FrameBuffer()
        received, self._received = bytes(self._received), bytearray()
        self.data_received(received)

    async def _read(self, num_bytes: int) -> bytes:
        """Of the handshake. Raises NodeLost."""
        while len(self._received) < num_bytes:
            if self._over.done():
                raise NodeLost("it hung up within the handshake")
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return data

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
                self._last_received_s = now_s
            if now_s - self._last_received_s > self._silence_s:
                return f"no heartbeat for {self._silence_s:g} s"

    def _end(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_result(reason)
        self._arrived.set()

    # -- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._last_received_s = self._clock.monotonic_s()
        if self._frames is None:
            self._received += data
            self._arrived.set()
            return
        try:
            for payload in self._frames.cut(data):
                # Each by itself, so that one costs no other.
                self._loop.call_soon(self._take, node_pb2.NodeMessage.FromString(payload))
        except (BrokenStream, DecodeError) as error:
            self._end(f"what it sends cannot be read: {error}")

    def eof_received(self) -> None:
        """What is unsent by then, the engine may never read."""
        self._loop.call_soon(self._end, _CLOSED)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        reason = f"the connection broke: {error}" if error else _CLOSED
        self._loop.call_soon(self._end, reason)  # behind what came before

    def _take(self, message: node_pb2.NodeMessage) -> None:
        if self._over.done():
            return
        match message.WhichOneof("body"):
            case "outputs":
                self._pass_on(message.outputs)
            case "heartbeat":
                if self._receiver is not None:
                    self._events.heartbeat(self, load_from_wire(message.heartbeat))
            case "adapter_loaded":
                loaded = message.adapter_loaded
                refusal = codec.error_from_wire(loaded.error) if loaded.HasField("error") else None
                if self._receiver is not None:
                    self._events.adapter_loaded(self, loaded.order_id, refusal or loaded.digest)
            case "welcome":
                self._link(message.welcome)
            case "engine_ended":
                error = codec.error_from_wire(message.engine_ended)
                self._has_said_why, self._has_died = True, not isinstance(error, HostLost)
                self._end(error.message)
            case "refused":
                self._end(codec.error_from_wire(message.refused).message)

    def _pass_on(self, step: node_pb2.StepOutputs) -> None:
        try:
            outputs = [output_from_wire(output, self._node_clock) for output in step.outputs]
            tokens = tokens_from_wire(step.tokens)
        except EngineFailed as error:
            self._end(error.message)
            return
        if self._receiver is not None:
            self._receiver.receive(outputs, tokens)

    def _link(self, welcome: node_pb2.Welcome) -> None:
        """Check what the directory promised; the engine counts from now on."""
        member = self.member
        for field in ("incarnation", "role", "model", "fingerprint"):
            expected = member.role.value if field == "role" else getattr(member, field)
            if getattr(welcome, field) != expected:
                self._end(f"{field} is {getattr(welcome, field)!r}, announced was {expected!r}")
                return
        if not self._welcome.done():
            self._receiver = self._events.linked(self, welcome)
            self._welcome.set_result(None)
