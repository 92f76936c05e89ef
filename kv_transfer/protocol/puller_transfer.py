"""One transfer on the puller's side: its state, its manifests, and when its lease is renewed.

Bookkeeping only: puller.py decides what an event changes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from ...core.errors import BatonError, DeadlineExceeded, HandoffFailed, NodeLost, StaleBlocks
from ...engine.kv.block_pool import Reservation
from ..window.transport import PullOutcome
from .events import Intended
from .messages import HandoffState, Manifest

_RENEWALS_PER_LEASE = 3  # a lease survives two late renewals
_MIN_INTERVAL_S = 0.05  # however short a lease the source claims


class PullerState(enum.Enum):
    """The state of one transfer. Blocks are reserved late: when there is something to pull.

    Intended     pair ready     first manifest    Reserved     all is pulled
    ───────► WAITING ────► ATTACHED ────► QUEUED ────► PULLING ────► Complete
                              └─ of a prefix: reserved before ─►┘
                │              │             │            │
                └──────────────┴─────────────┴────────────┤ given up: Failed at once,
                                                          │ or nothing if it was cancelled
                         copies in flight ┌───────────────┤
                                          ▼               │ none in flight
                                       ENDING ────────────┴───► DropReservation, if reserved
                                              last one ended
    """

    WAITING = "waiting"  # the pair is not ready; no Attach was sent
    ATTACHED = "attached"  # the source computes; no manifest came yet
    QUEUED = "queued"  # there is something to pull, but no blocks are reserved yet
    PULLING = "pulling"  # reserved; chunks are copied as they are announced
    ENDING = "ending"  # given up, but copies in flight still write to the reservation


@dataclass(slots=True)
class PullerTransfer:
    """One transfer. Its manifests come in order, without gaps, and name the blocks of the prompt
    that the puller knows.

    `expires_s` is on the monotonic clock, as all times here.
    """

    intent: Intended
    expires_s: float  # inf: ENDING, which lasts as long as the copies
    state: PullerState = PullerState.WAITING
    next_seq: int = 0
    next_index: int = 0  # of a block
    handoff: HandoffState | None = None  # set by the last manifest
    # With the index of each one's first block; they wait for the reservation.
    unpulled: list[tuple[int, Manifest]] = field(default_factory=list)
    reservation: Reservation | None = None
    in_flight: set[int] = field(default_factory=set)  # manifests whose pulls have not ended
    is_orphaned: bool = False  # the source was lost when all that is needed was in flight
    renewal_s: float = math.inf  # when its lease must be renewed; inf: it has, or needs, none
    renewal_interval_s: float = 0.0

    @property
    def transfer_id(self) -> str:
        return self.intent.ticket.transfer_id

    @property
    def source(self) -> str:
        return self.intent.ticket.source_incarnation

    def start_lease(self, lease_s: float, now_s: float) -> None:
        """A manifest reported that `lease_s` are left of the lease."""
        self.renewal_interval_s = max(lease_s / _RENEWALS_PER_LEASE, _MIN_INTERVAL_S)
        self.renewal_s = min(now_s + self.renewal_interval_s, self.renewal_s)

    def accept(self, manifest: Manifest) -> bool:
        """Process the next manifest. Returns False for a duplicate, which changes nothing.

        Raises HandoffFailed for a gap, another prompt's blocks, or a wrong number of blocks.
        """
        if manifest.seq < self.next_seq:
            return False
        if self.handoff is not None:
            raise HandoffFailed(f"manifest {manifest.seq} was received after the last one")
        if manifest.seq > self.next_seq:
            raise HandoffFailed(f"manifest {manifest.seq} was received instead of {self.next_seq}")
        first, end = self.next_index, self.next_index + len(manifest.blocks)
        expected, is_last = self.intent.num_blocks, manifest.state is not None
        if end > expected or (is_last and end < expected):
            raise HandoffFailed(f"{end} blocks were announced, but the prompt has {expected}")
        if manifest.blocks.hashes != b"".join(self.intent.block_hashes[first:end]):
            raise HandoffFailed(f"blocks {first} to {end} hold another prompt's KV")
        self.next_seq += 1
        self.next_index = end
        self.handoff = manifest.state
        self.unpulled.append((first, manifest))
        return True

    def expiry(self, now_s: float) -> BatonError:
        """Why it ends at `expires_s`."""
        if now_s >= self.intent.deadline_s:
            return DeadlineExceeded("the deadline passed before the KV had arrived")
        return NodeLost("no link to the source was established in time")

    def failure(self, outcome: PullOutcome) -> BatonError:
        """Why it ends with a pull that did."""
        if self.is_orphaned:
            return NodeLost("the source was lost during the last pull")
        if outcome is PullOutcome.STALE:
            return StaleBlocks("a block was reallocated during the pull")
        return HandoffFailed(f"the pull ended {outcome.value}")
