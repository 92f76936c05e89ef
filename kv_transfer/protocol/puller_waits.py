"""What a puller's transfers wait for: their turn to get memory, and the renewal of their leases.

Keeps order and time; sends nothing.
"""

from __future__ import annotations

from ...core.fair_queue import FairQueue

_RENEWALS_PER_LEASE = 3  # two may thus be late before a lease runs out
_MIN_INTERVAL_S = 0.05  # however short a lease a source claims to give


class ReserveQueue:
    """Transfers that have something to pull and nowhere to put it; fair between callers, and of one
    caller a FIFO.

    join ──► [ head, ..., tail ]      only the head requests; refused, it does again after retry()
               └── next_request() ──► Reserve ──► answered(was_granted)

    The head that has requested is passed by nobody: a large prompt does not starve behind small
    ones.
    """

    def __init__(self) -> None:
        self._waiting: FairQueue[str] = FairQueue()
        self._requested: str | None = None  # its answer will come
        self._refused: str | None = None  # the head, if the last answer was "not now"

    def join(self, transfer_id: str, caller_id: int, num_blocks: int) -> None:
        self._waiting.add(transfer_id, caller_id, num_blocks)

    def leave(self, transfer_id: str) -> None:
        """Give up waiting. A request that is out is still answered. Unknown ones are no error."""
        if transfer_id in self._waiting:
            self._waiting.remove(transfer_id)

    def next_request(self) -> str | None:
        """The transfer that shall request memory now, if one shall; counts as requested."""
        head = self._waiting.head
        if head is None or self._requested is not None or head == self._refused:
            return None
        self._waiting.pin_head()
        self._requested = head
        return head

    def answered(self, transfer_id: str, *, was_granted: bool) -> None:
        assert transfer_id == self._requested, "an answer to a request that was not sent"
        self._requested = None
        if was_granted and transfer_id == self._waiting.head:  # unless it has left meanwhile
            self._waiting.pop()
        self._refused = None if was_granted else transfer_id

    def retry(self) -> None:
        """Memory may have become free: the refused head may request again."""
        self._refused = None

    def __len__(self) -> int:
        return len(self._waiting)


class Renewals:
    """The leases this puller holds: those at one source are renewed in one message."""

    def __init__(self) -> None:
        self._leases_s: dict[str, dict[str, float]] = {}  # source -> transfer -> lease length
        self._due_s: dict[str, float] = {}  # source -> when its next renewal is due

    def start(self, source: str, transfer_id: str, lease_s: float, now_s: float) -> None:
        """By a manifest, the transfer's lease has `lease_s` to run."""
        self._leases_s.setdefault(source, {})[transfer_id] = lease_s
        due_s = now_s + self._interval_s(source)
        self._due_s[source] = min(due_s, self._due_s.get(source, due_s))

    def stop(self, source: str, transfer_id: str) -> None:
        """The transfer needs its lease no more. Unknown ones are no error."""
        leases_s = self._leases_s.get(source, {})
        leases_s.pop(transfer_id, None)
        if not leases_s:
            self._leases_s.pop(source, None)
            self._due_s.pop(source, None)

    def take_due(self, now_s: float) -> list[tuple[str, tuple[str, ...]]]:
        """(source, all transfers leased there) for each source that is due; re-arms them."""
        due = [source for source, due_s in self._due_s.items() if due_s <= now_s]
        for source in due:
            self._due_s[source] = now_s + self._interval_s(source)
        return [(source, tuple(self._leases_s[source])) for source in due]

    def next_deadline(self) -> float | None:
        return min(self._due_s.values(), default=None)

    def _interval_s(self, source: str) -> float:
        shortest_s = min(self._leases_s[source].values())
        return max(shortest_s / _RENEWALS_PER_LEASE, _MIN_INTERVAL_S)
