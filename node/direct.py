"""How an engine speaks with its peers: over the link, or directly where both are on one host.

    puller                                                  source
      │ ══ link: Hello ═══════════════════════════════════►   │
      │ ◄═══════════════════ link: Hello, with a token ════   │
      │ connect "\\0baton-handoff-<uid>-<incarnation>"          │ same user?
      │ ── who asks whom, token ──────────────────────────►   │ linked, greeted, this link's token?
      │ ◄─────────────────────────────────────── accepted ──   │
      │ ◄── Attach, Manifest, Release, ... all but Hello ──►   │

The link (Handoff.Link, through both supervisors) proves both ends, says Hello, and stands for the
pair: a channel ends with its link, and one that breaks ends it. The puller's role hears of the
source's Hello only when the channel stands or is known not to come, and says nothing before that;
the source answers. So all messages of one link but Hello go one way, in order. Only the engine
loop's thread is here, and nothing here waits.
"""

from __future__ import annotations

import enum
import hmac
import logging
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError

from ..core.errors import BatonError, HandoffFailed, NodeLost, StartupFailed
from ..kv_transfer.pool_address import require_same_user, socket_address
from ..proto.v1 import handoff_pb2
from .direct_channel import ChannelBroken, DirectChannel
from .frames import MAX_RELAYED_BYTES, BrokenStream
from .inbox import Inbox

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
MAX_STRANGERS = 64  # connections that have not said who they are; the eldest goes first

_ASKING = struct.Struct("=8s16s16s32s")  # magic, source, puller, token
_ASK, _ACCEPT = b"BATONDR1", b"BATONOK1"
_BACKLOG = 64
_PURPOSE = "handoff"

Message: TypeAlias = tuple[str, handoff_pb2.PeerMessage]  # of the peer with this incarnation


@dataclass(frozen=True, slots=True)
class DirectReady:
    """There is something to read, or room to write: `handle` returns what peers have said."""

    handle: Callable[[], list[Message]]


class Way(enum.Enum):
    """How messages of a pair travel."""

    LINK = "link"
    ASKING = "asking"  # connected, not accepted yet; nothing is said
    DIRECT = "direct"
    BROKEN = "broken"  # it was direct: the link is about to end


@dataclass(slots=True)
class _Peer:
    """One peer with an open link."""

    token: bytes | None  # what it must say to be accepted; None: it is a source
    way: Way = Way.LINK
    channel: DirectChannel | None = None
    is_greeted: bool = False
    held: handoff_pb2.PeerMessage | None = None  # the Hello that the role will hear


