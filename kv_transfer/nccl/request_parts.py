"""How a request for many blocks is cut into parts of few sizes: pure arithmetic.

The same at both ends, so a part of the protocol (data_wire.py has its version). The first part is
small, since the wire waits until it is gathered, and the last, since we wait until it is scattered;
in between each is at most twice the one before.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

_MOST_BYTES, _MOST_BLOCKS = 192 << 20, 1024  # at 360 GB/s 0.56 ms
_SPARE_BYTES = 2 << 20  # what the last may carry for nothing: shorter than one part more would take
_MOST_SPARE = 16  # the same, as a share of the largest
_SMALL = 4  # first and last: a share of the largest


class RequestParts:
    """For pieces of so many bytes. `sizes`: in blocks, ascending."""

    def __init__(self, piece_bytes: int) -> None:
        most = max(1, min(_MOST_BYTES // piece_bytes, _MOST_BLOCKS))
        self._spare = min(_SPARE_BYTES // piece_bytes, most // _MOST_SPARE)
        sizes = (size for power in itertools.count() for size in (2 << power, 3 << power))
        upto = [1, *itertools.takewhile(lambda size: size <= most, sizes)]
        self.sizes = upto[bisect.bisect_right(upto, self._spare + 1) - 1 :]

    def cut(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """Where each part begins, and how many blocks it has: the last may have some too many."""
        small = self.sizes[-1] // _SMALL
        begin, limit = 0, small
        while (left := num_blocks - begin) > 0:
            if left <= small:
                size = self._fitting(left)
            else:
                size = self._at_most(min(limit, max(small, left * 2 // 3)))
            yield begin, size
            begin, limit = begin + size, 2 * size

    def _fitting(self, num_blocks: int) -> int:
        """All of them, if few places are left over; else the most that fill theirs."""
        index = bisect.bisect_left(self.sizes, num_blocks)
        if index < len(self.sizes) and self.sizes[index] - num_blocks <= self._spare:
            return self.sizes[index]
        return self.sizes[max(0, index - 1)]

    def _at_most(self, num_blocks: int) -> int:
        return self.sizes[max(0, bisect.bisect_right(self.sizes, num_blocks) - 1)]
