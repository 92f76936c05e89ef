"""Which requests this engine holds, for whom, and until when. Knows no block and no tensor.

An entry opens with a dispatch and closes with the request's end here, whichever it is. A closed key
leaves a tombstone for 30 s, and so does a cancel that came first: a dispatch that arrives late is
refused instead of running for nobody.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from ...core.errors import Cancelled, InvalidRequest
from ...core.ports import Clock
from ...core.request.request import Request, Ticket
from ...core.request.timeline import NodeStamp

TOMBSTONE_S = 30.0


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """What a hand-off really moved."""

    num_bytes: int
    cached_tokens: int
    transport: str


@dataclass(slots=True, eq=False)
class Entry:
    """One request on this engine. The lower half waits for the next output to carry it."""

    request: Request
    gateway: str
    deadline_s: float  # monotonic
    ticket: Ticket | None
    accepted_ns: int = 0  # monotonic
    stamps: list[NodeStamp] = field(default_factory=list)
    cached_tokens: int | None = None
    transfer: TransferSummary | None = None

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits for the next output."""
        return not self.stamps and self.cached_tokens is None and self.transfer is None


class RequestTable:
    """Belongs to the engine loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._deadlines: list[tuple[float, str]] = []  # heap; keys of closed entries are skipped
        self._tombstones: dict[str, float] = {}  # key -> when it may be forgotten
        self._burials: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, entry: Entry) -> None:
        """File a new request. Raises Cancelled behind a tombstone, InvalidRequest on a double."""
        if entry.key in self._entries:
            raise InvalidRequest(f"request {entry.key} was dispatched twice")
        if entry.key in self._tombstones:
            raise Cancelled(f"request {entry.key} is already over here")
        self._entries[entry.key] = entry
        heapq.heappush(self._deadlines, (entry.deadline_s, entry.key))

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def close(self, key: str) -> Entry | None:
        """End a request and bury its key; a key that never came is buried as well."""
        if key not in self._tombstones:
            self._burials.append(key)
            self._tombstones[key] = self._clock.monotonic_s() + TOMBSTONE_S
        return self._entries.pop(key, None)

    def keys(self) -> list[str]:
        return list(self._entries)

    def keys_of_gateway(self, gateway: str) -> list[str]:
        return [key for key, entry in self._entries.items() if entry.gateway == gateway]

    def overdue(self) -> list[str]:
        """Keys whose deadline has passed; forgets old tombstones in passing."""
        now = self._clock.monotonic_s()
        while self._burials and self._tombstones[self._burials[0]] <= now:
            del self._tombstones[self._burials.popleft()]
        keys = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            if key in self._entries:
                keys.append(key)
        return keys

    def next_deadline_s(self) -> float | None:
        """When `overdue` has something to say next, on the monotonic clock."""
        while self._deadlines and self._deadlines[0][1] not in self._entries:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