class DirectChannels:
    """All peers of one engine. `listen` makes it one that others can ask."""

    def __init__(self, incarnation: str, host_id: bytes, inbox: Inbox[Any]) -> None:
        self._incarnation = incarnation
        self._host_id = host_id
        self._inbox = inbox
        self._listener: socket.socket | None = None
        self._peers: dict[str, _Peer] = {}
        self._strangers: dict[DirectChannel, None] = {}  # eldest first
        self._broken: list[tuple[str, BatonError]] = []

    def listen(self) -> None:
        """Let linked pullers of this host connect. Raises StartupFailed."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(socket_address(self._incarnation, _PURPOSE))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupFailed(f"cannot listen for pullers of this host: {error}") from error
        self._listener = listener
        ready = (DirectReady(self._admit),)
        self._inbox.watch(listener, lambda: ready)

    def close(self) -> None:
        for incarnation in [*self._peers]:
            self.lost(incarnation)
        for stranger in [*self._strangers]:
            self._turn_away(stranger)
        self._stop_listening()

    def ledger(self) -> dict[str, str]:
        """Which way messages go, by peer."""
        return {incarnation: peer.way.value for incarnation, peer in self._peers.items()}

    # ---- the link

    def linked(self, incarnation: str, *, is_source: bool) -> None:
        """A link stands; one that stood before is gone, and its channel with it."""
        self.lost(incarnation)
        self._peers[incarnation] = _Peer(None if is_source else secrets.token_bytes(TOKEN_BYTES))

    def lost(self, incarnation: str) -> None:
        """The link ended; that its channel had broken is of no more interest."""
        self._broken = [broken for broken in self._broken if broken[0] != incarnation]
        peer = self._peers.pop(incarnation, None)
        if peer is not None and peer.channel is not None:
            self._close(peer.channel)

    def heard(self, incarnation: str, message: handoff_pb2.PeerMessage) -> bool:
        """Take note of what came over the link; False: the role will hear it later."""
        peer = self._peers.get(incarnation)
        if peer is None or not message.HasField("hello"):
            return True
        if peer.token is not None:
            peer.is_greeted = True
            if peer.way is Way.ASKING and peer.channel is not None:
                self._accept(incarnation, peer, peer.channel)
            return True
        if peer.way is Way.LINK and peer.held is None and not peer.is_greeted:
            peer.is_greeted = True
            self._ask(incarnation, peer, message)
        return peer.way is not Way.ASKING

    def send(self, incarnation: str, message: handoff_pb2.PeerMessage) -> bool:
        """Send a message directly; False: it is to go over the link."""
        peer = self._peers.get(incarnation)
        if peer is None:
            return False
        if message.HasField("hello"):
            if peer.token is not None and self._listener is not None:
                message.hello.direct_token = peer.token
            return False
        if peer.way is Way.DIRECT and peer.channel is not None:
            try:
                peer.channel.send(message.SerializeToString())
            except ChannelBroken as error:
                self._break(incarnation, peer, NodeLost(str(error)))
            else:
                self._watch_writes(peer.channel)
        return peer.way in (Way.DIRECT, Way.BROKEN)

    def take_broken(self) -> list[tuple[str, BatonError]]:
        """Peers whose channel broke since the last call: their links must be ended."""
        broken, self._broken = self._broken, []
        return broken

    # ---- the puller's side

    def _ask(self, incarnation: str, peer: _Peer, message: handoff_pb2.PeerMessage) -> None:
        """Connect to a source that has greeted, if it can be reached."""
        try:
            peer.channel = self._connect(incarnation, message.hello)
        except (HandoffFailed, ChannelBroken, OSError) as error:
            _log_link(incarnation, str(error))
            return
        peer.way, peer.held = Way.ASKING, message
        self._watch(peer.channel, lambda: self._hear_answer(incarnation, peer))

    def _connect(self, incarnation: str, hello: handoff_pb2.Hello) -> DirectChannel:
        if len(hello.direct_token) != TOKEN_BYTES:
            raise HandoffFailed("it offers no direct channel")
        if hello.data.host_id != self._host_id:
            raise HandoffFailed("it is on another host")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(socket_address(incarnation, _PURPOSE))
            require_same_user(connection)
            channel = DirectChannel(connection, len(_ACCEPT))
            names = (bytes.fromhex(incarnation), bytes.fromhex(self._incarnation))
            channel.send(_ASKING.pack(_ASK, *names, hello.direct_token))
        except BaseException:  # whatever it is, nobody else would close it
            connection.close()
            raise
        return channel

    def _hear_answer(self, incarnation: str, peer: _Peer) -> list[Message]:
        """The source accepts, or does not: either way its Hello counts from now on."""
        channel, held = peer.channel, peer.held
        if channel is None or channel.is_closed or held is None:
            return []
        try:
            payloads, is_over = channel.receive()
        except BrokenStream:
            payloads, is_over = [], True
        if not payloads and not is_over:
            return []
        peer.held = None
        if payloads == [_ACCEPT] and not is_over:
            peer.way = Way.DIRECT
            channel.allow(MAX_RELAYED_BYTES)
            self._hand_over(channel, incarnation, peer)
            log.info("speaks with source %s directly", incarnation)
        else:
            peer.way, peer.channel = Way.LINK, None
            self._close(channel)
            _log_link(incarnation, "it did not accept a direct channel")
        return [(incarnation, held)]

    # ---- the source's side

    def _admit(self) -> list[Message]:
        """Take in whoever connects, as a stranger."""
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # out of descriptors: those who wait are to use their links
                log.warning("takes in no more direct channels: %s", error)
                self._stop_listening()
                break
            try:
                require_same_user(connection)
            except HandoffFailed as error:
                log.warning("refused a direct channel: %s", error.message)
                connection.close()
                continue
            self._add_stranger(DirectChannel(connection, _ASKING.size))
        return []

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._inbox.forget(self._listener)
            self._listener.close()
            self._listener = None

    def _add_stranger(self, stranger: DirectChannel) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        self._strangers[stranger] = None
        self._watch(stranger, lambda: self._question(stranger))

    def _question(self, stranger: DirectChannel) -> list[Message]:
        """Hear who a stranger is, and accept the one whom this link's token was told."""
        if stranger.is_closed:
            return []
        try:
            payloads, is_over = stranger.receive()
        except BrokenStream:
            payloads, is_over = [], True
        if payloads or is_over:
            asker = self._asker(payloads)
            if is_over or asker is None:
                log.warning("refused a direct channel: it is no linked puller's")
                self._turn_away(stranger)
            else:
                del self._strangers[stranger]
                self._engage(asker, stranger)
        return []

    def _asker(self, payloads: list[bytes]) -> str | None:
        """The puller that has just proven who it is, unless it has a channel."""
        if len(payloads) != 1 or len(payloads[0]) != _ASKING.size:
            return None
        magic, source, puller, token = _ASKING.unpack(payloads[0])
        peer = self._peers.get(puller.hex())
        if magic != _ASK or source.hex() != self._incarnation:
            return None
        if peer is None or peer.token is None or peer.way is not Way.LINK:
            return None
        return puller.hex() if hmac.compare_digest(peer.token, token) else None

    def _engage(self, incarnation: str, channel: DirectChannel) -> None:
        """The channel is the peer's; it is accepted once its Hello has come."""
        peer = self._peers[incarnation]
        peer.way, peer.channel = Way.ASKING, channel
        channel.allow(MAX_RELAYED_BYTES)
        self._hand_over(channel, incarnation, peer)
        if peer.is_greeted:
            self._accept(incarnation, peer, channel)

    def _accept(self, incarnation: str, peer: _Peer, channel: DirectChannel) -> None:
        try:
            channel.send(_ACCEPT)
        except ChannelBroken as error:
            self._break(incarnation, peer, NodeLost(str(error)))
            return
        peer.way = Way.DIRECT
        self._watch_writes(channel)
        log.info("speaks with puller %s directly", incarnation)

    def _turn_away(self, stranger: DirectChannel) -> None:
        del self._strangers[stranger]
        self._close(stranger)

    # ---- both sides

    def _read(self, incarnation: str, peer: _Peer) -> list[Message]:
        """What a peer has said; a channel that breaks is noted, behind what came before."""
        channel = peer.channel
        if channel is None or channel.is_closed:
            return []
        messages: list[Message] = []
        try:
            channel.flush()
            self._watch_writes(channel)
            payloads, is_over = channel.receive()
            if payloads and peer.way is not Way.DIRECT:
                raise ChannelBroken("it spoke before it was accepted")
            messages += [(incarnation, _decode(payload)) for payload in payloads]
            if is_over:
                raise ChannelBroken("the peer closed it")
        except ChannelBroken as error:
            self._break(incarnation, peer, NodeLost(str(error)))
        except (BrokenStream, DecodeError) as error:
            self._break(incarnation, peer, HandoffFailed(f"a peer is not understood: {error}"))
        return messages

    def _break(self, incarnation: str, peer: _Peer, error: BatonError) -> None:
        """Nothing more can be said on this link: whoever runs the loop ends it."""
        assert peer.channel is not None
        self._close(peer.channel)
        peer.way = Way.BROKEN
        log.warning("the direct channel to %s broke: %s", incarnation, error.message)
        self._broken.append((incarnation, error))

    def _hand_over(self, channel: DirectChannel, incarnation: str, peer: _Peer) -> None:
        """From now on what comes are a peer's messages."""
        self._inbox.forget(channel)
        self._watch(channel, lambda: self._read(incarnation, peer))

    def _watch(self, channel: DirectChannel, handle: Callable[[], list[Message]]) -> None:
        ready = (DirectReady(handle),)
        self._inbox.watch(channel, lambda: ready)
        self._watch_writes(channel)

    def _watch_writes(self, channel: DirectChannel) -> None:
        self._inbox.watch_writes(channel, channel.has_unsent)

    def _close(self, channel: DirectChannel) -> None:
        if not channel.is_closed:
            self._inbox.forget(channel)
            channel.close()


def _decode(payload: bytes) -> handoff_pb2.PeerMessage:
    message = handoff_pb2.PeerMessage.FromString(payload)
    if message.HasField("hello"):
        raise ChannelBroken("it greeted where only the link is for greetings")
    return message


def _log_link(incarnation: str, reason: str) -> None:
    log.info("speaks with source %s over the link: %s", incarnation, reason)
