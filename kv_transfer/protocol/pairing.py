"""What both sides of the hand-off do alike: the set-up with each peer, before any transfer counts,
and what is remembered of transfers that are over.

PeerLinked      Hello fits             a puller's: window is wanted      it is open
    └──► LINKED ──────────► MATCHED ──────────────────────► OPENING ──────────► READY
            └── Hello differs: the pair is refused and forgotten

`source.Source` and `puller.Puller` are the two; what happens to one transfer is theirs.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from ...core.errors import BatonError, FingerprintMismatch, HandoffFailed, NodeLost
from ...core.ports import Clock
from ..window.network_address import PoolAccess
from .events import ClosePeer, PeerEvent, PeerLinked, PeerLost, PeerMessage, Send, Tick
from .messages import Hello, Message

TOMBSTONE_S = 30.0
_MAX_TOMBSTONES = 65_536  # a peer that invents ids must not fill our memory


class PairState(enum.Enum):
    """Of one peer with an open stream."""

    LINKED = "linked"  # a puller's Hello is out; a source waits for it
    MATCHED = "matched"  # theirs fits ours: messages about transfers count
    OPENING = "opening"  # as a puller asked
    READY = "ready"  # and its pool can be read


@dataclass(slots=True)
class Pair:
    """One peer with an open stream; all but `state` is of a source, as its puller knows it.

    `opens_late`: no window is wanted before a transfer is. `host`, `access`: how its pools are
    reached.
    """

    host: str
    opens_late: bool
    state: PairState = PairState.LINKED
    access: PoolAccess | None = None
    sees_steps: bool = False  # its count of steps can be read from here


class Transfer(Protocol):
    """As one side keeps it. `expires_s`: when a `Tick` ends it; inf: nothing does."""

    expires_s: float

    def ledger(self, now_s: float) -> dict[str, object]: ...


T = TypeVar("T", bound=Transfer)
OwnEvent = TypeVar("OwnEvent")
OwnEffect = TypeVar("OwnEffect")


class HandoffSide(ABC, Generic[T, OwnEvent, OwnEffect]):
    """All transfers of one engine on one side. One thread calls it; see the events for what to feed
    it. A peer without an open stream is not in `_pairs`."""

    _peer: ClassVar[str]  # what the other side is called in errors

    def __init__(self, hello: Hello, clock: Clock) -> None:
        self._hello = hello
        self._clock = clock
        self._pairs: dict[str, Pair] = {}  # by incarnation
        self._transfers: dict[str, T] = {}
        self._tombstones = Tombstones()
        self._effects: list[Send | ClosePeer | OwnEffect] = []

    def handle(self, event: PeerEvent | OwnEvent) -> list[Send | ClosePeer | OwnEffect]:
        """Take in one event; returns what is to be done now, in this order. Never raises on what
        a peer or a gateway sent."""
        match event:
            case PeerMessage(incarnation, message):
                self._on_peer_message(incarnation, message)
            case Tick():
                now_s = self._clock.monotonic_s()
                self._tombstones.purge(now_s)
                self._on_tick(now_s)
            case PeerLinked():
                self._on_peer_linked(event)
            case PeerLost(incarnation):
                self._drop_peer(incarnation, NodeLost(f"the stream to the {self._peer} ended"))
            case _:
                self._on_event(event)
        effects, self._effects = self._effects, []
        return effects

    def next_deadline_s(self) -> float:
        """When the next `Tick` is due, on the monotonic clock; inf: never."""
        return min((t.expires_s for t in self._transfers.values()), default=math.inf)

    def ledger(self) -> dict[str, object]:
        """The transfers, their peers, and how many are over, as JSON-able values."""
        now_s = self._clock.monotonic_s()
        return {
            "transfers": {name: each.ledger(now_s) for name, each in self._transfers.items()},
            "peers": {incarnation: pair.state.value for incarnation, pair in self._pairs.items()},
            "num_tombstones": len(self._tombstones),
        }

    # ---- what a side adds

    @abstractmethod
    def _on_event(self, event: OwnEvent) -> None: ...

    @abstractmethod
    def _on_tick(self, now_s: float) -> None: ...

    @abstractmethod
    def _on_message(self, peer: str, message: Message) -> None:
        """One about transfers, of a matched peer. Raises HandoffFailed if no sane peer sends it:
        then the pair is refused."""

    def _on_linked(self, peer: str, pair: Pair) -> None:
        """Its stream is open; nothing came on it yet."""

    @abstractmethod
    def _on_matched(self, peer: str, pair: Pair) -> None:
        """Its Hello came, the first one, and fits."""

    @abstractmethod
    def _on_lost(self, peer: str, pair: Pair | None, error: BatonError) -> None:
        """Its stream is gone: end everything with it; nothing is sent to it. `pair`: how far it had
        come."""

    # ---- the set-up

    def _on_peer_linked(self, linked: PeerLinked) -> None:
        peer = linked.incarnation
        if peer in self._pairs:
            self._drop_peer(peer, NodeLost(f"the stream to the {self._peer} was replaced"))
        pair = self._pairs[peer] = Pair(linked.host, linked.opens_late)
        self._on_linked(peer, pair)

    def _on_peer_message(self, peer: str, message: Message) -> None:
        """What comes before Hello was sent by a peer that had not noticed yet that its stream was
        replaced; it will, and fails on its side what the message was about."""
        pair = self._pairs.get(peer)
        if pair is None:
            return
        try:
            if isinstance(message, Hello):
                self._match(peer, pair, message)
            elif pair.state is not PairState.LINKED:
                self._on_message(peer, message)
        except HandoffFailed as error:
            self._refuse(peer, error)

    def _match(self, peer: str, pair: Pair, hello: Hello) -> None:
        """Raises FingerprintMismatch that names the first differing field, HandoffFailed if the
        peer is not who the stream was opened to."""
        if hello.incarnation != peer:
            raise HandoffFailed(f"the stream to {peer} is answered by {hello.incarnation}")
        require_equal(self._hello, hello)
        if pair.state is PairState.LINKED:
            pair.state, pair.access = PairState.MATCHED, hello.access
            self._on_matched(peer, pair)

    def _refuse(self, peer: str, error: BatonError) -> None:
        self._drop_peer(peer, error)
        self._effects.append(ClosePeer(peer, error))

    def _drop_peer(self, peer: str, error: BatonError) -> None:
        self._on_lost(peer, self._pairs.pop(peer, None), error)

    def _send(self, peer: str, message: Message) -> None:
        self._effects.append(Send(peer, message))


def require_equal(ours: Hello, theirs: Hello) -> None:
    """Raises FingerprintMismatch that names the first field in which they differ."""
    if ours.protocol != theirs.protocol:
        raise FingerprintMismatch(f"protocol: {ours.protocol} here, {theirs.protocol} there")
    for name in sorted({*ours.fingerprint, *theirs.fingerprint}):
        here = ours.fingerprint.get(name)
        there = theirs.fingerprint.get(name)
        if here != there:
            raise FingerprintMismatch(f"{name}: {here!r} here, {there!r} there")


class Tombstones:
    """Transfers that are over, and pairs whose windows failed, and why: nothing that arrives late
    revives one.

    All live equally long, so the oldest expires first.
    """

    def __init__(self) -> None:
        # Not a dict: to find the oldest, that passes by all that were deleted before.
        self._entries: OrderedDict[str, tuple[float, BatonError]] = OrderedDict()

    def add(self, transfer_id: str, error: BatonError, now_s: float) -> None:
        """Bury a transfer. The first burial counts."""
        self.purge(now_s)
        self._entries.setdefault(transfer_id, (now_s + TOMBSTONE_S, error))
        if len(self._entries) > _MAX_TOMBSTONES:
            del self._entries[next(iter(self._entries))]

    def get(self, transfer_id: str) -> BatonError | None:
        entry = self._entries.get(transfer_id)
        return None if entry is None else entry[1]

    def purge(self, now_s: float) -> None:
        """Forget what is older than `TOMBSTONE_S`."""
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][0] > now_s:
                return
            del self._entries[oldest]

    def __len__(self) -> int:
        return len(self._entries)
