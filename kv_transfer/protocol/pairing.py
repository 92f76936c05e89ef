"""The pairs of one side: the peer's Hello is checked before any of its messages counts.

PeerLinked      Hello fits             a puller's: window is wanted      it is open
    └──► LINKED ──────────► MATCHED ──────────────────────► OPENING ──────────► READY
            └── Hello differs: the pair is refused and forgotten

Knows no transfer.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from ...core.errors import BatonError, FingerprintMismatch, HandoffFailed, NodeLost
from ..window.network_address import PoolAccess
from .events import PeerLinked, Send
from .messages import Hello, Refused

OwnEffect = TypeVar("OwnEffect")


class PairState(enum.Enum):
    """The state of one peer with an open stream."""

    LINKED = "linked"  # a puller has sent its Hello; a source waits for it
    MATCHED = "matched"  # their Hello fits ours: messages about transfers count
    OPENING = "opening"  # a puller opens its window onto the source's pool
    READY = "ready"  # the window is open


@dataclass(slots=True)
class Pair:
    """One peer with an open stream. Only a puller uses the fields other than `state`; they describe
    the source.

    `host`, `access`: how its pools are reached. `opens_late`: its window is opened for its first
    transfer, not at once.
    """

    host: str
    opens_late: bool
    state: PairState = PairState.LINKED
    access: PoolAccess | None = None
    sees_steps: bool = False  # the puller can read how many steps the source has completed


class PairedSide(ABC, Generic[OwnEffect]):
    """One side of the hand-off, as far as its peers are concerned.

    `pairs`: the peers with an open stream, by incarnation.
    """

    _peer: ClassVar[str]  # the other side's name in errors

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self.pairs: dict[str, Pair] = {}
        self._effects: list[Send | OwnEffect] = []

    # ---- what a side adds

    def _on_linked(self, peer: str) -> None:
        """The stream to a peer was opened; nothing has come over it yet."""

    @abstractmethod
    def _on_matched(self, peer: str, pair: Pair) -> None:
        """The peer's first Hello came, and fits."""

    @abstractmethod
    def _on_lost(self, peer: str, pair: Pair | None, error: BatonError) -> None:
        """The stream to a peer is gone: end its transfers without sending to it. `pair`: its last
        state."""

    # ---- the life of a pair

    def _on_peer_linked(self, linked: PeerLinked) -> None:
        peer = linked.incarnation
        if peer in self.pairs:
            self._drop_peer(peer, NodeLost(f"the stream to the {self._peer} was replaced"))
        self.pairs[peer] = Pair(linked.host, linked.opens_late)
        self._on_linked(peer)

    def _on_hello(self, peer: str, pair: Pair, theirs: Hello) -> None:
        """Raises FingerprintMismatch, or HandoffFailed if another incarnation sent it."""
        if theirs.incarnation != peer:
            raise HandoffFailed(f"the stream to {peer} is answered by {theirs.incarnation}")
        require_equal(self._hello, theirs)
        if pair.state is PairState.LINKED:
            pair.state, pair.access = PairState.MATCHED, theirs.access
            self._on_matched(peer, pair)

    def _refuse(self, peer: str, error: BatonError) -> None:
        self._drop_peer(peer, error)
        self._effects.append(Send(peer, Refused(error)))

    def _drop_peer(self, peer: str, error: BatonError) -> None:
        self._on_lost(peer, self.pairs.pop(peer, None), error)


def require_equal(ours: Hello, theirs: Hello) -> None:
    """Raises FingerprintMismatch that names the first field in which they differ."""
    if ours.protocol != theirs.protocol:
        raise FingerprintMismatch(f"protocol: {ours.protocol} here, {theirs.protocol} there")
    for name in sorted({*ours.fingerprint, *theirs.fingerprint}):
        here = ours.fingerprint.get(name)
        there = theirs.fingerprint.get(name)
        if here != there:
            raise FingerprintMismatch(f"{name}: {here!r} here, {there!r} there")
