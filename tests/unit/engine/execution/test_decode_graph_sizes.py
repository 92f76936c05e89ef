"""The batch sizes that decode graphs are captured for."""

from __future__ import annotations

import pytest

from baton.engine.execution.cuda_graphs import decode_sizes


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 64, 100, 256, 257, 1000])
def test_every_batch_has_a_graph_without_much_padding(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for batch in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch < 8 or size <= 1.25 * batch
