"""A step's prompts in tiles of queries, and where these are few in shares of their keys.

Few tiles, as of a chat's next message behind a long context, would keep few multiprocessors busy.
How many tiles and shares there can be depends on the number of tokens alone, so a CUDA graph of so
many can replay any step; the tiles themselves it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_KEYS = 64
_PROGRAMS_WANTED = 2 * 132  # what an H200 holds at once
_LEAST_SHARE = 4 * TILE_KEYS  # keys; still shorter shares take longer to join than to compute

Int32s = NDArray[Any]


def max_shares(kv_heads: int) -> int:
    """Of the tiles of any step that divides some. Each share is a program for each of the heads."""
    return _PROGRAMS_WANTED // kv_heads


def max_tiles(num_queries: int, num_slices: int, tile_queries: int, kv_heads: int) -> int:
    """Shares of tiles of any step with so many queries, in so many slices at most."""
    return max(num_queries // tile_queries + num_slices, max_shares(kv_heads))


def max_joined(kv_heads: int) -> int:
    """Tiles of any step that have several shares."""
    return max_shares(kv_heads) // 2


def divide(
    query_lens: Sequence[int], seq_lens: Sequence[int], tile_queries: int, kv_heads: int
) -> tuple[Int32s, Int32s]:
    """Divide the queries of a step, and their keys: (tiles [tiles, 6]: slice, first query, first
    key, end, place, shares; joined [tiles, 4]: slice, first query, first place, shares).

    A query sees the keys up to its own. The `place` of a tile's share is among those of all tiles
    that have several shares, which are `joined`. The tiles of a slice that see the most keys come
    first: others would wait for them.
    """
    found = [
        (index, first, keys - length + min(first + tile_queries, length))
        for index, (length, keys) in enumerate(zip(query_lens, seq_lens, strict=True))
        for first in reversed(range(0, length, tile_queries))
    ]
    room = max_shares(kv_heads) - len(found)  # of tiles that are cut, one share is shorter
    most = max(_LEAST_SHARE, -(-sum(end for *_, end in found) // room)) if room > 0 else None
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


def _rows(numbers: list[int], width: int) -> Int32s:
    return np.array(numbers, np.int32).reshape(-1, width)
