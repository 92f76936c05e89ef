"""KV blocks in Triton: rotate q and k in place and store k and v to the paged pool, in one kernel
(reference: kv_blocks.py), and pull blocks, or some of their heads, from a peer's memory.

A block is contiguous over all layers, so pulling whole blocks is a plain copy of words, independent
of the layout inside a block. To pull some heads, a part of each row of a block is copied; a row is
the K or V of one layer with all heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from .kv_8bit import LARGEST, SMALLEST
from .kv_blocks import HeadNorms

_CHUNK_WORDS = 4096
# 32 programs with chunks of 8192 words saturate NVLink (370 of 372 GB/s) and take the fewest
# multiprocessors from a step in progress.
_PULL_PROGRAMS, _PULL_WORDS = 32, 8192
# Kernels are not specialised on the alignment of ids, nor on their number: none is compiled while
# serving.
_IDS = ["source_ids", "block_ids"]


def pull_blocks(
    source_address: int,
    pool: Tensor,
    source_ids: Tensor,
    block_ids: Tensor,
) -> None:
    """Copy blocks of a pool at `source_address`, laid out like `pool`, to `block_ids` of `pool`.

    The address is mapped peer memory, readable from the pool's device and aligned to 16 bytes.
    source_ids, block_ids [n] int64 on the pool's device; a block may be a target twice if both
    sources have the same content.
    """
    target = _words(pool)
    num_words = target.shape[1]
    num_chunks = len(block_ids) * cdiv(num_words, _PULL_WORDS)
    _pull_words[(min(_PULL_PROGRAMS, num_chunks),)](
        source_address,
        target,
        source_ids,
        block_ids,
        num_words,
        num_chunks,
        CHUNK=_PULL_WORDS,
        num_warps=8,
    )


def pull_heads(
    source_address: int,
    source_heads: int,
    source_head: int,
    pool: Tensor,
    my_head: int,
    num_heads: int,
    source_ids: Tensor,
    block_ids: Tensor,
    *,
    layers: tuple[int, int, int, int] | None = None,
) -> None:
    """Copy `num_heads` KV heads of blocks from a pool of `source_heads` at `source_address`.

    Heads from `source_head` on go to heads from `my_head` on. Address and ids as for `pull_blocks`.
    `layers`: (layers of the source pool, first layer there, first layer here, layers to copy);
    None: all layers.
    """
    _, my_layers, _, my_heads, block_size, dim = pool.shape
    source_layers, source_layer, my_layer, num_layers = layers or (my_layers, 0, 0, my_layers)
    word = _word(block_size * dim * pool.itemsize)
    head_words = block_size * dim * pool.itemsize // word.itemsize
    num_rows, width = 2 * num_layers, num_heads * head_words
    num_columns = min(next_power_of_2(width), _CHUNK_WORDS)
    num_tile_rows = _CHUNK_WORDS // num_columns
    tiles_per_block = cdiv(num_rows, num_tile_rows) * cdiv(width, num_columns)
    num_tiles = len(block_ids) * tiles_per_block
    _pull_rows[(min(_PULL_PROGRAMS, num_tiles),)](
        source_address,
        pool.view(-1).view(word),
        source_ids,
        block_ids,
        source_heads * head_words,
        (2 * source_layer * source_heads + source_head) * head_words,
        2 * source_layers * source_heads * head_words,
        my_heads * head_words,
        (2 * my_layer * my_heads + my_head) * head_words,
        2 * my_layers * my_heads * head_words,
        num_rows,
        width,
        num_tiles,
        ROWS=num_tile_rows,
        COLUMNS=num_columns,
        num_warps=8,
    )


def _words(blocks: Tensor) -> Tensor:
    """Blocks as [n, words], of the widest words that a block consists of: see `_word`."""
    flat = blocks.view(len(blocks), -1).view(torch.uint8)
    return flat.view(_word(flat.shape[1]))


def _word(num_bytes: int) -> torch.dtype:
    """The widest integer type of which `num_bytes` is a multiple."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if num_bytes % dtype.itemsize == 0:
            return dtype
    return torch.uint8


@launched
@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=_IDS)
def _pull_words(
    source_address, target, source_ids, block_ids, num_words, num_chunks, CHUNK: tl.constexpr
):
    """A few programs loop over all chunks: the copy is bound by the link, not by processors."""
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


