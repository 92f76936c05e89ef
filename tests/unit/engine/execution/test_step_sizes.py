"""The number of sequences that may run at once, by the size of the pool."""

from __future__ import annotations

import pytest

from baton.engine.execution.step_sizes import seqs_for_pool
from baton.engine.kv.limits import MAX_NUM_SEQS


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "expected"),
    [
        (2, 16, 16),  # an empty pool
        (2 + 64, 16, 16),
        (2 + 80, 16, 20),
        (2 + 80, 32, 40),
        (2 + 1_500, 16, 375),
        (10_000, 16, 512),
        (None, 16, 512),
    ],
)
def test_seqs_follow_the_pool(num_blocks: int | None, block_size: int, expected: int) -> None:
    assert seqs_for_pool(num_blocks, block_size) == expected


def test_what_is_prepared_before_the_pool_is_known_is_enough_for_any() -> None:
    assert seqs_for_pool(None, 16) == MAX_NUM_SEQS
    assert all(seqs_for_pool(2**n, 16) <= MAX_NUM_SEQS for n in range(1, 30))
