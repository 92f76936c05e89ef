"""Moving whole KV blocks in Triton. The reference is kv_blocks.py.

A block of all layers is one contiguous piece, so these are plain copies of words: as fast as the
memory, whatever the layout inside a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK_WORDS = 4096
_PULL_PROGRAMS = 64  # enough to fill NVLink; the other multiprocessors go on with their step


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """`kv_blocks.gather_blocks`; block_ids [n] int64 on the pool's device."""
    blocks = torch.empty((len(block_ids), *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
    _copy(pool, blocks, block_ids, is_gather=True)
    return blocks


def scatter_blocks(pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """`kv_blocks.scatter_blocks`; `block_ids` must not repeat, `blocks` is contiguous."""
    _copy(blocks, pool, block_ids, is_gather=False)


def pull_blocks(
    source_address: int,
    pool: Tensor,
    source_ids: Tensor,
    block_ids: Tensor,
    num_programs: int = _PULL_PROGRAMS,
) -> None:
    """Copy blocks of a pool at `source_address`, laid out like `pool`, to `block_ids` of `pool`.

    The address is one that the pool's device can read: peer memory, mapped. It is aligned to 16
    bytes. source_ids, block_ids [n] int64 on the pool's device; `block_ids` must not repeat.
    """
    target = _words(pool)
    num_words = target.shape[1]
    num_chunks = len(block_ids) * triton.cdiv(num_words, _CHUNK_WORDS)
    _pull_words[(min(num_programs, num_chunks),)](
        source_address,
        target,
        source_ids,
        block_ids,
        num_words,
        num_chunks,
        CHUNK=_CHUNK_WORDS,
        num_warps=8,
    )


def _copy(source: Tensor, target: Tensor, block_ids: Tensor, *, is_gather: bool) -> None:
    source, target = _words(source), _words(target)
    num_words = source.shape[1]
    _copy_words[(len(block_ids), triton.cdiv(num_words, _CHUNK_WORDS))](
        source, target, block_ids, num_words, IS_GATHER=is_gather, CHUNK=_CHUNK_WORDS, num_warps=4
    )


def _words(blocks: Tensor) -> Tensor:
    """[n, words of 8 bytes], or of 4 or 2 where a block is no multiple of that."""
    flat = blocks.view(len(blocks), -1).view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        if flat.shape[1] % dtype.itemsize == 0:
            return flat.view(dtype)
    return flat


@triton.jit
def _copy_words(
    source,
    target,
    block_ids,
    num_words,
    IS_GATHER: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    block_id = tl.load(block_ids + index)
    words = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = words < num_words
    if IS_GATHER:
        read, written = block_id, index
    else:
        read, written = index, block_id
    content = tl.load(source + read * num_words + words, mask=mask)
    tl.store(target + written * num_words + words, content, mask=mask)


@triton.jit
def _pull_words(
    source_address,
    target,
    source_ids,
    block_ids,
    num_words,
    num_chunks,
    CHUNK: tl.constexpr,
):
    """Few programs take chunk after chunk: the copy is bound by the link, not by processors."""
    source = tl.cast(source_address, tl.int64).to(target.dtype)
    source = tl.multiple_of(source, 16)
    chunks_per_block = tl.cdiv(num_words, CHUNK)
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        index = chunk // chunks_per_block
        words = chunk % chunks_per_block * CHUNK + tl.arange(0, CHUNK)
        mask = words < num_words
        read = source + tl.load(source_ids + index) * num_words
        written = target + tl.load(block_ids + index) * num_words
        tl.store(written + words, tl.load(read + words, mask=mask), mask=mask)
