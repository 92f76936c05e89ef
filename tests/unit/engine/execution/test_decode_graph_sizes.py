"""The batch sizes for which decode graphs are captured and kernels are loaded."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.engine.execution.gpu.cuda_graphs import decode_sizes, load_products, rows_with_kernels


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 64, 100, 256, 257, 1000])
def test_every_batch_has_a_graph_without_much_padding(max_num_seqs: int) -> None:
    sizes = decode_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for batch in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch < 8 or size <= 1.25 * batch


@pytest.mark.parametrize("most", [1, 7, 8, 9, 512, 1000, 1024, 1025, 1056, 8192, 60_000])
def test_every_eight_rows_have_their_kernels_loaded(most: int) -> None:
    rows = rows_with_kernels(most)
    assert rows == sorted(set(rows)) and rows[0] == 1 and rows[-1] == min(most, 8192)
    for num_rows in range(1, min(most, 1024) + 1):
        last = min(-(-num_rows // 8) * 8, most)
        assert {max(1, -(-num_rows // 8) * 8 - 7), last} <= set(rows)
    assert all(b - a <= 64 for a, b in itertools.pairwise(rows))


def test_kernels_are_loaded_in_the_memory_of_the_most_rows() -> None:
    seen: list[int] = []

    def product(x: torch.Tensor) -> None:
        seen.append(len(x))
        if len(x) > 40:
            raise torch.OutOfMemoryError

    load_products([(3, product)], 64, torch.empty(0))
    assert seen == rows_with_kernels(64)[::-1]
