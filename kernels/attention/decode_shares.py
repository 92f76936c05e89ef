"""Divides a step's keys into shares of about equal length, one for each decode attention program.

Shares are equal over the whole step, not per sequence: otherwise one long sequence among short ones
would keep a few programs busy while all others are done. The maximum number of shares depends on
the number of sequences alone, so a CUDA graph for that number can replay any step; it reads the
shares from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_KEYS = 64
_PROGRAMS_WANTED = 1320  # twice the resident programs of an H200: uneven shares even out
# Programs over an 8-bit pool are also bound by arithmetic: they should fill whole waves of the GPU.
_RESIDENT_8BIT = 8 * 132
_ROUNDS_8BIT = 3
_SHORT = 4 * TILE_KEYS  # joining shorter shares costs more than full waves save
_JOINED_AT_ONCE = 4  # shares, if there are many heads

Int32s = NDArray[Any]


def max_shares(num_seqs: int, kv_heads: int, *, is_8bit: bool) -> int:
    """The maximum number of shares of any step with `num_seqs` sequences."""
    wanted = -(-(_RESIDENT_8BIT if is_8bit else _PROGRAMS_WANTED) // kv_heads)
    return max(num_seqs + wanted, _ROUNDS_8BIT * wanted if is_8bit else 0)


def divide(
    seq_lens: Sequence[int] | Int32s, kv_heads: int, *, is_8bit: bool
) -> tuple[Int32s, Int32s]:
    """Divide the keys of a step: (shares [shares, 4]: place, sequence, first key, end; indptr
    [seqs + 1]).

    Sequence i's shares have the places from indptr[i] to indptr[i + 1]. A share is whole tiles
    except the last of a sequence; shares of a sequence have equal lengths within a tile; there are
    at most `max_shares`. The longest come first: programs begin in this order, so that all end at
    about the same time. The last shares are short if `max_shares` allows.
    """
    if not len(seq_lens):
        return np.empty((0, 4), np.int32), np.zeros(1, np.int32)
    lens = np.asarray(seq_lens, np.int64)
    total = int(lens.sum())
    most = -(-total // (max_shares(len(lens), kv_heads, is_8bit=is_8bit) - len(lens)))
    if is_8bit:
        most = max(most, min(_SHORT, -(-total * kv_heads // _RESIDENT_8BIT)))
    most = max(TILE_KEYS, most)
    counts = -(-lens // most)
    sizes = -(-lens // counts // TILE_KEYS) * TILE_KEYS  # rounding up may save a share
    counts = -(-lens // sizes)
    room = max_shares(len(lens), kv_heads, is_8bit=is_8bit) - int(counts.sum())
    _cut_last(lens, counts, sizes, room)
    indptr = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(counts, out=indptr[1:])
    shares = np.empty((int(indptr[-1]), 4), np.int32)
    place = shares[:, 0] = np.arange(len(shares))
    sequence = shares[:, 1] = np.repeat(np.arange(len(lens)), counts)
    first = shares[:, 2] = (place - indptr[sequence]) * sizes[sequence]
    end = shares[:, 3] = np.minimum(first + sizes[sequence], lens[sequence])
    return shares[np.argsort(first - end, kind="stable")], indptr


def _cut_last(lens: NDArray[Any], counts: NDArray[Any], sizes: NDArray[Any], room: int) -> None:
    """Divide the sequences with the shortest shares again, in place, into at most `room` more
    shares in total, and at most _JOINED_AT_ONCE for each sequence. If share lengths differ by a
    factor of 2 or more, the last ones are short already and nothing changes."""
    if 2 * sizes.min() <= sizes.max():
        return
    pieces = np.minimum(lens // _SHORT, _JOINED_AT_ONCE)
    cut = np.flatnonzero(pieces >= 2 * counts)
    cut = cut[np.argsort(sizes[cut], kind="stable")]
    cut = cut[np.cumsum(pieces[cut] - counts[cut]) <= room]
    sizes[cut] = -(-lens[cut] // pieces[cut] // TILE_KEYS) * TILE_KEYS
    counts[cut] = -(-lens[cut] // sizes[cut])
