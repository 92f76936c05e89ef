"""Checks that the reference counts of an engine's blocks equal the references of their owners."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from baton.engine.engine import Engine
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, BlockPool


def check_integrity(engine: Engine) -> None:
    """Raise AssertionError if a reference has no owner: request, reservation or fence."""
    owners: Counter[int] = Counter()
    for sequence in engine.by_key.values():
        owners.update(sequence.block_ids)
    for fence in engine.pool.open_fences:
        owners.update(fence.block_ids)
    check_pool(engine.pool, owners)


def check_pool(pool: BlockPool, owners: Mapping[int, int]) -> None:
    """Compare with `owners`: the number of references by block id, as counted by their holders.

    O(num_blocks). Raises AssertionError naming the first discrepancy.
    """
    free = set(pool._free)
    assert len(free) == len(pool._free), "a block is free twice"
    for block_id, num_refs in enumerate(pool._num_refs):
        owned = owners.get(block_id, 0)
        is_free, is_cached = block_id in free, block_id in pool._cached
        is_kept = bool(pool._is_kept[block_id])
        is_reserved = block_id < NUM_RESERVED_BLOCKS
        num_states = (num_refs > 0) + is_free + is_cached + is_reserved
        fits = is_kept >= is_cached and not (is_kept and is_free)
        if num_refs == owned and num_states == 1 and fits:
            continue
        name = f"block {block_id}"
        assert num_refs == owned, f"{name}: {num_refs} references, {owned} by its owners"
        assert num_states == 1, f"{name}: in {num_states} states"
        assert is_kept or not is_cached, f"{name}: cached, but not worth keeping"
        assert not (is_kept and is_free), f"{name}: worth keeping, but free"
    strangers = sorted(b for b in owners if not 0 <= b < pool.num_blocks)
    assert not strangers, f"owners of blocks that do not exist: {strangers}"
