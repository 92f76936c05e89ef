"""How many messages each rank has taken: a shared page that ranks write and rank 0 watches.

    uint64 of rank 1 | uint64 of rank 2 | ...

A rank that stands still while there is something to take is hung; looking costs no message a step.
"""

from __future__ import annotations

import mmap
import os

_WORD_BYTES = 8


class RankProgress:
    """The page; `rank` counts from 1. `fd` may be passed to the other ranks."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        """Map `fd`, which becomes this object's."""
        self.fd = fd
        self._memory = mmap.mmap(fd, num_ranks * _WORD_BYTES)
        # An aligned 8-byte store is never seen half done.
        self._counts = memoryview(self._memory).cast("Q")

    @classmethod
    def create(cls, num_ranks: int) -> RankProgress:
        fd = os.memfd_create("baton-ranks", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_ranks * _WORD_BYTES)
        return cls(fd, num_ranks)

    def add(self, rank: int) -> None:
        """One more message was taken by `rank`, which is the only one that says so."""
        self._counts[rank - 1] += 1

    def read(self, rank: int) -> int:
        return self._counts[rank - 1]

    def close(self) -> None:
        self._counts.release()
        self._memory.close()
        os.close(self.fd)
