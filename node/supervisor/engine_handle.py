"""The supervisor's end of one engine process: its start, its frames, its streams, its death.

    gateways ─ mailbox ◄─┐
    peers ──── mailbox ◄─┼── frames ◄── engine process      when it ends, all mailboxes end
    ledgers ── future  ◄─┤
    index ──── journal ◄─┘

Relays and holds no request. Restarting is the slot's business (engine_slot.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...core.channels.direct_question import TOKEN_BYTES
from ...core.errors import BatonError, NodeLost, StartupFailed, Unavailable
from ...core.ports import Clock, Entropy
from ...prefix_index.journal import CacheJournal
from ...prefix_index.messages import split_hashes
from ...proto import codec
from ...proto.v1 import engine_pb2, handoff_pb2, node_pb2
from ..channels.frames import encode, read_frame
from .mailbox import Mailbox

HEARTBEATS_MISSED = 6  # silent for so many intervals: not progressing


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to start an engine process: a module with a main, its configuration and surroundings."""

    module: str
    configuration: str  # JSON, the first frame
    environment: Mapping[str, str]
    heartbeat_s: float


@dataclass(slots=True, eq=False)
class PeerStream:
    """One open Handoff.Link. What the engine says before it greets was meant for an older one."""

    outgoing: Mailbox[handoff_pb2.PeerMessage] = field(default_factory=Mailbox)
    is_greeted: bool = False


class EngineHandle:
    """One engine process from its start to its end. Made by `start_engine`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        welcome: node_pb2.Welcome,
        heartbeat_s: float,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self.welcome = welcome
        self.heartbeat: node_pb2.Heartbeat | None = None  # the last one
        self.cache_journal = CacheJournal(welcome.incarnation)
        self._process = process
        self._reader = reader
        self._writer = writer
        self._clock = clock
        self._entropy = entropy
        self._heartbeat_s = heartbeat_s
        self._last_heartbeat_s = clock.monotonic_s()
        self._gateways: dict[str, Mailbox[node_pb2.NodeMessage]] = {}
        self._peers: dict[str, PeerStream] = {}
        self._ledgers: dict[int, asyncio.Future[str]] = {}
        self._num_queries = 0
        self._failure: BatonError | None = None
        self._lost: NodeLost | None = None  # set once the frames have ended

    @property
    def incarnation(self) -> str:
        return self.welcome.incarnation

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or is about to."""
        return self._lost is not None

    @property
    def silent_s(self) -> float:
        """Seconds since its last heartbeat."""
        return self._clock.monotonic_s() - self._last_heartbeat_s

    @property
    def is_progressing(self) -> bool:
        return not self.is_over and self.silent_s < HEARTBEATS_MISSED * self._heartbeat_s

    def send(self, message: engine_pb2.EngineInput) -> None:
        """Queue a frame; to a process that is gone it is lost, and its end is noticed elsewhere."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def run(self, on_over: Callable[[], None] = lambda: None) -> BatonError | None:
        """Route frames until the process has ended; says why, or None after an orderly end.

        `on_over` is called once its frames have ended: the process may take its time to follow.
        """
        try:
            while (payload := await read_frame(self._reader)) is not None:
                self._route(engine_pb2.EngineOutput.FromString(payload))
        finally:
            self._end_streams()
            on_over()
        code = await self._reap()
        if self._failure is None and code != 0:
            return NodeLost(f"the engine process ended with {_describe(code)}")
        return self._failure

    def _route(self, message: engine_pb2.EngineOutput) -> None:
        match message.WhichOneof("body"):
            case "to_gateway":
                if mailbox := self._gateways.get(message.to_gateway.gateway):
                    mailbox.put(message.to_gateway.message)
            case "to_peer":
                if peer := self._peers.get(message.to_peer.incarnation):
                    peer.is_greeted |= message.to_peer.message.HasField("hello")
                    if peer.is_greeted:
                        peer.outgoing.put(message.to_peer.message)
            case "close_gateway":
                close_gateway = message.close_gateway
                if mailbox := self._gateways.get(close_gateway.gateway):
                    mailbox.end(codec.error_from_wire(close_gateway.error))
            case "heartbeat":
                self.heartbeat = message.heartbeat
                self._last_heartbeat_s = self._clock.monotonic_s()
                for mailbox in self._gateways.values():
                    mailbox.put(node_pb2.NodeMessage(heartbeat=message.heartbeat))
            case "ledger":
                future = self._ledgers.pop(message.ledger.query, None)
                if future is not None and not future.done():  # cancelled, perhaps just now
                    future.set_result(message.ledger.json)
            case "close_peer":
                close = message.close_peer
                if peer := self._peers.get(close.incarnation):
                    peer.outgoing.end(codec.error_from_wire(close.error))
            case "cache_changes":
                changes = message.cache_changes
                removed, stored = split_hashes(changes.removed), split_hashes(changes.stored)
                self.cache_journal.record(removed, stored)
            case "failed":
                self._failure = codec.error_from_wire(message.failed)

    def _end_streams(self) -> None:
        lost = self._lost = NodeLost("the engine process ended")
        for mailbox in self._gateways.values():
            _end_gateway(mailbox, lost)
        for peer in self._peers.values():
            peer.outgoing.end(lost)
        for future in self._ledgers.values():
            if not future.done():
                future.set_exception(lost)

    # -- streams -------------------------------------------------------------------------------

    def open_gateway(self) -> tuple[str, Mailbox[node_pb2.NodeMessage]]:
        """A new gateway stream: its id and what goes out on it: welcome, last heartbeat, ...

        A gateway counts on an engine from its first heartbeat on: a hung one must send it itself.
        """
        gateway, mailbox = self._entropy.new_id(), Mailbox[node_pb2.NodeMessage]()
        mailbox.put(node_pb2.NodeMessage(welcome=self._welcome_for(gateway)))
        if self.heartbeat is not None and self.silent_s < 2 * self._heartbeat_s:
            mailbox.put(node_pb2.NodeMessage(heartbeat=self.heartbeat))
        if self._lost:
            _end_gateway(mailbox, self._lost)
        self._gateways[gateway] = mailbox
        return gateway, mailbox

    def _welcome_for(self, gateway: str) -> node_pb2.Welcome:
        """The engine's, with what opens a direct channel; the engine hears of it before."""
        welcome = node_pb2.Welcome()
        welcome.CopyFrom(self.welcome)
        if welcome.HasField("direct"):
            token = secrets.token_bytes(TOKEN_BYTES)
            linked = engine_pb2.GatewayLinked(gateway=gateway, token=token)
            self.send(engine_pb2.EngineInput(gateway_linked=linked))
            welcome.direct.gateway, welcome.direct.token = gateway, token
        return welcome

    def from_gateway(self, gateway: str, message: node_pb2.GatewayMessage) -> None:
        relayed = engine_pb2.FromGateway(gateway=gateway, message=message)
        self.send(engine_pb2.EngineInput(from_gateway=relayed))

    def close_gateway(self, gateway: str) -> None:
        del self._gateways[gateway]
        self.send(engine_pb2.EngineInput(gateway_lost=gateway))

    def open_peer(self, incarnation: str, *, is_source: bool, host: str = "") -> PeerStream:
        """A new control stream with a peer; one that was open is ended: a pair has one stream.

        `host`: where a source was dialled.
        """
        if older := self._peers.get(incarnation):
            older.outgoing.end(Unavailable("a newer stream of this pair took over"))
            self.close_peer(incarnation, older)
        peer = self._peers[incarnation] = PeerStream()
        if self._lost:
            peer.outgoing.end(self._lost)
        linked = engine_pb2.PeerLinked(incarnation=incarnation, peer_is_source=is_source, host=host)
        self.send(engine_pb2.EngineInput(peer_linked=linked))
        return peer

    def from_peer(
        self, incarnation: str, peer: PeerStream, message: handoff_pb2.PeerMessage
    ) -> None:
        if self._peers.get(incarnation) is peer:
            relayed = engine_pb2.FromPeer(incarnation=incarnation, message=message)
            self.send(engine_pb2.EngineInput(from_peer=relayed))

    def close_peer(self, incarnation: str, peer: PeerStream) -> None:
        if self._peers.get(incarnation) is peer:
            del self._peers[incarnation]
            self.send(engine_pb2.EngineInput(peer_lost=incarnation))

    async def ledger(self) -> str:
        """The engine's ledger as JSON. Raises NodeLost if the engine ends before it answers."""
        if self._lost:
            raise self._lost
        self._num_queries += 1
        query = self._num_queries
        future = self._ledgers[query] = asyncio.get_running_loop().create_future()
        self.send(engine_pb2.EngineInput(get_ledger=query))
        try:
            answer: str = await future
            return answer
        finally:
            self._ledgers.pop(query, None)

    # -- end -----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take nothing new; the process ends by itself when it holds nothing any more."""
        self.send(engine_pb2.EngineInput(drain=True))

    def shut_down(self) -> None:
        self.send(engine_pb2.EngineInput(shutdown=True))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _reap(self) -> int:
        self._writer.close()
        return await self._process.wait()


