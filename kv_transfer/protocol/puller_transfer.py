"""One transfer as the puller keeps it: how far it is, and what it still waits for.

Plain bookkeeping: what an event changes is decided in puller.py.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ...core.errors import BatonError, DeadlineExceeded, NodeLost
from .events import Intended, Reserved
from .manifest_sequence import ManifestSequence
from .messages import Manifest


class PullerState(enum.Enum):
    """Of one transfer. Memory is taken late: only when there is something to pull.

    Intended     pair ready     first manifest    Reserved     all is pulled
    ───────► WAITING ────► ATTACHED ────► QUEUED ────► PULLING ────► Complete
                │              │             │            │
                └──────────────┴─────────────┴────────────┤ given up: Failed at once,
                                                          │ or silence if it was cancelled
                         copies in flight ┌───────────────┤
                                          ▼               │ none in flight
                                       ENDING ────────────┴───► DropReservation, if reserved
                                              last one ended
    """

    WAITING = "waiting"  # the pair is not ready; the source has not been asked
    ATTACHED = "attached"  # the source computes; no manifest yet
    QUEUED = "queued"  # there is something to pull and nowhere to put it
    PULLING = "pulling"  # reserved; chunks are copied as they are announced
    ENDING = "ending"  # given up, but copies in flight still write to the reservation


@dataclass(slots=True)
class PullerTransfer:
    """`expires_s` is on the monotonic clock, as all times here."""

    intent: Intended
    manifests: ManifestSequence
    state: PullerState
    expires_s: float | None  # None when ending: the fence lasts as long as the copies
    unpulled: list[Manifest] = field(default_factory=list)  # announced before there was memory
    reservation: Reserved | None = None
    in_flight: set[int] = field(default_factory=set)  # manifests whose pulls have not ended
    num_pulled_blocks: int = 0
    is_orphaned: bool = False  # the source is lost, but all that is needed was under way

    @property
    def source(self) -> str:
        return self.intent.ticket.source_incarnation

    def ledger(self, now_s: float) -> dict[str, object]:
        """JSON-able."""
        return {
            "state": self.state.value,
            "key": self.intent.key,
            "source": self.source,
            "is_reserved": self.reservation is not None,
            "num_pulls_in_flight": len(self.in_flight),
            "expires_in_s": None if self.expires_s is None else self.expires_s - now_s,
        }

    def expiry(self, now_s: float) -> BatonError:
        """What it fails with when `expires_s` has come."""
        if now_s >= self.intent.deadline_s:
            return DeadlineExceeded("the deadline passed before the KV was here")
        return NodeLost("no link to the source came up in time")
