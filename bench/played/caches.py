"""Prefix caches of simulated engines: events for gateways, prefixes fetched from other engines, and
copies to host memory, which take as long as their bytes at a fixed rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from baton.core.ports import Clock
from baton.core.request.token_ids import BlockHash, Tier
from baton.engine.kv.host_copies import Direction
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.messages import NetChanges, encode
from baton.prefix_index.publisher import BATCH_S

TOKEN_BYTES = 131_072  # KV bytes per token of an 8B model
LINK_GBYTES_PER_S = 100.0  # between any two engines
HOST_BYTES_PER_S = 50e9  # in each direction


class PublishedCache:
    """A `CacheObserver` with its journal; `take_messages` returns the messages to publish."""

    def __init__(self, incarnation: str) -> None:
        self.publish_s: float | None = None  # when the pending changes are due
        self._journal = CacheJournal(incarnation)
        self._changes = NetChanges()

    def moved(self, block_hashes: Collection[BlockHash], was: Tier, now: Tier) -> None:
        self._changes.moved(block_hashes, was, now)

    def due_s(self, now_s: float) -> float | None:
        """The time to publish new changes; None if there are none or a publication is already
        scheduled."""
        if self.publish_s is not None or not self._changes:
            return None
        self.publish_s = now_s + BATCH_S
        return self.publish_s

    def take_messages(self) -> list[bytes]:
        self.publish_s = None
        removed, in_host, stored = self._changes.take()
        self._journal.record(removed, stored, in_host)
        return [encode(delta) for delta in self._journal.take()]

    def head(self) -> bytes:
        return encode(self._journal.head())


class PlayedCopy:
    """A copy that ends at a fixed time."""

    def __init__(self, clock: Clock, end_s: float, took_s: float) -> None:
        self.end_s = end_s
        self._clock = clock
        self._took_s = took_s

    def seconds(self) -> float | None:
        return self._took_s if self._clock.monotonic_s() >= self.end_s else None


class PlayedCopier:
    """A `HostCopier` with one copy at a time in each direction."""

    def __init__(self, clock: Clock, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._clock = clock
        self._lanes: dict[Direction, deque[PlayedCopy]] = {each: deque() for each in Direction}

    def begin(self) -> None: ...

    def start(
        self, direction: Direction, block_ids: Sequence[int], host_blocks: Sequence[int]
    ) -> PlayedCopy:
        lane, now_s = self._lanes[direction], self._clock.monotonic_s()
        took_s = len(block_ids) * self.block_bytes / HOST_BYTES_PER_S
        begin_s = max(now_s, lane[-1].end_s) if lane else now_s
        lane.append(PlayedCopy(self._clock, begin_s + took_s, took_s))
        return lane[-1]

    def next_end_s(self, now_s: float) -> float | None:
        """When the next unfinished copy ends; None if there is none."""
        for lane in self._lanes.values():
            while lane and lane[0].end_s <= now_s:
                lane.popleft()
        return min((lane[0].end_s for lane in self._lanes.values() if lane), default=None)
