"""The most KV blocks that sequences will hold at once, by how far each is expected to grow.

After "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al. 2025, LightLLM):
every step adds one slot to each sequence, and a sequence that ends frees all of its blocks.

      blocks │        ╱|             sequences sorted by what they may still grow, longest first:
             │      ╱  |    ╱|       the sum peaks just before one of them ends, so
             │    ╱    |  ╱  |       peak = max over i of blocks of 0..i, each grown by growth[i]
             └─────────┴─────┴── t

Knows no request and no pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

_BY_END = attrgetter("is_held", "num_growth_tokens")


class Footprint(NamedTuple):
    """The slots of one sequence, now and later; a tuple, since many are made at once.

    It has `num_tokens` slots now and gets `num_growth_tokens` more before it ends; `block_ids` are
    those of its blocks that are allocated already, possibly shared with other sequences. A held
    sequence does not grow and outlives all others.
    """

    num_tokens: int
    num_growth_tokens: int
    block_ids: Sequence[int]
    is_held: bool = False


def peak_blocks(footprints: Iterable[Footprint], block_size: int, *, is_bound: bool = False) -> int:
    """The most blocks held at once if every sequence grows one slot a step and then ends.

    Exact in whole blocks; a shared block counts once, until the last of its sequences ends.
    O(n log n) in sequences, O(1) a block. `is_bound`: an upper bound, for which shared blocks count
    for each sequence and block ids are not read.
    """
    ordered = sorted(footprints, key=_BY_END, reverse=True)
    seen: set[int] = set()
    num_fixed = 0  # whole blocks of the first i sequences, each shared one counted once
    num_growing = 0
    tails = [0] * block_size  # how many that grow have k tokens in their last block
    peak = 0
    for footprint in ordered:
        if not is_bound:
            num_seen = len(seen)
            seen.update(footprint.block_ids)
            num_fixed -= len(footprint.block_ids) - (len(seen) - num_seen)
        num_full, tail = divmod(footprint.num_tokens, block_size)
        num_fixed += num_full
        if footprint.is_held:
            num_fixed += tail > 0
            peak = max(peak, num_fixed)
            continue
        num_growing += 1
        tails[tail] += 1
        # All that grow have now grown by `growth`: a tail of k tokens becomes k + part, which
        # takes no block if that is 0, two if it is over block_size, and one otherwise.
        whole, part = divmod(footprint.num_growth_tokens, block_size)
        num_last = (
            num_growing - (tails[0] if part == 0 else 0) + sum(tails[block_size - part + 1 :])
        )
        peak = max(peak, num_fixed + num_growing * whole + num_last)
    return peak
