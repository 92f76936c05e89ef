"""Divides a step's prompts into tiles of queries, and few tiles into shares of their keys.

Few tiles, as for a chat's next message after a long context, would keep few multiprocessors busy.
The maximum number of tiles and shares depends on the number of tokens alone, so a CUDA graph for
that number can replay any step; it reads the tiles from memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_KEYS = 64
_LEAST_SHARE = 4 * TILE_KEYS  # keys; shorter shares take longer to join than to compute

Int32s = NDArray[Any]


def max_tiles(num_queries: int, num_slices: int, tile_queries: int, max_shares: int) -> int:
    """The maximum number of tiles, counting shares, of any step with `num_queries` queries in at
    most `num_slices` slices."""
    return max(num_queries // tile_queries + num_slices, max_shares)


def max_joined(max_shares: int) -> int:
    """The maximum number of tiles with several shares in any step."""
    return max_shares // 2


def divide(
    query_lens: Sequence[int], seq_lens: Sequence[int], tile_queries: int, max_shares: int
) -> tuple[Int32s, Int32s]:
    """Divide the queries of a step, and their keys: (tiles [tiles, 6]: slice, first query, first
    key, end, place, shares; joined [tiles, 4]: slice, first query, first place, shares).

    If tiles are divided there are at most `max_shares` shares: what a GPU runs at once.

    A query sees the keys up to its own. `place` is a share's index among the shares of all tiles
    that have several; those tiles are in `joined`. Within a slice the tiles that see the most keys
    come first, so that they do not finish last.
    """
    found = [
        (index, first, keys - length + min(first + tile_queries, length))
        for index, (length, keys) in enumerate(zip(query_lens, seq_lens, strict=True))
        for first in reversed(range(0, length, tile_queries))
    ]
    most = _longest_share([end for *_, end in found], max_shares)
    tiles, joined, place = list[int](), list[int](), 0
    for index, first, end in found:
        if most is None or end <= most:
            tiles += (index, first, 0, end, 0, 1)
            continue
        size = -(-end // -(-end // most) // TILE_KEYS) * TILE_KEYS
        count = -(-end // size)  # rounding up may save a share
        joined += (index, first, place, count)
        for begin in range(0, end, size):
            tiles += (index, first, begin, min(begin + size, end), place, count)
            place += 1
    return _rows(tiles, 6), _rows(joined, 4)


def _longest_share(ends: Sequence[int], max_shares: int) -> int | None:
    """The least share length in keys at which all tiles together have at most `max_shares` shares;
    None if there are already `max_shares` tiles."""
    if len(ends) >= max_shares:
        return None
    lengths = range(_LEAST_SHARE, max(*ends, _LEAST_SHARE) + TILE_KEYS, TILE_KEYS)

    def fits(length: int) -> bool:
        return sum(-(-end // length) for end in ends) <= max_shares

    return lengths[bisect_left(lengths, True, key=fits)]


def _rows(numbers: list[int], width: int) -> Int32s:
    return np.array(numbers, np.int32).reshape(-1, width)
