"""What each side of the hand-off remembers of its peers, and of transfers that are over.

PeerLinked         Hello fits            window is open (puller only)
    └──► LINKED ──────────────► MATCHED ───────────────────────────► READY
            └── Hello differs: the pair is refused and forgotten

Compares fingerprints; sends nothing.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from ...core.errors import BatonError, FingerprintMismatch, HandoffFailed
from ..window.network_address import PoolAccess
from .messages import Hello, Message

TOMBSTONE_S = 30.0
_MAX_TOMBSTONES = 65_536  # a peer that invents ids must not fill our memory


class PairState(enum.Enum):
    """Of one peer with an open stream."""

    LINKED = "linked"  # a puller's Hello is out; a source waits for it
    MATCHED = "matched"  # theirs fits ours: messages about transfers count
    READY = "ready"  # and its pool can be read


@dataclass(slots=True)
class Pair:
    """`link`: the number of its present stream; an answer about an earlier one is void.

    `opens_late`: no window is wanted yet. `host`, `access`: how a source's pools are reached.
    """

    link: int
    host: str
    opens_late: bool
    state: PairState = PairState.LINKED
    access: PoolAccess | None = None
    sees_steps: bool = False  # its count of steps can be read from here


class Pairs:
    """The peers with an open stream. A peer without one is not here."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello  # ours
        self._num_links = 0  # streams opened so far, to all peers
        self._pairs: dict[str, Pair] = {}

    def add(self, incarnation: str, host: str = "", *, opens_late: bool = False) -> None:
        """A stream to this peer is open; it has come no further."""
        self._num_links += 1
        self._pairs[incarnation] = Pair(self._num_links, host, opens_late)

    def remove(self, incarnation: str) -> Pair | None:
        """Forget the peer; returns how far it had come."""
        return self._pairs.pop(incarnation, None)

    def get(self, incarnation: str) -> Pair | None:
        return self._pairs.get(incarnation)

    def accepts(self, incarnation: str, message: Message) -> bool:
        """Whether a message counts: its stream is open and Hello came on it, or comes now.

        What comes before Hello was sent by a peer that had not noticed yet that its stream was
        replaced; it will, and fails on its side what the message was about.
        """
        pair = self.get(incarnation)
        return pair is not None and (
            pair.state is not PairState.LINKED or isinstance(message, Hello)
        )

    def opening(self, incarnation: str, link: int) -> Pair | None:
        """This stream's pair, if it is matched and waits for its window."""
        pair = self.get(incarnation)
        is_opening = pair is not None and pair.state is PairState.MATCHED and pair.link == link
        return pair if is_opening else None

    def match(self, incarnation: str, hello: Hello) -> Pair | None:
        """Take in a linked peer's Hello; the pair if it is the first.

        Raises FingerprintMismatch that names the first differing field, HandoffFailed if the
        peer is not who the stream was opened to.
        """
        if hello.incarnation != incarnation:
            raise HandoffFailed(f"the stream to {incarnation} is answered by {hello.incarnation}")
        _require_equal(self.hello, hello)
        pair = self._pairs[incarnation]
        if pair.state is not PairState.LINKED:
            return None
        pair.state, pair.access = PairState.MATCHED, hello.access
        return pair

    def ledger(self) -> dict[str, str]:
        return {incarnation: pair.state.value for incarnation, pair in self._pairs.items()}


def _require_equal(ours: Hello, theirs: Hello) -> None:
    if ours.protocol != theirs.protocol:
        raise FingerprintMismatch(f"protocol: {ours.protocol} here, {theirs.protocol} there")
    for name in sorted({*ours.fingerprint, *theirs.fingerprint}):
        here = ours.fingerprint.get(name)
        there = theirs.fingerprint.get(name)
        if here != there:
            raise FingerprintMismatch(f"{name}: {here!r} here, {there!r} there")


class Tombstones:
    """Transfers that are over, and why: nothing that arrives late revives one.

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
