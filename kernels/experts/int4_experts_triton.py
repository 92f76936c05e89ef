"""Grouped products with int4 weights, which stay packed until they are in registers.

The two products of grouped_triton.py over the same tiles of rows: a program has some outputs of a
tile of rows of one expert, and all inputs, in chunks that are multiplied as in int4_triton.py. The
weights, in registers, are the first operand of the tensor cores, so that MMA tiles are full however
few rows there are. Within a program each gate is next to its up output.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched
from ..products.int4_triton import sum_of_chunks
from ..products.int4_weights import CHUNK, PER_WORD
from .experts import Int4Experts
from .routing_triton import Order, tile_and_output
from .tiles import Cut

_CHUNK, _WORDS = tl.constexpr(CHUNK), tl.constexpr(CHUNK // PER_WORD)


def int4_products(
    x: Tensor,
    weights: Int4Experts,
    order: Order,
    shares: Tensor | None,
    out: Tensor,
    num_chosen: int,
    rows: int,
    cut: Cut,
) -> None:
    """Fill `out`: without `shares` the gated product of x [tokens, inputs] for each pair, else the
    product of x [pairs by expert, inputs], times the pairs' shares."""
    num_outputs, num_tiles = weights.num_outputs, order.tiles.shape[1]
    _int4_grouped_product[(num_tiles * cdiv(num_outputs, cut.outputs),)](
        x,
        weights.data,
        weights.groups,
        order.pairs,
        order.tiles,
        order.pairs if shares is None else shares,
        out,
        num_tiles,
        weights.num_experts,
        num_chosen,
        num_outputs,
        weights.num_inputs,
        cut.group,
        IS_GATED=shares is None,
        IS_WHOLE=num_outputs % cut.outputs == 0,
        GROUP=weights.group_size,
        ROWS=rows,
        OUTPUTS=cut.outputs,
        HAS_ASM=x.is_cuda,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **launch_options(x.device),
    )


@launched
@triton.jit(do_not_specialize=["num_tiles", "num_experts", "num_chosen", "group"])
def _int4_grouped_product(
    x,
    words,
    groups,
    pairs,
    tiles,
    shares,
    out,
    num_tiles,
    num_experts,
    num_chosen,
    num_outputs,
    num_inputs,
    group,
    IS_GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, first_place = tile_and_output(num_tiles, num_outputs, group, OUTPUTS)
    places = first_place + tl.arange(0, OUTPUTS)
    outputs = places
    if IS_GATED:
        outputs = places // 2 + places % 2 * (num_outputs // 2)
    let_next_in(PDL)
    wait_for_previous(PDL)
    expert = tl.load(tiles + tile)
    if expert >= num_experts:
        return
    rows = tl.load(tiles + num_tiles + tile) + tl.arange(0, ROWS)
    is_row = rows < tl.load(tiles + 2 * num_tiles + tile)
    pair = tl.load(pairs + rows, mask=is_row, other=0)
    sources = (pair // num_chosen if IS_GATED else rows).to(tl.int64)
    num_chunks = num_inputs // _CHUNK
    of_expert = expert.to(tl.int64) * num_outputs
    sums = sum_of_chunks(
        x + sources[:, None] * num_inputs + tl.arange(0, _WORDS)[None, :],
        words + of_expert * num_chunks * _WORDS,
        groups + of_expert * (num_inputs // GROUP),
        outputs,
        is_row,
        places < num_outputs,
        0,
        num_chunks,
        num_outputs,
        IS_WHOLE,
        GROUP,
        HAS_ASM,
    )
    if IS_GATED:
        gate, up = tl.split(tl.reshape(tl.trans(sums), (ROWS, OUTPUTS // 2, 2)))
        _store(
            gate / (1.0 + tl.exp(-gate)) * up, out, rows, first_place // 2, num_outputs // 2, is_row
        )
    else:
        share = tl.load(shares + pair, mask=is_row, other=0.0)
        _store(tl.trans(sums) * share[:, None], out, pair, first_place, num_outputs, is_row)


@triton.jit
def _store(total, out, rows, first_column, width, is_row):
    """Store total [rows, columns]."""
    columns = first_column + tl.arange(0, total.shape[1])
    at = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = is_row[:, None] & (columns < width)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)
