"""The kernels that pull blocks from memory at a given address, against plain indexing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.kv import kv_blocks_triton
from baton.kernels.kv.kv_blocks_triton import pull_blocks, pull_heads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_programs", [1, 3, 64])
@pytest.mark.parametrize("dim", [8, 700])
def test_pulls_blocks_to_where_they_belong(
    dim: int, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_blocks_triton, "_PULL_PROGRAMS", num_programs)
    source, target = (
        torch.randn(9, 2, 2, 1, 4, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    source_ids = torch.tensor([7, 2, 5], device=DEVICE)
    block_ids = torch.tensor([0, 8, 3], device=DEVICE)
    expected = target.clone()
    expected[block_ids] = source[source_ids]
    pull_blocks(source.data_ptr(), target, source_ids, block_ids)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("num_programs", [1, 64])
@pytest.mark.parametrize(("block_size", "dim"), [(4, 8), (1, 3), (16, 128)])
@pytest.mark.parametrize(
    ("source_heads", "source_head", "my_heads", "my_head", "num_heads"),
    [(4, 2, 2, 0, 2), (1, 0, 4, 3, 1), (8, 1, 3, 2, 1), (2, 0, 2, 0, 2), (6, 3, 5, 1, 3)],
)
def test_pulls_heads_to_where_they_belong(
    source_heads: int,
    source_head: int,
    my_heads: int,
    my_head: int,
    num_heads: int,
    block_size: int,
    dim: int,
    num_programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_blocks_triton, "_PULL_PROGRAMS", num_programs)
    source, target = (
        torch.randn(9, 3, 2, heads, block_size, dim, device=DEVICE).bfloat16()
        for heads in (source_heads, my_heads)
    )
    source_ids = torch.tensor([7, 2, 5, 2], device=DEVICE)
    block_ids = torch.tensor([0, 8, 3, 4], device=DEVICE)
    expected = target.clone()
    heads = source[source_ids, :, :, source_head : source_head + num_heads]
    expected[block_ids, :, :, my_head : my_head + num_heads] = heads
    pull_heads(
        source.data_ptr(),
        source_heads,
        source_head,
        target,
        my_head,
        num_heads,
        source_ids,
        block_ids,
    )
    assert torch.equal(target, expected)


@pytest.mark.parametrize("layers", [(5, 2, 0, 3), (2, 0, 1, 2), (1, 0, 2, 1)])
@pytest.mark.parametrize(("source_heads", "my_heads", "num_heads"), [(4, 2, 2), (2, 2, 2)])
def test_pulls_layers_to_where_they_belong(
    layers: tuple[int, int, int, int], source_heads: int, my_heads: int, num_heads: int
) -> None:
    there, first, here, count = layers
    source, target = (
        torch.randn(9, num_layers, 2, heads, 4, 8, device=DEVICE).bfloat16()
        for num_layers, heads in ((there, source_heads), (3, my_heads))
    )
    source_ids = torch.tensor([7, 2, 5, 2], device=DEVICE)
    block_ids = torch.tensor([0, 8, 3, 4], device=DEVICE)
    expected = target.clone()
    expected[block_ids, here : here + count] = source[
        source_ids, first : first + count, :, -num_heads:
    ]
    pull_heads(
        source.data_ptr(),
        source_heads,
        source_heads - num_heads,
        target,
        0,
        num_heads,
        source_ids,
        block_ids,
        layers=layers,
    )
    assert torch.equal(target, expected)
