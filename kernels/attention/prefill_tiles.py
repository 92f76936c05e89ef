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
    lens, seqs = np.asarray(query_lens, np.int64), np.asarray(seq_lens, np.int64)
    counts = -(-lens // tile_queries)
    of = np.repeat(np.arange(len(lens)), counts)
    first = (np.cumsum(counts)[of] - 1 - np.arange(len(of))) * tile_queries
    ends = seqs[of] - lens[of] + np.minimum(first + tile_queries, lens[of])
    shares, sizes = np.ones_like(ends), ends
    room = max_shares(kv_heads) - len(of)  # of tiles that are cut, one share is shorter
    if room > 0:
        most = max(_LEAST_SHARE, -(-int(ends.sum()) // room))
        shares = -(-ends // most)
        sizes = -(-ends // shares // TILE_KEYS) * TILE_KEYS  # rounding up may leave a share over
        shares = -(-ends // sizes)
    tile = np.repeat(np.arange(len(of)), shares)
    number = np.arange(len(tile)) - (np.cumsum(shares) - shares)[tile]
    is_split = shares > 1
    places = np.cumsum(shares * is_split) - shares * is_split
    begin = number * sizes[tile]
    end = np.minimum(begin + sizes[tile], ends[tile])
    columns = (of[tile], first[tile], begin, end, places[tile] + number, shares[tile])
    tiles = np.stack(columns, axis=1, dtype=np.int32, casting="same_kind")
    joined = np.stack((of, first, places, shares), axis=1, dtype=np.int32, casting="same_kind")
    return tiles, joined[is_split]
