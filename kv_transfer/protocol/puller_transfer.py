"""One transfer as the puller keeps it: how far it is, which manifests of it have come, and what it
waits for: its turn to get memory, the renewal of its lease.

Plain bookkeeping: what an event changes is decided in puller.py.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from ...core.errors import BatonError, DeadlineExceeded, HandoffFailed, NodeLost
from ...core.fair_queue import FairQueue
from ...engine.kv.block_pool import Reservation
from .events import Intended
from .messages import HandoffState, Manifest

_RENEWALS_PER_LEASE = 3  # two may thus be late before a lease runs out
_MIN_INTERVAL_S = 0.05  # however short a lease a source claims to give


class PullerState(enum.Enum):
    """Of one transfer. Memory is taken late: only when there is something to pull.

    Intended     pair ready     first manifest    Reserved     all is pulled
    ───────► WAITING ────► ATTACHED ────► QUEUED ────► PULLING ────► Complete
                              └─ of a prefix: reserved before ─►┘
                │              │             │            │
                └──────────────┴─────────────┴────────────┤ given up: Failed at once,
                                                          │ or silence if it was cancelled
                         copies in flight ┌───────────────┤
                                          ▼               │ none in flight
                                       ENDING ────────────┴───► DropReservation, if reserved
                                              last one ended
    """

    WAITING = "waiting"  # the pair is not ready; no Attach was sent
    ATTACHED = "attached"  # the source computes; no manifest yet
    QUEUED = "queued"  # there is something to pull and nowhere to put it
    PULLING = "pulling"  # reserved; chunks are copied as they are announced
    ENDING = "ending"  # given up, but copies in flight still write to the reservation


@dataclass(slots=True)
class PullerTransfer:
    """Its manifests come in order, gap-free, and are of the prompt that the puller knows.

    `expires_s` is on the monotonic clock, as all times here.
    """

    intent: Intended
    state: PullerState
    expires_s: float  # inf when ending: the fence lasts as long as the copies
    next_seq: int = 0
    next_index: int = 0  # of a block
    handoff: HandoffState | None = None  # set by the last manifest
    unpulled: list[Manifest] = field(default_factory=list)  # announced before there was memory
    reservation: Reservation | None = None
    in_flight: set[int] = field(default_factory=set)  # manifests whose pulls have not ended
    num_begun_blocks: int = 0  # their pulls are begun or over, or they are cached here
    num_pulled_blocks: int = 0
    is_orphaned: bool = False  # the source is lost, but all that is needed was under way
    renewal_s: float = math.inf  # when its lease is due; inf: it has, or needs, none
    renewal_interval_s: float = 0.0

    @property
    def transfer_id(self) -> str:
        return self.intent.ticket.transfer_id

    @property
    def source(self) -> str:
        return self.intent.ticket.source_incarnation

    def start_lease(self, lease_s: float, now_s: float) -> None:
        """By a manifest, its lease has `lease_s` to run."""
        self.renewal_interval_s = max(lease_s / _RENEWALS_PER_LEASE, _MIN_INTERVAL_S)
        self.renewal_s = min(now_s + self.renewal_interval_s, self.renewal_s)

    def accept(self, manifest: Manifest) -> bool:
        """Take in the next manifest; False for a double of an earlier one, which changes nothing.

        Raises HandoffFailed on a gap, on another prompt's blocks, or if the end does not fit.
        """
        if manifest.seq < self.next_seq:
            return False
        if self.handoff is not None:
            raise HandoffFailed(f"manifest {manifest.seq} came after the last one")
        if manifest.seq > self.next_seq:
            raise HandoffFailed(f"manifest {manifest.seq} came where {self.next_seq} was due")
        first, end = self.next_index, self.next_index + len(manifest.blocks)
        expected, is_last = self.intent.num_blocks, manifest.state is not None
        if end > expected or (is_last and end < expected):
            raise HandoffFailed(f"{end} blocks were announced, but the prompt has {expected}")
        if manifest.blocks.hashes != b"".join(self.intent.block_hashes[first:end]):
            raise HandoffFailed(f"blocks {first} to {end} hold another prompt's KV")
        self.next_seq += 1
        self.next_index = end
        self.handoff = manifest.state
        return True

    def ledger(self, now_s: float) -> dict[str, object]:
        """JSON-able."""
        return {
            "state": self.state.value,
            "key": self.intent.key,
            "source": self.source,
            "is_reserved": self.reservation is not None,
            "num_pulls_in_flight": len(self.in_flight),
            "expires_in_s": None if self.expires_s == math.inf else self.expires_s - now_s,
        }

    def expiry(self, now_s: float) -> BatonError:
        """What it fails with when `expires_s` has come."""
        if now_s >= self.intent.deadline_s:
            return DeadlineExceeded("the deadline passed before the KV was here")
        return NodeLost("no link to the source came up in time")


class ReserveQueue:
    """Transfers that have something to pull and nowhere to put it; fair between callers, and of one
    caller a FIFO.

    join ──► [ head, ..., tail ]      only the head requests; refused, it does again after retry()
               │   └── next_request() ──► Reserve ──► answered()
               └──► apart, a FIFO of those that lack a slot for their adapter: its first requests
                    before the head

    A head that lacked memory is passed by nobody: a large prompt does not starve behind small ones.
    Those apart are passed by all that need no slot.
    """

    def __init__(self) -> None:
        self._waiting: FairQueue[str] = FairQueue()
        self._apart: dict[str, None] = {}
        self._need_slots: set[str] = set()
        self._requested: str | None = None  # its answer will come
        self._refused: str | None = None  # who lacked memory, until retry()
        self._may_have_slot = False  # the first of those apart

    def join(
        self, transfer_id: str, caller_id: int, num_blocks: int, *, needs_slot: bool = False
    ) -> None:
        self._waiting.add(transfer_id, caller_id, num_blocks)
        if needs_slot:
            self._need_slots.add(transfer_id)

    def leave(self, transfer_id: str) -> None:
        """Give up waiting. A request that is out is still answered. Unknown ones are no error."""
        if transfer_id in self._waiting:
            self._waiting.remove(transfer_id)
        self._apart.pop(transfer_id, None)
        self._need_slots.discard(transfer_id)

    def next_request(self) -> str | None:
        """The transfer that shall request memory now, if one shall; counts as requested."""
        if self._requested is not None or self._must_wait_for_memory:
            return None
        self._requested = self._next()
        return self._requested

    def _next(self) -> str | None:
        if self._apart and self._may_have_slot:
            return next(iter(self._apart))
        while (head := self._waiting.head) in self._need_slots and self._apart:
            self._apart[self._waiting.pop()] = None
        self._waiting.pin_head()
        return head

    @property
    def _must_wait_for_memory(self) -> bool:
        refused = self._refused
        return refused is not None and (refused in self._waiting or refused in self._apart)

    def answered(self, transfer_id: str, *, was_granted: bool, lacks_slot: bool = False) -> None:
        assert transfer_id == self._requested, "an answer to a request that was not sent"
        self._requested = None
        is_head = transfer_id == self._waiting.head  # unless it has left meanwhile, or was apart
        if (was_granted or lacks_slot) and is_head:
            self._waiting.pop()
        if was_granted:
            self.leave(transfer_id)
        elif not lacks_slot:
            self._refused = transfer_id
        else:
            self._may_have_slot = False
            if is_head:
                self._apart[transfer_id] = None

    def retry(self) -> None:
        """Memory, or a slot, may have become free: who was refused may request again."""
        self._refused = None
        self._may_have_slot = True

    def __len__(self) -> int:
        return len(self._waiting) + len(self._apart)
