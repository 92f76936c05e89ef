"""When a puller renews its leases: all of one source in one message, three times a lease.

Two renewals may thus be late before a lease runs out. Keeps time, sends nothing.
"""

from __future__ import annotations

_RENEWALS_PER_LEASE = 3
_MIN_INTERVAL_S = 0.05  # however short a lease a source claims to give


class Renewals:
    """The leases this puller holds, by source."""

    def __init__(self) -> None:
        self._leases_s: dict[str, dict[str, float]] = {}  # source -> transfer -> lease length
        self._due_s: dict[str, float] = {}  # source -> when its next renewal is due

    def start(self, source: str, transfer_id: str, lease_s: float, now_s: float) -> None:
        """A manifest said that the transfer's lease has `lease_s` to run."""
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
