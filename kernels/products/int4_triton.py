"""Products with weights in int4, in Triton: the weight stays packed until it is in registers.

A program has some outputs and a share of the inputs (split-K), 128 at a time. The four numbers of a
word belong to inputs 32 apart, so that each yields an operand tile for the tensor cores in the
registers of the words, without shuffles. 0x4300 | number is 128 + number in bfloat16, from which
128 and the zero are subtracted exactly; groups' sums are scaled in float32.

The last program of an output tile to finish adds up the shares, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2
from ..row_room import empty_rows
from .gemv_triton import _prefetch
from .int4_weights import CHUNK, PER_WORD, Int4Weight

_CHUNK, _WORDS = tl.constexpr(CHUNK), tl.constexpr(CHUNK // PER_WORD)
_PER_WORD = tl.constexpr(PER_WORD)
_DEQUANTISED_AT_ONCE = 32  # outputs
# Chunks prefetched before the preceding kernel has ended, and pieces of each.
_AHEAD, _PIECES = tl.constexpr(8), tl.constexpr(16)
# $0: the lowest numbers of two words ($2), plus $3, as floats; $1: the words shifted right by 4.
_UNPACK_BF16 = tl.constexpr(
    """{
    .reg .b32 number, one;
    mov.b32 one, 0x3F803F80;
    lop3.b32 number, $2, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, number, one, $3;
    shr.u32 $1, $2, 4;
    }"""
)
_UNPACK_FP16 = tl.constexpr(
    """{
    .reg .b32 number;
    lop3.b32 number, $2, 0x000F000F, 0x64006400, 0xEA;
    add.rn.f16x2 $0, number, $3;
    shr.u32 $1, $2, 4;
    }"""
)


@dataclass(frozen=True, slots=True)
class Int4Tiling:
    """Tiling of int4_product: outputs of a program, split-K shares, chunks of 128 inputs in
    flight, warps."""

    outputs: int
    shares: int
    stages: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Int4Stages:
    """Tiling of int4_streamed_product: outputs of a program, 64 or more for each four warps,
    split-K shares, and pipeline stages."""

    outputs: int
    shares: int
    chunks: int  # of 128 inputs, per stage
    count: int  # of stages
    early: int  # stages whose weights are loaded before the preceding kernel has ended
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Int4Row:
    """Tiling of int4_row_product: rows of a tile, 64 or more for each four warps, which are its
    outputs times the split-K shares; pipeline stages; and programs per multiprocessor, each of
    which computes several tiles."""

    rows: int
    shares: int  # two or more
    chunks: int  # of 128 inputs, per stage
    count: int  # of stages
    early: int  # stages whose weights are loaded before the preceding kernel has ended
    warps: int
    programs: int


def int4_product(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    tiling: Int4Tiling,
    *,
    is_gated: bool = False,
) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs], like x.

    `is_gated`: `ops.silu_and_mul` of the product, half as many outputs.
    Tuned for up to 128 rows, correct for any number. Operands in x's type, sums in float32; a
    row's sums do not depend on other rows.
    """
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    width = num_outputs // 2 if is_gated else num_outputs
    out = empty_rows((num_rows, width), x)
    rows = min(128, max(16, next_power_of_2(num_rows)))
    tiles = (cdiv(num_outputs, tiling.outputs), cdiv(num_rows, rows))
    shares = min(tiling.shares, num_inputs // CHUNK)
    if tiles[0] * tiles[1] > len(weight.turns):
        shares = 1
    parts = out
    if shares > 1:
        size = (shares, num_rows, tiles[0] * tiling.outputs)
        parts = torch.empty(size, dtype=torch.float32, device=x.device)
    _int4_product[(tiles[0], shares, tiles[1])](
        x,
        weight.data,
        weight.groups,
        out if bias is None else bias,
        out,
        parts,
        weight.turns,
        num_rows,
        num_outputs,
        num_inputs,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        IS_WHOLE=num_outputs % tiling.outputs == 0,
        GROUP=weight.group_size,
        ROWS=rows,
        OUTPUTS=tiling.outputs,
        SHARES=shares,
        HAS_ASM=x.is_cuda,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(x.device),
    )
    return out


@triton.jit
def _unpacked(words, zero, HAS_ASM: tl.constexpr, type: tl.constexpr):
    """(The lowest numbers of `words` minus `zero`, the words without them); exact in any type."""
    if HAS_ASM and type == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _UNPACK_BF16,
            "=r,=r,r,r",
            [words, (-128 - zero).to(type)],
            dtype=(tl.bfloat16, tl.int16),
            is_pure=True,
            pack=2,
        )
    if HAS_ASM and type == tl.float16:
        return tl.inline_asm_elementwise(
            _UNPACK_FP16,
            "=r,=r,r,r",
            [words, (-1024 - zero).to(type)],
            dtype=(tl.float16, tl.int16),
            is_pure=True,
            pack=2,
        )
    return ((words & 0xF) - zero).to(type), words >> 4


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _int4_product(
    x,
    words,
    groups,
    bias,
    out,
    parts,
    turns,
    num_rows,
    num_outputs,
    num_inputs,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SHARES: tl.constexpr,
    HAS_ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    places = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_output = rows < num_rows, places < num_outputs
    outputs = places
    if IS_GATED:  # each gate is next to its up output
        outputs = places // 2 + places % 2 * (num_outputs // 2)
    cols = tl.arange(0, _WORDS)
    num_chunks = num_inputs // _CHUNK
    share = tl.program_id(1)
    begin, end = num_chunks * share // SHARES, num_chunks * (share + 1) // SHARES
    if PDL and IS_WHOLE:
        _fetch_early(words, begin, end, num_outputs, IS_GATED, OUTPUTS)
    wait_for_previous(PDL)
    let_next_in(PDL)
    vectors = x + rows.to(tl.int64)[:, None] * num_inputs + cols[None, :]
    sums = sum_of_chunks(
        vectors,
        words,
        groups,
        outputs,
        is_row,
        is_output,
        begin,
        end,
        num_outputs,
        IS_WHOLE,
        GROUP,
        HAS_ASM,
    )
    total = tl.trans(sums)
    if SHARES > 1:
        pitch = tl.num_programs(0) * OUTPUTS
        at = parts + rows.to(tl.int64)[:, None] * pitch + places[None, :]
        of_share = num_rows.to(tl.int64) * pitch
        tl.store(at + share * of_share, total, mask=is_row[:, None])
        turn = turns + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        tl.debug_barrier()  # all threads' stores come before the counter's increment
        if tl.atomic_add(turn, 1, sem="acq_rel") == SHARES - 1:
            tl.store(turn, 0)
            total = tl.zeros((ROWS, OUTPUTS), tl.float32)
            for index in tl.static_range(SHARES):
                of_part = at + index * of_share
                total += tl.load(of_part, mask=is_row[:, None], other=0.0, cache_modifier=".cg")
            _store(total, bias, out, rows, outputs, num_rows, num_outputs, HAS_BIAS, IS_GATED)
    else:
        _store(total, bias, out, rows, outputs, num_rows, num_outputs, HAS_BIAS, IS_GATED)


@triton.jit
def sum_of_chunks(
    vectors,
    words,
    groups,
    outputs,
    is_row,
    is_output,
    begin,
    end,
    num_outputs,
    IS_WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """Some outputs of a weight times rows, over the chunks [begin, end): [outputs, rows].

    `vectors` [rows, 32]: pointers to each row's first 32 inputs.
    """
    type: tl.constexpr = vectors.dtype.element_ty
    ROWS: tl.constexpr = vectors.shape[0]
    OUTPUTS: tl.constexpr = outputs.shape[0]
    matrix = words + outputs[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    # The weight is the first operand, which the tensor cores can take from registers.
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for chunk in range(begin, end):
        tile = matrix + tl.cast(chunk, tl.int64) * num_outputs * _WORDS
        packed = tl.load(tile) if IS_WHOLE else tl.load(tile, mask=is_output[:, None], other=0)
        part = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for number in tl.static_range(_PER_WORD):
            if number * _WORDS % GROUP == 0:
                group = (chunk * _CHUNK + number * _WORDS) // GROUP
                at = groups + group.to(tl.int64) * num_outputs + outputs
                both = tl.load(at) if IS_WHOLE else tl.load(at, mask=is_output, other=0)
                scale = (both & -256).to(tl.float32, bitcast=True)
                zero = both & 0xFF
                part = tl.zeros((OUTPUTS, ROWS), tl.float32)
            zeros = tl.broadcast_to(zero[:, None], (OUTPUTS, _WORDS))
            values, packed = _unpacked(packed, zeros, HAS_ASM, type)
            at_x = vectors + chunk * _CHUNK + number * _WORDS
            piece = tl.load(at_x, mask=is_row[:, None], other=0.0)
            part = tl.dot(values, piece.T, part, input_precision="ieee")
            if (number + 1) * _WORDS % GROUP == 0:
                sums += part * scale[:, None]
    return sums


@triton.jit
def _fetch_early(words, begin, end, num_outputs, IS_GATED: tl.constexpr, OUTPUTS: tl.constexpr):
    """Prefetch a program's first chunks into the L2 cache, at most a piece per thread."""
    chunks = tl.minimum(begin + tl.arange(0, _AHEAD), end - 1).to(tl.int64) * num_outputs * _WORDS
    size: tl.constexpr = OUTPUTS * _WORDS // _PIECES
    pieces = tl.arange(0, _PIECES)
    at = tl.program_id(0) * OUTPUTS * _WORDS + pieces * size
    if IS_GATED:  # half of the pieces from each half of the weight
        half = num_outputs // 2 * _WORDS
        at = tl.program_id(0) * (OUTPUTS // 2) * _WORDS + pieces // 2 * size + pieces % 2 * half
    _prefetch(words + chunks[:, None] + at[None, :], size * 2)


@triton.jit
def _store(
    total,
    bias,
    out,
    rows,
    outputs,
    num_rows,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Store total [rows, outputs]; if gated, each gate is followed by its up output."""
    type: tl.constexpr = out.dtype.element_ty
    ROWS: tl.constexpr = total.shape[0]
    OUTPUTS: tl.constexpr = total.shape[1]
    if HAS_BIAS:
        of_outputs = tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)
        total += of_outputs.to(tl.float32)[None, :]
    if IS_GATED:  # round the products as if they had been stored
        gate, up = tl.split(tl.reshape(total.to(type), (ROWS, OUTPUTS // 2, 2)))
        gate = gate.to(tl.float32)
        gated = (gate / (1.0 + tl.exp(-gate))).to(type).to(tl.float32)
        _store_tile(gated * up.to(tl.float32), out, rows, num_rows, num_outputs // 2)
    else:
        _store_tile(total, out, rows, num_rows, num_outputs)


@triton.jit
def _store_tile(tile, out, rows, num_rows, width):
    COLUMNS: tl.constexpr = tile.shape[1]
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = out + rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tl.store(at, tile.to(out.dtype.element_ty), mask=mask)


def dequantised(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """`weight.dequantised`: [outputs, inputs], for products of many rows."""
    num_outputs, num_inputs = weight.shape
    out = torch.empty((num_outputs, num_inputs), dtype=dtype, device=weight.data.device)
    grid = (cdiv(num_outputs, _DEQUANTISED_AT_ONCE), num_inputs // CHUNK)
    _dequantise[grid](
        weight.data,
        weight.groups,
        out,
        num_outputs,
        num_inputs,
        GROUP=weight.group_size,
        OUTPUTS=_DEQUANTISED_AT_ONCE,
        num_warps=4,
        **launch_options(out.device),
    )
    return out


@launched
@triton.jit
def _dequantise(
    words,
    groups,
    out,
    num_outputs,
    num_inputs,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    chunk = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, _WORDS)
    mask = (outputs < num_outputs)[:, None]
    at = words + (chunk * num_outputs + outputs)[:, None] * _WORDS + cols[None, :]
    packed = tl.load(at, mask=mask, other=0)
    wait_for_previous(PDL)  # it may read the memory that is written here
    for number in tl.static_range(_PER_WORD):
        group = (chunk * _CHUNK + number * _WORDS) // GROUP
        both = tl.load(groups + group * num_outputs + outputs, mask=outputs < num_outputs, other=0)
        scale = (both & -256).to(tl.float32, bitcast=True)
        numbers = ((packed >> (4 * number)) & 0xF).to(tl.float32)
        values = (numbers - (both & 0xFF).to(tl.float32)[:, None]) * scale[:, None]
        place = out + outputs.to(tl.int64)[:, None] * num_inputs + chunk * _CHUNK + number * _WORDS
        tl.store(place + cols[None, :], values.to(out.dtype.element_ty), mask=mask)
