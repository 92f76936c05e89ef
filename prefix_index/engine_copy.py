"""A gateway's copy of the prefix cache of one engine: updated by deltas, or read from its pages.

    exact at seq ──DELTA seq+1──► exact at seq+1
         │ any higher number: a delta was lost
         ▼
      inexact ──the engine's pages, read and installed──► exact at their number

An inexact copy is still updated by deltas: it is a good hint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.request.token_ids import BlockHash
from .messages import Delta, Head, Message
from .pages import PAGE_BLOCKS, Contents

READ_S = 0.5  # pages are read at most so often


@dataclass(slots=True)
class EngineCopy:
    """`max_hashes`: the most that the engine can have; `in_host`: the `hashes` that are in host
    memory only. `seq` is None while the copy is inexact."""

    max_hashes: int
    received_s: float
    seq: int | None = 0
    hashes: set[BlockHash] = field(default_factory=set)
    in_host: set[BlockHash] = field(default_factory=set)
    may_read_s: float = 0.0

    def take(self, message: Message, now_s: float) -> bool:
        """Apply a message of the engine; returns whether its pages must be read now."""
        self.received_s = now_s
        match message:
            case Head(_, seq):
                if self.seq is not None and seq > self.seq:
                    self.seq = None
            case Delta():
                self._apply(message)
        if self.seq is not None or now_s < self.may_read_s:
            return False
        self.may_read_s = now_s + READ_S
        return True

    def _apply(self, delta: Delta) -> None:
        if self.seq is not None:
            if delta.seq <= self.seq:
                return  # a duplicate
            self.seq = delta.seq if delta.seq == self.seq + 1 else None
        if self.in_host:
            self.in_host.difference_update(delta.removed, delta.stored)
        self.hashes.difference_update(delta.removed)
        self.hashes.update(delta.stored)
        if delta.in_host:
            self.hashes.difference_update(delta.in_host)  # so that both have the same object
            self.hashes.update(delta.in_host)
            self.in_host.update(delta.in_host)
        if len(self.hashes) > self.max_hashes:  # lost removals, or lies
            self.hashes.clear()
            self.in_host.clear()
            self.seq = None

    def wants(self, contents: Contents) -> bool:
        """Whether these pages are newer than the copy, and no more than the engine can have."""
        if self.seq is not None and contents.seq <= self.seq:
            return False
        num_blocks = contents.device_blocks + contents.host_blocks
        # Pages keep free places, where there were more blocks before.
        most_pages = 2 * self.max_hashes // PAGE_BLOCKS + 2
        return num_blocks <= self.max_hashes and contents.num_pages <= most_pages

    def install(
        self, contents: Contents, hashes: set[BlockHash], in_host: set[BlockHash], now_s: float
    ) -> None:
        """Replace the copy by pages that were read completely, taking over the sets. `in_host`: a
        subset of `hashes`."""
        if len(hashes) <= self.max_hashes:
            self.hashes, self.in_host, self.seq = hashes, in_host, contents.seq
            self.received_s = now_s
