"""Routing on the device: each token's experts, and (token, expert) pairs sorted by expert.

    choose    softmax, top-k         ─► weights, chosen [tokens, k]; counts by block of tokens
    order     those counts           ─► pairs by expert, and the tiles of rows that cover them

A pair is a token and one of its experts: number token * k + place. For few tokens one program of
one kernel does both. No size depends on values, so CUDA graphs can capture the kernels. Pairs of
one expert are in the order of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from .experts import LayerLoads, Mixture

_BLOCK_ELEMENTS = 4096  # tokens times experts that a program keeps in registers
_MAX_BLOCK_TOKENS = 32
_TILE_BLOCK = 64
_ALIGNED = 32  # elements


@dataclass(frozen=True, slots=True)
class Choice:
    """`weights` float32 and `chosen` int32, [tokens, k]."""

    weights: Tensor
    chosen: Tensor


@dataclass(frozen=True, slots=True)
class Order:
    """`pairs` [tokens * k] int32: pairs sorted by expert.

    `tiles` [3, most tiles] int32: expert and first row of each tile, and end of the expert's rows.
    A tile has rows of one expert; an unused tile's expert is beyond the last. Rows after the last
    local expert's (pairs with experts of other ranks) are not written.
    """

    pairs: Tensor
    tiles: Tensor


@triton.jit
def tile_and_output(num_tiles, num_outputs, group, OUTPUTS: tl.constexpr):
    """This program's tile, and the first of its outputs.

    Up to `group` consecutive programs have the same outputs of different tiles; the next ones have
    the next outputs.
    """
    program = tl.program_id(0)
    per_group = tl.cdiv(num_outputs, OUTPUTS) * group
    first_tile = program // per_group * group
    group_size = tl.minimum(num_tiles - first_tile, group)
    tile = first_tile + program % per_group % group_size
    return tile, program % per_group // group_size * OUTPUTS


def most_tiles(
    num_pairs: int, num_experts: int, tile_rows: int, *, has_own_tiles: bool = False
) -> int:
    """How many tiles the worst routing needs: each expert's last tile may have a single row."""
    if has_own_tiles:
        return num_experts + (num_pairs - 1) // tile_rows
    touched = min(num_pairs, num_experts)
    return (num_pairs + touched * (tile_rows - 1)) // tile_rows


