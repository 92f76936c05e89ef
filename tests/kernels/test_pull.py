"""The kernel that pulls blocks out of memory known by its address, against the torch reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from baton.kernels.kv_blocks import gather_blocks, scatter_blocks
from baton.kernels.kv_blocks_triton import pull_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_programs", [1, 3, 64])
@pytest.mark.parametrize("dim", [8, 700])
def test_pulls_blocks_to_where_they_belong(dim: int, num_programs: int) -> None:
    source, target = (
        torch.randn(9, 2, 2, 1, 4, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
    )
    source_ids = torch.tensor([7, 2, 5], device=DEVICE)
    block_ids = torch.tensor([0, 8, 3], device=DEVICE)
    expected = target.clone()
    scatter_blocks(expected, block_ids, gather_blocks(source, source_ids))
    pull_blocks(source.data_ptr(), target, source_ids, block_ids, num_programs)
    assert torch.equal(target, expected)