def _end_gateway(mailbox: Mailbox[node_pb2.NodeMessage], lost: NodeLost) -> None:
    """The last message says it too: a gateway that is just writing never reads the status."""
    mailbox.put(node_pb2.NodeMessage(engine_ended=node_pb2.EngineEnded()))
    mailbox.end(lost)


async def start_engine(
    command: EngineCommand, report: Callable[[str], None], clock: Clock, entropy: Entropy
) -> EngineHandle:
    """Start an engine process and wait until it is ready; `report` gets its progress lines.

    Raises StartupFailed with the engine's own words. A cancel kills the process.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", command.module, str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **command.environment},
        )
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(encode(engine_pb2.EngineInput(configure=command.configuration)))
    try:
        welcome = await _wait_ready(reader, process, report)
    except BaseException:  # a cancel too: nobody else would end the process
        writer.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return EngineHandle(process, reader, writer, welcome, command.heartbeat_s, clock, entropy)


async def _wait_ready(
    reader: asyncio.StreamReader,
    process: asyncio.subprocess.Process,
    report: Callable[[str], None],
) -> node_pb2.Welcome:
    while (payload := await read_frame(reader)) is not None:
        message = engine_pb2.EngineOutput.FromString(payload)
        match message.WhichOneof("body"):
            case "progress":
                report(message.progress)
            case "ready":
                return message.ready
            case "failed":
                cause, _, hint = message.failed.message.partition("\n")
                raise StartupFailed(cause, hint=hint)
    code = await process.wait()
    raise StartupFailed(f"the engine process ended with {_describe(code)} while it was starting")


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
