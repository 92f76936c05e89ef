"""How an engine speaks with its peers: over the link, or directly where both are on one host.

    puller                                                  source
      │ ══ link: Hello ═══════════════════════════════════►   │
      │ ◄═══════════════════ link: Hello, with a token ════   │
      │ asks (core/channels/direct_question.py)               │ linked, greeted, this link's token?
      │ ◄─────────────────────────────────────── accepted ──   │
      │ ◄── Attach, Manifest, Release, ... all but Hello ──►   │

The puller's role hears of the source's Hello only when the channel stands or is known not to come,
and says nothing before that; the source answers. So all messages of one link but Hello go one way,
in order. Only the engine loop's thread is here, and nothing here waits.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from ...core.channels.direct_channel import ChannelBroken
from ...core.channels.direct_question import ACCEPTED, TOKEN_BYTES, Asker, Question, ask
from ...core.channels.framing import MAX_RELAYED_BYTES, BrokenStream
from ...core.errors import BatonError, HandoffFailed, NodeLost
from ...proto.v1 import handoff_pb2
from .inbox import Inbox
from .route import Way
from .watched_channel import FromPeer, WatchedChannel

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 16 << 20  # some hundred manifests of long prompts


@dataclass(slots=True)
class _Peer:
    """One peer with an open link."""

    token: bytes | None  # what it must say to be accepted; None: it is a source
    way: Way = Way.LINK
    channel: WatchedChannel | None = None
    is_greeted: bool = False
    held: handoff_pb2.PeerMessage | None = None  # the Hello that the role will hear


class DirectPeers:
    """All peers of one engine. `can_listen` says whether others can ask it."""

    def __init__(
        self,
        incarnation: str,
        host_id: bytes,
        inbox: Inbox[Any],
        can_listen: Callable[[], bool],
    ) -> None:
        self._incarnation = incarnation
        self._host_id = host_id
        self._inbox = inbox
        self._can_listen = can_listen
        self._peers: dict[str, _Peer] = {}
        self._broken: list[tuple[str, BatonError]] = []

    def close(self) -> None:
        for incarnation in [*self._peers]:
            self.lost(incarnation)

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
            peer.channel.close()

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
            if peer.token is not None and self._can_listen():
                message.hello.direct_token = peer.token
            return False
        if peer.way is Way.DIRECT and peer.channel is not None:
            try:
                peer.channel.send(message.SerializeToString())
            except ChannelBroken as error:
                self._break(incarnation, peer, NodeLost(str(error)))
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
        peer.channel.on_ready(lambda: self._hear_answer(incarnation, peer))

    def _connect(self, incarnation: str, hello: handoff_pb2.Hello) -> WatchedChannel:
        if not hello.direct_token:
            raise HandoffFailed("it offers no direct channel")
        if hello.access.host_id != self._host_id:
            raise HandoffFailed("it is on another host")
        question = Question(Asker.PULLER, incarnation, self._incarnation, hello.direct_token)
        return WatchedChannel(ask(question), self._inbox)

    def _hear_answer(self, incarnation: str, peer: _Peer) -> list[FromPeer]:
        """The source accepts, or does not: either way its Hello counts from now on."""
        channel, held = peer.channel, peer.held
        if channel is None or channel.is_closed or held is None:
            return []
        try:
            payloads, is_over = channel.receive()
        except (BrokenStream, ChannelBroken):
            payloads, is_over = [], True
        if not payloads and not is_over:
            return []
        peer.held = None
        if payloads == [ACCEPTED] and not is_over:
            peer.way = Way.DIRECT
            self._hand_over(channel, incarnation, peer)
            log.info("speaks with source %s directly", incarnation)
        else:
            peer.way, peer.channel = Way.LINK, None
            channel.close()
            _log_link(incarnation, "it did not accept a direct channel")
        return [FromPeer(incarnation, held)]

    # ---- the source's side

    def admit(self, question: Question, channel: WatchedChannel) -> bool:
        """Give the channel to the puller that has just proven who it is, unless it has one.

        It is accepted once its Hello has come.
        """
        peer = self._peers.get(question.name)
        if peer is None or peer.token is None or peer.way is not Way.LINK:
            return False
        if not hmac.compare_digest(peer.token, question.token):
            return False
        peer.way, peer.channel = Way.ASKING, channel
        self._hand_over(channel, question.name, peer)
        if peer.is_greeted:
            self._accept(question.name, peer, channel)
        return True

    def _accept(self, incarnation: str, peer: _Peer, channel: WatchedChannel) -> None:
        try:
            channel.send(ACCEPTED)
        except ChannelBroken as error:
            self._break(incarnation, peer, NodeLost(str(error)))
            return
        peer.way = Way.DIRECT
        log.info("speaks with puller %s directly", incarnation)

    # ---- both sides

    def _read(self, incarnation: str, peer: _Peer) -> list[FromPeer]:
        """What a peer has said; a channel that breaks is noted, behind what came before."""
        channel = peer.channel
        if channel is None or channel.is_closed:
            return []
        messages: list[FromPeer] = []
        try:
            payloads, is_over = channel.receive()
            if payloads and peer.way is not Way.DIRECT:
                raise ChannelBroken("it spoke before it was accepted")
            messages += [FromPeer(incarnation, _decode(payload)) for payload in payloads]
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
        peer.channel.close()
        peer.way = Way.BROKEN
        log.warning("the direct channel to %s broke: %s", incarnation, error.message)
        self._broken.append((incarnation, error))

    def _hand_over(self, channel: WatchedChannel, incarnation: str, peer: _Peer) -> None:
        """From now on what comes are a peer's messages."""
        channel.allow(MAX_RELAYED_BYTES, MAX_UNSENT_BYTES)
        channel.on_ready(lambda: self._read(incarnation, peer))


def _decode(payload: bytes) -> handoff_pb2.PeerMessage:
    message = handoff_pb2.PeerMessage.FromString(payload)
    if message.HasField("hello"):
        raise ChannelBroken("it greeted where only the link is for greetings")
    return message


def _log_link(incarnation: str, reason: str) -> None:
    log.info("speaks with source %s over the link: %s", incarnation, reason)
