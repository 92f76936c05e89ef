"""A step's keys in shares of about equal length: one for each program of a decode's attention.

Equal over the whole step, not per sequence: else one long sequence among short ones would keep a
few programs busy while all others are done. How many there can be depends on the number of
sequences alone, so a CUDA graph of so many can replay any step; the shares themselves it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_KEYS = 64
_PROGRAMS_WANTED = 1320  # twice what an H200 holds at once: uneven shares even out
# Those of 8 bits are bound by what they compute, too: they are to fill rounds of all that it holds.
_RESIDENT_8BIT = 8 * 132
_ROUNDS_8BIT = 3
_SHORT = 4 * TILE_KEYS  # still shorter shares take longer to join than rounds to fill
_JOINED_AT_ONCE = 4  # of many heads

Int32s = NDArray[Any]


def max_shares(num_seqs: int, kv_heads: int, *, is_8bit: bool) -> int:
    """Of any step with so many sequences."""
    wanted = -(-(_RESIDENT_8BIT if is_8bit else _PROGRAMS_WANTED) // kv_heads)
    return max(num_seqs + wanted, _ROUNDS_8BIT * wanted if is_8bit else 0)


def divide(
    seq_lens: Sequence[int] | Int32s, kv_heads: int, *, is_8bit: bool
) -> tuple[Int32s, Int32s]:
    """Divide the keys of a step: (shares [shares, 4]: place, sequence, first key, end; indptr
    [seqs + 1]).

    Sequence i's shares have the places from indptr[i] to indptr[i + 1]. They are whole tiles but
    for a sequence's last, those of a sequence equal within a tile, and at most `max_shares` in
    number. The longest come first: programs begin in this order, and so all end at about the same
    time; the last ones are short if that needs no more shares than a step may have.
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
    sizes = -(-lens // counts // TILE_KEYS) * TILE_KEYS  # rounding up may leave a share over
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
    """Divide the sequences with the shortest shares once more, in place, into `room` more shares at
    most. What is joined in one go stays so, and shares of very different lengths stay as they are:
    the last are short."""
    if 2 * sizes.min() <= sizes.max():
        return
    pieces = np.minimum(lens // _SHORT, _JOINED_AT_ONCE)
    cut = np.flatnonzero(pieces >= 2 * counts)
    cut = cut[np.argsort(sizes[cut], kind="stable")]
    cut = cut[np.cumsum(pieces[cut] - counts[cut]) <= room]
    sizes[cut] = -(-lens[cut] // pieces[cut] // TILE_KEYS) * TILE_KEYS
    counts[cut] = -(-lens[cut] // sizes[cut])