def choose_and_order(
    logits: Tensor,
    mixture: Mixture,
    loads: LayerLoads | None,
    tile_rows: int | None,
    *,
    has_own_tiles: bool = False,
) -> tuple[Choice, Order]:
    """`experts.choose_experts` of the sum over parts of logits [parts, tokens, experts], with ties
    going to the first expert; and the pairs in tiles of `tile_rows` rows (None: not ordered).

    `has_own_tiles`: tile number e is expert e's first, even if it has no rows; further tiles come
    after these.
    """
    num_parts, num_tokens, num_experts = logits.shape
    k, device = mixture.num_chosen, logits.device
    padded = _padded(num_experts)
    block = _block_tokens(num_tokens, padded)
    num_blocks = cdiv(num_tokens, block)
    weights = torch.empty((num_tokens, k), dtype=torch.float32, device=device)
    chosen = torch.empty((num_tokens, k), dtype=torch.int32, device=device)
    is_ordered = tile_rows is not None
    num_tiles = 0
    if tile_rows is not None:
        sizes = (num_tokens * k, mixture.num_local, tile_rows)
        num_tiles = most_tiles(*sizes, has_own_tiles=has_own_tiles)
    # Pairs, tiles, and how often each block of tokens chose each expert.
    pairs, tiles, counts = _int32s(device, num_tokens * k, 3 * num_tiles, num_blocks * padded)
    slots = None if loads is None else loads.whole.slots
    common = {
        "EXPERTS": padded,
        "TOKENS": block,
        "K": k,
        "TILE_BLOCK": _TILE_BLOCK,
        "HAS_OWN": has_own_tiles,
        **launch_options(device),
    }
    bounds = (num_tokens, num_experts, mixture.first, mixture.num_local, num_tiles, tile_rows or 1)
    _choose[(num_blocks,)](
        logits,
        weights,
        chosen,
        counts,
        pairs,
        tiles,
        counts if loads is None else loads.tokens,
        counts if slots is None else slots,
        0 if loads is None else loads.whole.first_slot,
        *bounds,
        PARTS=num_parts,
        K_PADDED=next_power_of_2(k),
        IS_NORMED=mixture.has_normed_weights,
        IS_COUNTED=loads is not None,
        HAS_SLOTS=slots is not None,
        IS_ORDERED=is_ordered and num_blocks == 1,
        num_warps=_warps(block, is_ordered=is_ordered),
        **common,
    )
    if is_ordered and num_blocks > 1:
        _order[(num_blocks,)](
            chosen,
            counts,
            pairs,
            tiles,
            *bounds,
            num_blocks,
            COUNT_BLOCK=max(1, min(32, _BLOCK_ELEMENTS // padded)),
            num_warps=_warps(block, is_ordered=True),
            **common,
        )
    return Choice(weights, chosen), Order(pairs, tiles.view(3, num_tiles))


def _int32s(device: torch.device, *sizes: int) -> list[Tensor]:
    """Uninitialised vectors in one allocation, each aligned."""
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + -(-size // _ALIGNED) * _ALIGNED)
    whole = torch.empty(begins[-1], dtype=torch.int32, device=device)
    return [whole[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


def _padded(num_experts: int) -> int:
    return max(2, next_power_of_2(num_experts))


def _block_tokens(num_tokens: int, padded: int) -> int:
    """Tokens per program: few, as long as there are few programs."""
    most = max(1, min(_MAX_BLOCK_TOKENS, _BLOCK_ELEMENTS // padded))
    if num_tokens <= most:
        return next_power_of_2(num_tokens)
    return min(most, 8 if num_tokens <= 256 else 16) if num_tokens <= 2048 else most


def _warps(block: int, *, is_ordered: bool) -> int:
    """One warp per token: its choices are sequential, and need no barrier within a warp. Making
    tiles needs a few more."""
    return min(16, max(block, 4 if is_ordered else 1))


@launched
@triton.jit(do_not_specialize=["first_slot", "num_tokens", "first_local", "num_tiles", "tile_rows"])
def _choose(
    logits,
    weights,
    chosen,
    counts,
    pairs,
    tiles,
    loads,
    slots,
    first_slot,
    num_tokens,
    num_experts,
    first_local,
    num_local,
    num_tiles,
    tile_rows,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    HAS_OWN: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_COUNTED: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    IS_ORDERED: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    tokens = program * TOKENS + tl.arange(0, TOKENS)
    experts, places = tl.arange(0, EXPERTS), tl.arange(0, K_PADDED)
    is_token, is_expert = tokens < num_tokens, experts < num_experts
    let_next_in(PDL)
    wait_for_previous(PDL)
    at = tokens[:, None] * num_experts + experts[None, :]
    is_logit = is_token[:, None] & is_expert[None, :]
    found = tl.load(logits + at, mask=is_logit, other=0.0)
    for part in tl.static_range(1, PARTS):
        found += tl.load(logits + part * num_tokens * num_experts + at, mask=is_logit, other=0.0)
    # Without NaN and -inf every choice is an expert and none is chosen twice, whatever was loaded:
    # addresses depend on it.
    found = tl.maximum(tl.where(found == found, found, -3.0e38), -3.0e38)
    left = tl.where(is_expert[None, :], found, float("-inf"))
    best = tl.max(left, axis=1)
    total = tl.sum(tl.exp(left - best[:, None]), axis=1)
    place = tl.full((TOKENS, EXPERTS), -1, tl.int32)  # index among the token's choices, or -1
    values = tl.zeros((TOKENS, K_PADDED), tl.float32)
    numbers = tl.zeros((TOKENS, K_PADDED), tl.int32)
    for index in range(K):
        value, number = tl.max(left, axis=1, return_indices=True)
        is_best = experts[None, :] == number[:, None]
        left = tl.where(is_best, float("-inf"), left)
        place = tl.where(is_best, index, place)
        is_here = places[None, :] == index
        values = tl.where(is_here, tl.exp(value - best)[:, None], values)
        numbers = tl.where(is_here, number[:, None], numbers)
    if IS_NORMED:
        total = tl.sum(values, axis=1)
    to = tokens[:, None] * K + places[None, :]
    is_stored = is_token[:, None] & (places < K)[None, :]
    tl.store(weights + to, values / total[:, None], mask=is_stored)
    tl.store(chosen + to, numbers, mask=is_stored)
    place = tl.where(is_token[:, None], place, -1)
    is_chosen = (place >= 0).to(tl.int32)
    if IS_COUNTED:
        counted = is_chosen
        if HAS_SLOTS:
            of_tokens = tl.load(slots + tokens, mask=is_token, other=-1)
            counted = tl.where((of_tokens >= first_slot)[:, None], is_chosen, 0)
        num_counted = tl.sum(counted, axis=0)
        tl.atomic_add(
            loads + experts, num_counted.to(tl.int64), mask=num_counted > 0, sem="relaxed"
        )
    numbers_of = tl.sum(is_chosen, axis=0)
    if IS_ORDERED:
        _put_in_order(
            pairs,
            tiles,
            place,
            numbers_of,
            tl.zeros_like(numbers_of),
            tokens,
            experts,
            first_local,
            num_local,
            num_tiles,
            tile_rows,
            K,
            EXPERTS,
            TILE_BLOCK,
            HAS_OWN,
        )
    else:
        tl.store(counts + program * EXPERTS + experts, numbers_of)


@launched
@triton.jit(do_not_specialize=["num_tokens", "first_local", "num_tiles", "tile_rows", "num_blocks"])
def _order(
    chosen,
    counts,
    pairs,
    tiles,
    num_tokens,
    num_experts,
    first_local,
    num_local,
    num_tiles,
    tile_rows,
    num_blocks,
    COUNT_BLOCK: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    HAS_OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    # Each program adds up all blocks' counts itself: cheaper than one more kernel.
    program = tl.program_id(0)
    tokens = program * TOKENS + tl.arange(0, TOKENS)
    experts, blocks = tl.arange(0, EXPERTS), tl.arange(0, COUNT_BLOCK)
    is_token = tokens < num_tokens
    let_next_in(PDL)
    wait_for_previous(PDL)
    # For few blocks all loads are issued at once.
    counted = _counts_of(counts, blocks, experts, num_blocks, EXPERTS)
    place = tl.full((TOKENS, EXPERTS), -1, tl.int32)
    for index in tl.static_range(K):
        number = tl.load(chosen + tokens * K + index, mask=is_token, other=-1)
        place = tl.where(experts[None, :] == number[:, None], index, place)
    in_front = tl.where((blocks < program)[:, None], counted, 0)
    for first in range(COUNT_BLOCK, num_blocks, COUNT_BLOCK):
        some = _counts_of(counts, first + blocks, experts, num_blocks, EXPERTS)
        counted += some
        in_front += tl.where((first + blocks < program)[:, None], some, 0)
    sizes, before = tl.sum(counted, axis=0), tl.sum(in_front, axis=0)
    _put_in_order(
        pairs,
        tiles,
        place,
        sizes,
        before,
        tokens,
        experts,
        first_local,
        num_local,
        num_tiles,
        tile_rows,
        K,
        EXPERTS,
        TILE_BLOCK,
        HAS_OWN,
    )


@triton.jit
def _counts_of(counts, blocks, experts, num_blocks, EXPERTS: tl.constexpr):
    """[blocks, experts], zeros beyond the last block."""
    at = counts + blocks[:, None] * EXPERTS + experts[None, :]
    return tl.load(at, mask=(blocks < num_blocks)[:, None], other=0)


@triton.jit
def _put_in_order(
    pairs,
    tiles,
    place,
    sizes,
    before,
    tokens,
    experts,
    first_local,
    num_local,
    num_tiles,
    tile_rows,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    HAS_OWN: tl.constexpr,
):
    """Store a block's pairs at their rows, and this program's share of the tiles.

    `place` [tokens, experts]: the expert's index among the token's choices, or -1. `sizes` and
    `before` [experts]: how often all tokens, and those before the block, chose each expert.
    """
    is_local = (experts >= first_local) & (experts < first_local + num_local)
    sizes = tl.where(is_local, sizes, 0)
    starts = tl.cumsum(sizes, axis=0) - sizes
    is_chosen = (place >= 0).to(tl.int32)
    to = (starts + before)[None, :] + tl.cumsum(is_chosen, axis=0) - is_chosen
    is_stored = (is_chosen > 0) & is_local[None, :]
    tl.store(pairs + to, tokens[:, None] * K + place, mask=is_stored)
    num_own = num_local if HAS_OWN else 0
    first_of = 1 if HAS_OWN else 0  # the first of an expert's tiles that is counted here
    num_of = tl.maximum((sizes + tile_rows - 1) // tile_rows - first_of, 0)
    behind = tl.cumsum(num_of, axis=0)  # the end of the expert's tiles
    step = tl.num_programs(0) * TILE_BLOCK
    for first in range(tl.program_id(0) * TILE_BLOCK, num_tiles, step):
        numbers = first + tl.arange(0, TILE_BLOCK)
        place_of = numbers - num_own
        # A tile belongs to the first expert whose tiles end after it.
        owner = tl.sum((behind[None, :] <= place_of[:, None]).to(tl.int32), axis=1)
        of_expert = place_of[:, None] - (behind - num_of)[None, :] + first_of
        if HAS_OWN:
            owner = tl.where(place_of < 0, first_local + numbers, owner)
            of_expert = tl.where((place_of < 0)[:, None], 0, of_expert)
        is_owner = experts[None, :] == owner[:, None]
        rows = starts[None, :] + of_expert * tile_rows
        begin = tl.sum(tl.where(is_owner, rows, 0), axis=1)
        end = tl.sum(tl.where(is_owner, (starts + sizes)[None, :], 0), axis=1)
        mask = numbers < num_tiles
        # An unused tile's owner is EXPERTS: beyond the local experts.
        local = tl.where(owner < EXPERTS, owner - first_local, EXPERTS)
        tl.store(tiles + numbers, local, mask=mask)
        tl.store(tiles + num_tiles + numbers, begin, mask=mask)
        tl.store(tiles + 2 * num_tiles + numbers, end, mask=mask)