@launched
@triton.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=_IDS)
def _pull_rows(
    source_address,
    target,
    source_ids,
    block_ids,
    source_pitch,
    source_first,
    source_block,
    pitch,
    first,
    block,
    num_rows,
    width,
    num_tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Like `_pull_words`, in tiles [rows, words of the copied part of a row]."""
    source = tl.cast(source_address, tl.int64).to(target.dtype)
    source = tl.multiple_of(source, 16)
    tiles_across = tl.cdiv(width, COLUMNS)
    tiles_per_block = tl.cdiv(num_rows, ROWS) * tiles_across
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        index = tile // tiles_per_block
        in_block = tile % tiles_per_block
        rows = in_block // tiles_across * ROWS + tl.arange(0, ROWS)[:, None]
        words = in_block % tiles_across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mask = (rows < num_rows) & (words < width)
        read = source + tl.load(source_ids + index) * source_block + source_first
        written = target + tl.load(block_ids + index) * block + first
        content = tl.load(read + rows * source_pitch + words, mask=mask)
        tl.store(written + rows * pitch + words, content, mask=mask)


_TILE_HEADS = 8
_INFINITY = tl.constexpr(float("inf"))
_SMALLEST = tl.constexpr(SMALLEST)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)


def rotate_and_store(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    layer_pool: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Normalise q and k if `norms` is given and rotate them, in place; store k and v to the slots
    `slot_mapping` [tokens] int64.

    qkv [tokens, heads + 2 kv_heads, dim] contiguous, rope from `kv_blocks.rope_angles`, layer_pool
    [num_blocks, 2, kv_heads, block_size, dim]: one layer of the pool, or of an 8-bit pool.
    """
    num_tokens, all_heads, dim = qkv.shape
    _, _, kv_heads, block_size, width = layer_pool.shape
    heads = all_heads - 2 * kv_heads
    cos, sin = rope
    q_tiles, kv_tiles = cdiv(heads, _TILE_HEADS), cdiv(kv_heads, _TILE_HEADS)
    _rotate_and_store[(num_tokens, q_tiles + 2 * kv_tiles)](
        qkv,
        cos,
        sin,
        qkv if norms is None else norms.q,
        qkv if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        slot_mapping,
        layer_pool,
        heads,
        kv_heads,
        q_tiles,
        kv_tiles,
        layer_pool.stride(0),
        HAS_NORMS=norms is not None,
        BLOCK_SIZE=block_size,
        PIECE=block_size * width,
        DIM=dim,
        HALF_PADDED=next_power_of_2(dim // 2),
        TILE_HEADS=_TILE_HEADS,
        LARGEST=LARGEST.get(layer_pool.dtype),
        num_warps=2,
        **launch_options(qkv.device),
    )


@launched
@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    slot_mapping,
    layer_pool,
    heads,
    kv_heads,
    q_tiles,
    kv_tiles,
    block_stride,
    HAS_NORMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    dims = tl.arange(0, HALF_PADDED)[None, :]
    rows = tl.arange(0, TILE_HEADS)[:, None]
    # part 0: q, 1: k, 2: v; `head` counts within its part.
    is_q = tile < q_tiles
    if HAS_NORMS:
        weight = q_weight
        if tile >= q_tiles:
            weight = k_weight
        of_first = tl.load(weight + dims, mask=dims < half, other=0.0).to(tl.float32)
        of_second = tl.load(weight + half + dims, mask=dims < half, other=0.0).to(tl.float32)
    let_next_in(PDL)
    wait_for_previous(PDL)
    kv_tile = tile - q_tiles
    part = tl.where(is_q, 0, 1 + kv_tile // kv_tiles)
    head = tl.where(is_q, tile, kv_tile % kv_tiles) * TILE_HEADS + rows
    num_heads = tl.where(is_q, heads, kv_heads)
    source = qkv + token * (heads + 2 * kv_heads) * DIM
    source += (tl.where(is_q, 0, heads + (part - 1) * kv_heads) + head) * DIM
    mask = (head < num_heads) & (dims < half)
    first = tl.load(source + dims, mask=mask, other=0.0)
    second = tl.load(source + dims + half, mask=mask, other=0.0)
    if part < 2:
        # cos is (c, c) and sin is (-s, s) over the two halves.
        c = tl.load(cos + token * DIM + dims, mask=dims < half, other=0.0)
        s = tl.load(sin + token * DIM + half + dims, mask=dims < half, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORMS:
            by = tl.rsqrt(tl.sum(a * a + b * b, axis=1, keep_dims=True) / DIM + eps)
            a = (a * by * of_first).to(first.dtype).to(tl.float32)
            b = (b * by * of_second).to(first.dtype).to(tl.float32)
        first, second = (a * c - b * s).to(first.dtype), (b * c + a * s).to(second.dtype)
        tl.store(source + dims, first, mask=mask)
        tl.store(source + dims + half, second, mask=mask)
    if part > 0:
        slot = tl.load(slot_mapping + token)
        block = layer_pool + slot // BLOCK_SIZE * block_stride
        piece = block + ((part - 1) * kv_heads + head) * PIECE
        kv = piece + slot % BLOCK_SIZE * DIM + dims
        if LARGEST is None:
            tl.store(kv, first, mask=mask)
            tl.store(kv + half, second, mask=mask)
        else:
            low, high, scale = _quantized(first, second, LARGEST)
            scales = (piece + BLOCK_SIZE * DIM).to(tl.pointer_type(tl.float32))
            tl.store(scales + slot % BLOCK_SIZE, scale, mask=head < num_heads)
            tl.store(kv, low.to(layer_pool.dtype.element_ty), mask=mask)
            tl.store(kv + half, high.to(layer_pool.dtype.element_ty), mask=mask)


@triton.jit
def _quantized(first, second, LARGEST: tl.constexpr):
    """Both halves of each row divided by its scale, and the scales [rows, 1]: kv_8bit.quantize."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    most = tl.maximum(tl.abs(first), tl.abs(second))
    is_finite = (tl.abs(first) < _INFINITY) & (tl.abs(second) < _INFINITY)
    most = tl.max(tl.where(is_finite, most, _INFINITY), axis=1, keep_dims=True)
    bounded = tl.maximum(most, _SMALLEST)
    factor = tl.div_rn(tl.full(bounded.shape, LARGEST, tl.float32), bounded)
    scale = tl.where(most < _INFINITY, bounded * (1 / LARGEST), float("nan"))
    first, second = first * factor, second * factor
    if LARGEST < 128:  # int8: adding and subtracting this rounds to integers, ties to even
        first, second = (first + _ROUNDING) - _ROUNDING, (second + _ROUNDING) - _ROUNDING
    return first, second, scale
