"""The set-up of a pair of engines: the peer's Hello is checked before any of its messages counts.

PeerLinked      Hello fits             a puller's: window is wanted      it is open
    └──► LINKED ──────────► MATCHED ──────────────────────► OPENING ──────────► READY
            └── Hello differs: the pair is refused and forgotten

Knows no transfer.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...core.errors import FingerprintMismatch, HandoffFailed
from ..window.network_address import PoolAccess
from .messages import Hello


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

    def match(self, peer: str, ours: Hello, theirs: Hello) -> bool:
        """Check the Hello that came over the stream to `peer`. Returns whether it was the first.

        Raises FingerprintMismatch, or HandoffFailed if another incarnation sent it.
        """
        if theirs.incarnation != peer:
            raise HandoffFailed(f"the stream to {peer} is answered by {theirs.incarnation}")
        require_equal(ours, theirs)
        if self.state is not PairState.LINKED:
            return False
        self.state, self.access = PairState.MATCHED, theirs.access
        return True


def require_equal(ours: Hello, theirs: Hello) -> None:
    """Raises FingerprintMismatch that names the first field in which they differ."""
    if ours.protocol != theirs.protocol:
        raise FingerprintMismatch(f"protocol: {ours.protocol} here, {theirs.protocol} there")
    for name in sorted({*ours.fingerprint, *theirs.fingerprint}):
        here = ours.fingerprint.get(name)
        there = theirs.fingerprint.get(name)
        if here != there:
            raise FingerprintMismatch(f"{name}: {here!r} here, {there!r} there")
