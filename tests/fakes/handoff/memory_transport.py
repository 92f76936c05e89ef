"""A transport inside one process, for simulations: a pull advances only when the driver says so.

The driver decides the order of pulls and what is rewritten between any two bytes of a copy, so that
every race of real memory can be reproduced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fakes.access import access
from fakes.handoff.block_pairs import BlockPair, split

from baton.core.errors import HandoffFailed
from baton.engine.kv.generations import Generations
from baton.kv_transfer.protocol.events import OpenWindow
from baton.kv_transfer.window.block_pairs import BlockPairs
from baton.kv_transfer.window.block_pieces import BlockPiece
from baton.kv_transfer.window.network_address import RemotePool
from baton.kv_transfer.window.transport import PullOutcome, Starter


class MemoryPool:
    """Blocks of bytes and their generations."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.generations = Generations(num_blocks)
        self.num_steps: int | None = None  # as counted by the pool's owner
        self._data = bytearray(num_blocks * block_bytes)

    def block(self, block_id: int) -> memoryview:
        """The block's bytes, writable."""
        start = block_id * self.block_bytes
        return memoryview(self._data)[start : start + self.block_bytes]


class MemoryPull:
    """A pull in flight: a handle for the window's user, stepped by the driver."""

    def __init__(
        self,
        window: MemoryWindow,
        pairs: BlockPairs,
        on_done: Callable[[PullOutcome], None],
    ) -> None:
        self._window = window
        self._pairs = split(pairs)
        self._on_done = on_done
        self._num_copied_bytes = 0
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True

    @property
    def is_in_flight(self) -> bool:
        return self in self._window.pulls

    @property
    def destinations(self) -> list[int]:
        """The blocks that the pull writes to."""
        return [pair.destination for pair in self._pairs]

    def advance(self, num_bytes: int) -> None:
        """Copy up to `num_bytes`, of one block at most; reports when it ends or fails."""
        outcome = PullOutcome.CANCELLED if self._is_cancelled else self._copy(num_bytes)
        if outcome is not None:
            self._window.pulls.remove(self)
            self._on_done(outcome)

    def finish(self) -> None:
        """Advance to the end."""
        while self.is_in_flight:
            self.advance(self._window.source.block_bytes)

    def _copy(self, num_bytes: int) -> PullOutcome | None:
        source, destination = self._window.source, self._window.destination
        index, start = divmod(self._num_copied_bytes, source.block_bytes)
        if index == len(self._pairs):
            return PullOutcome.OK
        pair = self._pairs[index]
        stop = min(start + num_bytes, source.block_bytes)
        if start == 0 and self._is_stale(pair):
            return PullOutcome.STALE
        copied = source.block(pair.source.block_id)[start:stop]
        destination.block(pair.destination)[start:stop] = copied
        self._num_copied_bytes += stop - start
        if stop == source.block_bytes and self._is_stale(pair):
            return PullOutcome.STALE
        is_last = self._num_copied_bytes == len(self._pairs) * source.block_bytes
        return PullOutcome.OK if is_last else None

    def _is_stale(self, pair: BlockPair) -> bool:
        generation = self._window.source.generations.read(pair.source.block_id)
        return generation != pair.source.generation


class MemoryWindow:
    """A view of one source's pool. `pulls`: the pulls in flight, for the driver."""

    transport = "memory"
    gbytes_per_s = 1.0

    def __init__(self, source: MemoryPool, destination: MemoryPool) -> None:
        self.source = source
        self.destination = destination
        self.pulls: list[MemoryPull] = []
        self.is_closed = False

    @property
    def num_steps(self) -> int | None:
        return self.source.num_steps

    @property
    def destinations(self) -> list[int]:
        """The blocks that pulls in flight write to."""
        return [block_id for pull in self.pulls for block_id in pull.destinations]

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> MemoryPull:
        assert not self.is_closed, "a pull through a closed window"
        pull = MemoryPull(self, pairs, on_done)
        self.pulls.append(pull)
        return pull

    def prepare(self, pairs: BlockPairs) -> Starter:
        return partial(self.start_pull, pairs)

    def close(self) -> None:
        self.is_closed = True


class MemoryTransport:
    """Connects to the pools in `sources`, by incarnation."""

    name = "memory"

    def __init__(self, pool: MemoryPool, sources: Mapping[str, MemoryPool]) -> None:
        self._pool = pool
        self._sources = sources

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> MemoryWindow:
        """Supports whole blocks only. Raises HandoffFailed."""
        assert piece is None or piece.is_whole
        pool = self._sources.get(source.name)
        if pool is None:
            raise HandoffFailed(f"no pool of {source.name} in this process")
        return MemoryWindow(pool, self._pool)

    def open(self, source: OpenWindow) -> MemoryWindow:
        """Open a window as an engine does."""
        return self.connect(access(source.incarnation))
