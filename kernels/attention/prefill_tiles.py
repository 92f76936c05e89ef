"""A step's prompts in tiles of queries, and where these are few in shares of their keys.

Few tiles, as of a chat's next message behind a long context, would keep few multiprocessors busy.
How many tiles and shares there can be depends on the number of tokens alone, so a CUDA graph of so
many can replay any step; the tiles themselves it reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_KEYS = 64
_LEAST_SHARE = 4 * TILE_KEYS  # keys; still shorter shares take longer to join than to compute

Int32s = NDArray[Any]


def max_tiles(num_queries: int, num_slices: int, tile_queries: int, max_shares: int) -> int:
    """Shares of tiles of any step with so many queries, in so many slices at most."""
    return max(num_queries // tile_queries + num_slices, max_shares)


def max_joined(max_shares: int) -> int:
    """Tiles of any step that have several shares."""
    return max_shares // 2


def divide(
    query_lens: Sequence[int], seq_lens: Sequence[int], tile_queries: int, max_shares: int
) -> tuple[Int32s, Int32s]:
    """Divide the queries of a step, and their keys: (tiles [tiles, 6]: slice, first query, first
    key, end, place, shares; joined [tiles, 4]: slice, first query, first place, shares).

    Where tiles are divided there are at most `max_shares`: what a GPU computes at once.

    A query sees the keys up to its own. The `place` of a tile's share is among those of all tiles
    that have several shares, which are `joined`. The tiles of a slice that see the most keys come
    first: others would wait for them.
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
        count = -(-end // size)  # rounding up may leave a share over
        joined += (index, first, place, count)
        for begin in range(0, end, size):
            tiles += (index, first, begin, min(begin + size, end), place, count)
            place += 1
    return _rows(tiles, 6), _rows(joined, 4)


def _longest_share(ends: Sequence[int], max_shares: int) -> int | None:
    """The fewest keys that shares of the tiles need to have, so that there are at most so many;
    None if tiles alone are as many."""
    if len(ends) >= max_shares:
        return None
    lengths = range(_LEAST_SHARE, max(*ends, _LEAST_SHARE) + TILE_KEYS, TILE_KEYS)

    def fits(length: int) -> bool:
        return sum(-(-end // length) for end in ends) <= max_shares

    return lengths[bisect_left(lengths, True, key=fits)]


def _rows(numbers: list[int], width: int) -> Int32s:
    return np.array(numbers, np.int32).reshape(-1, width)
