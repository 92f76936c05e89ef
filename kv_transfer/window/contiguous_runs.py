"""Blocks that lie side by side at both ends of a copy, as one piece: pure arithmetic.

source       7  8  9  4  5           runs (7 -> 2, 3 blocks), (4 -> 5, 1), (5 -> 9, 1)
destination  2  3  4  5  9
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .block_pairs import Ids


@dataclass(frozen=True, slots=True)
class Runs:
    """Parallel arrays: `lengths[i]` blocks from `sources[i]` on go to `destinations[i]` on."""

    sources: Ids
    destinations: Ids
    lengths: Ids


def find_runs(ids: Ids) -> Runs:
    """The fewest pieces that the copy [2, pairs] consists of, in its order."""
    is_break = (np.diff(ids, axis=1) != 1).any(axis=0)
    starts = np.flatnonzero(np.concatenate(([True], is_break)))
    lengths = np.diff(np.append(starts, ids.shape[1]))
    return Runs(ids[0, starts], ids[1, starts], lengths)
