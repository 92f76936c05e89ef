"""Helpers of the Triton attention kernels for an 8-bit KV pool (kernels/kv/kv_8bit.py).

Both GEMMs have float16 operands and float32 accumulators. e4m3 and int8 convert to float16 exactly,
two values in one or two instructions; to bfloat16 it takes five. On Hopper, GEMMs of e4m3 operands
accumulate in 14 bits: over a long context the contribution of a few keys is then below the last bit
of the sum (tests/kernels/test_kv_8bit.py measures the error).

    queries   q / unit                                   unit: largest absolute value of the queries
    scores    (q / unit) (k / ks)^T * unit * ks + log2(vs)
    weights   exp2(scores - best)                        softmax weight * vs, to multiply v / vs
    total     sum of weights / vs

So the largest weight is 2^15 for any scales (float16 overflows at 2^16), and weights down to 2^-29
of it keep all 11 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

HALF_ROOM = tl.constexpr(15.0)
_SMALLEST_UNIT = tl.constexpr(1e-30)
# Two pairs of bytes (a, b) (c, d) -> (a, c) and (b, d), each as float16. For int8: a float16 whose
# high byte is that of 1024 and whose low byte is u has the value 1024 + u.
_E4M3_PAIRS = tl.constexpr("""{
    .reg .b32 even, odd;
    .reg .b16 a, b, none;
    prmt.b32 even, $2, 0, 0x4420;
    prmt.b32 odd, $2, 0, 0x4431;
    mov.b32 {a, none}, even;
    mov.b32 {b, none}, odd;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")
_INT8_PAIRS = tl.constexpr("""{
    .reg .b32 u, even, odd, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 even, u, 0x64646464, 0x4240;
    prmt.b32 odd, u, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, even, bias;
    sub.rn.f16x2 $1, odd, bias;
}""")
_LOG2_AND_INVERSE = tl.constexpr("""{
    lg2.approx.ftz.f32 $0, $2;
    rcp.approx.ftz.f32 $1, $2;
}""")
_INT8 = tl.constexpr("""{
    .reg .b32 u, first, second, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 u, $2, 0x80808080;
    prmt.b32 first, u, 0x64646464, 0x4140;
    prmt.b32 second, u, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, first, bias;
    sub.rn.f16x2 $1, second, bias;
}""")


@triton.jit
def fit_half(queries):
    """Queries of any shape divided by their largest absolute value, as float16, and that value (the
    unit), float32. float32 queries are returned as they are, with unit 1."""
    if queries.dtype == tl.float32:
        return queries, tl.full((), 1.0, tl.float32)
    else:
        values = queries.to(tl.float32)
        unit = tl.maximum(tl.max(tl.abs(values)), _SMALLEST_UNIT)
        return (values / unit).to(tl.float16), unit


@triton.jit
def load_scales(
    pieces,
    positions,
    is_key,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    DIM: tl.constexpr,
):
    """The scales of K and of V, float32 [keys] each. `pieces` [keys]: pointers to the K pieces of
    the keys' blocks."""
    at = (pieces + BLOCK_SIZE * DIM).to(tl.pointer_type(tl.float32)) + positions % BLOCK_SIZE
    # One load of K's and V's scales together has an element per thread; in separate loads each
    # thread would load every scale that it computes with.
    both = at[:, None] + tl.arange(0, 2)[None, :] * (KV_HEADS * PIECE // 4)
    return tl.split(tl.load(both, mask=is_key[:, None], other=1.0))


@triton.jit
def log2_and_inverse(scales, HAS_PTX: tl.constexpr):
    """log2 and reciprocal of scales [keys]. Triton's log2 takes 13 instructions, partly to handle
    subnormals, which scales never are."""
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            _LOG2_AND_INVERSE, "=f,=f,f", [scales], (tl.float32, tl.float32), True, 1
        )
    else:
        return tl.log2(scales), 1 / scales


@triton.jit
def as_type(values, TYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """Convert e4m3 or int8 to TYPE."""
    if HAS_PTX and tl.float16 == TYPE and values.dtype == tl.int8:
        return tl.inline_asm_elementwise(_INT8, "=r,=r,r", [values], tl.float16, True, 4)
    else:
        return values.to(TYPE)


@triton.jit
def load_pairs(
    values,
    is_key,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TYPE: tl.constexpr,
    HAS_PTX: tl.constexpr,
):
    """Load V at the pointers `values` [keys]: its even and its odd dimensions, each
    [DIM_PADDED / 2, keys] of TYPE.

    The tensor cores need V transposed, and transposed reads of shared memory have 16-bit elements.
    """
    dims = tl.arange(0, DIM_PADDED // 2)
    at = values.to(tl.pointer_type(tl.int16))[None, :] + dims[:, None]
    pairs = tl.load(at, mask=(dims < DIM // 2)[:, None] & is_key[None, :], other=0)
    one: tl.constexpr = values.dtype.element_ty
    if HAS_PTX:
        even, odd = tl.inline_asm_elementwise(
            _INT8_PAIRS if one == tl.int8 else _E4M3_PAIRS,
            "=r,=r,r",
            [pairs],
            (tl.float16, tl.float16),
            True,
            2,
        )
    else:
        even = (pairs & 0xFF).to(tl.int8).to(one, bitcast=True)
        odd = (pairs >> 8).to(tl.int8).to(one, bitcast=True)
    return even.to(TYPE), odd.to(TYPE)
