"""Copying KV into and out of the pool, against element-by-element loops."""

from __future__ import annotations

import random

import torch

from baton.kernels.kv.kv_blocks import block_rows, copy_blocks, store_kv

BLOCKS, LAYERS, KV_HEADS, BLOCK_SIZE, DIM = 9, 3, 2, 4, 8


def new_pool() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, DIM, generator=generator)


def test_store_writes_each_slot_and_nothing_else() -> None:
    pool = new_pool()
    expected = pool.clone()
    slots = random.Random(1).sample(range(BLOCKS * BLOCK_SIZE), 11)
    k, v = torch.randn(2, 11, KV_HEADS, DIM)
    for token, slot in enumerate(slots):
        for head in range(KV_HEADS):
            expected[slot // BLOCK_SIZE, 1, 0, head, slot % BLOCK_SIZE] = k[token, head]
            expected[slot // BLOCK_SIZE, 1, 1, head, slot % BLOCK_SIZE] = v[token, head]
    places = torch.tensor(slots)
    store_kv(pool, 1, k, v, places // BLOCK_SIZE, places % BLOCK_SIZE)
    assert torch.equal(pool, expected)


def test_copy_reads_everything_before_it_writes() -> None:
    pool = new_pool()
    before = pool.clone()
    copy_blocks(pool, torch.tensor([3, 4]), torch.tensor([4, 3]))
    assert torch.equal(pool[3], before[4])
    assert torch.equal(pool[4], before[3])
    assert torch.equal(pool[[0, 1, 2, 5, 6, 7, 8]], before[[0, 1, 2, 5, 6, 7, 8]])


def test_block_rows_gather_a_sequence_contiguously() -> None:
    pool = new_pool()
    ids = [6, 0, 3]
    rows = block_rows(pool, torch.tensor(ids))
    for layer in range(LAYERS):
        gathered = pool.view(-1, BLOCK_SIZE * DIM)[rows[layer]]
        kv = gathered.view(2, KV_HEADS, len(ids) * BLOCK_SIZE, DIM)
        for which in range(2):
            for head in range(KV_HEADS):
                wanted = torch.cat([pool[block, layer, which, head] for block in ids])
                assert torch.equal(kv[which, head], wanted)
