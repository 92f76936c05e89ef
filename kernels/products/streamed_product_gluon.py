"""A matrix times 33 to 128 vectors on Hopper: the weight is loaded before the vectors are ready.

    producer   weight ─TMA─► early stages │ preceding kernel has ended │ vectors ─TMA─► same stages
               weight, vectors ─TMA─► each further stage, once it is empty
    others     a stage is full ─► wgmma ─► it is empty; four warps for each 64 vectors

A weight does not depend on the step. The preceding kernel (a norm, a sum over GPUs, the last
programs of another product) leaves the memory idle for microseconds, enough to load a few stages.
Loading more stages early slows down the preceding kernel, which waits for memory too.

Every program reads all vectors of its inputs again, from the L2 cache. With more than 64 vectors
this takes longer than reading the weight from memory, unless a program has many outputs. Few
outputs of many inputs would then keep few multiprocessors busy: programs have shares of the inputs
(split-K) and write a summand each, which the following norm adds up.

A product that is summed over ranks is sent by this kernel to the ranks that sum it: 64 rows of 8192
outputs arrive 1.4 to 3 us earlier than if the sum's kernel had to read and send them.

Gluon is the lower level of Triton, where a kernel schedules its loads itself.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched
from ..peer_reduce_triton import Exchange, slot_at, state_of
from ..row_room import empty_rows, room_of
from .streamed_product import StreamTiling

_WARP_ROWS = gl.constexpr(16)  # of a warp; four warps are a warp group
_PRODUCER_REGISTERS = gl.constexpr(24)
_async_load = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)  # older Triton's name


def streamed_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stages: StreamTiling, *, is_gated: bool = False
) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs], 16-bit floats.

    33 to 128 rows, with room for 64 or 128; no split-K. `is_gated`: `ops.silu_and_mul` of the
    product, half as many outputs. Sums in float32; a row's sums do not depend on other rows.
    """
    assert stages.shares == 1
    num_outputs = len(weight) // (2 if is_gated else 1)
    out = empty_rows((len(x), num_outputs), x)
    _launch(x, weight, bias, stages, out, num_outputs, is_gated=is_gated)
    return out


def streamed_summands(
    x: Tensor, weight: Tensor, bias: Tensor | None, stages: StreamTiling
) -> Tensor:
    """The partial product of each split-K share: [rows, shares, outputs]."""
    shape = (len(x), stages.shares, len(weight))
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, stages, out, len(weight))
    return out


def send_streamed_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stages: StreamTiling,
    exchange: Exchange,
    *,
    in_parts: bool,
) -> None:
    """`streamed_product`, sent as this rank's summand to where `peer_add_rms_norm` sums it."""
    assert stages.shares == 1
    ranks = {"rank": exchange.rank, "num_ranks": exchange.num_ranks}
    pitch = exchange.pitch(len(weight), in_parts=in_parts)
    _launch(x, weight, bias, stages, exchange.bases, len(weight), **ranks, pitch=pitch)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stages: StreamTiling,
    out: Tensor,
    num_outputs: int,
    *,
    is_gated: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
    pitch: int = 0,
) -> None:
    """`out`: the product, or, with several ranks, `Exchange.bases`."""
    rows = room_of(len(x))
    whole_x = torch.as_strided(x, (rows, x.shape[1]), x.stride())
    _streamed_product[(cdiv(num_outputs, stages.outputs), stages.shares)](
        _boxes(whole_x, [rows, stages.inputs]),
        _boxes(weight, [stages.outputs, stages.inputs]),
        weight if bias is None else bias,
        out,
        len(x),
        num_outputs,
        x.shape[1],
        rank,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        RANKS=num_ranks,
        PITCH=pitch,
        OUTPUTS=stages.outputs,
        INPUTS=stages.inputs,
        STAGES=stages.count,
        EARLY=stages.early,
        SHARES=stages.shares,
        **cost(stages, rows, is_gated=is_gated),
        **launch_options(x.device),
    )


def cost(stages: StreamTiling, rows: int, *, is_gated: bool) -> dict[str, int]:
    """Warps that multiply, and registers per thread on average, including the producer's, which
    Triton rounds up to four warps. Few registers let the next kernel's programs start early."""
    warps = rows // _WARP_ROWS.value
    sums = stages.outputs * (2 if is_gated else 1) // 2
    wanted = 168 if sums <= 64 else 232  # of a thread that multiplies
    others: int = 4 * _PRODUCER_REGISTERS.value
    return {
        "num_warps": warps,
        "maxnreg": cdiv(cdiv(wanted * warps + others, warps + 4), 8) * 8,
    }


def _boxes(matrix: Tensor, box: list[int]) -> TensorDescriptor:
    """A TMA descriptor that loads boxes of this size."""
    return TensorDescriptor.from_tensor(matrix, box, _layout(tuple(box), matrix.dtype))


@functools.cache
def _layout(box: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(box), kind)


@gluon.jit
def _stage_barriers(STAGES: gl.constexpr):
    """Barriers of each stage: full and empty."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1)
        mbarrier.init(empty.index(index), count=1)
    fence_async_shared()
    return full, empty


@gluon.jit
def _load_weight(
    matrix, num_outputs, column, full, ws, stage, ROWS: gl.constexpr, HALVES: gl.constexpr
):
    """Start loading a stage's part of the weight; `full` expects the vectors' bytes too."""
    OUTPUTS: gl.constexpr = matrix.block_shape[0]
    num_bytes: gl.constexpr = (ROWS + HALVES * OUTPUTS) * matrix.block_shape[1] * 2
    mbarrier.expect(full.index(stage), num_bytes)
    for half in gl.static_range(HALVES):
        corner = [gl.program_id(0) * OUTPUTS + half * num_outputs, column]
        _async_load(matrix, corner, full.index(stage), ws.index(stage * HALVES + half))


@gluon.jit
def _fill(
    vectors,
    matrix,
    xs,
    ws,
    full,
    empty,
    num_outputs,
    first_input,
    num_steps,
    HALVES: gl.constexpr,
    EARLY: gl.constexpr,
    PDL: gl.constexpr,
):
    """The producer warp: load each stage once it is empty."""
    STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = xs.shape[1]
    INPUTS: gl.constexpr = xs.shape[2]
    for step in range(gl.minimum(EARLY, num_steps)):
        column = first_input + step * INPUTS
        _load_weight(matrix, num_outputs, column, full, ws, step, ROWS, HALVES)
    wait_for_previous(PDL)
    let_next_in(PDL)
    for step in range(gl.minimum(EARLY, num_steps)):
        _async_load(vectors, [0, first_input + step * INPUTS], full.index(step), xs.index(step))
    for step in range(EARLY, num_steps):
        stage, column = step % STAGES, first_input + step * INPUTS
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        _load_weight(matrix, num_outputs, column, full, ws, stage, ROWS, HALVES)
        _async_load(vectors, [0, column], full.index(stage), xs.index(stage))


@gluon.jit
def _multiply(xs, ws, full, empty, num_steps, sums, up_sums, HALVES: gl.constexpr):
    """All warps but the producer: multiply each stage once it is full, and add up."""
    STAGES: gl.constexpr = xs.shape[0]
    for step in range(num_steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        x, tile = xs.index(stage), ws.index(stage * HALVES).permute((1, 0))
        sums = warpgroup_mma(x, tile, sums, is_async=True)
        if HALVES == 2:
            tile = ws.index(stage * HALVES + 1).permute((1, 0))
            up_sums = warpgroup_mma(x, tile, up_sums, is_async=True)
            sums, up_sums = warpgroup_mma_wait(2, deps=(sums, up_sums))
        else:  # waiting for `up_sums` as well would keep its zeros in registers
            sums = warpgroup_mma_wait(1, deps=(sums,))
        # The previous step's product is done, so its stage is empty.
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    if HALVES == 2:
        sums, up_sums = warpgroup_mma_wait(0, deps=(sums, up_sums))
    else:
        sums = warpgroup_mma_wait(0, deps=(sums,))
    return sums, up_sums


@gluon.jit
def _send(
    summand, first, bases, rank, num_rows, num_outputs, RANKS: gl.constexpr, PITCH: gl.constexpr
):
    """Send outputs of all rows, from `first` on, to the ranks' slots (peer_reduce_triton.py)."""
    ROWS: gl.constexpr = summand.shape[0]
    OUTPUTS: gl.constexpr = summand.shape[1]
    across: gl.constexpr = OUTPUTS // 8  # threads, with 16 bytes each
    warps: gl.constexpr = ROWS // _WARP_ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])
    words = gl.convert_layout(summand, layout).to(gl.int16, bitcast=True)
    words = gl.where(words == -32768, 0, words).to(gl.int16)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    outputs = first + gl.arange(0, OUTPUTS, gl.SliceLayout(0, layout))
    turns = gl.load(state_of(gl.load(bases + rank), rows), mask=rows < num_rows, other=0)
    owner = 0  # the rank that sums all these outputs, if each rank sums a part
    if PITCH > 0:
        gl.static_assert(PITCH % OUTPUTS == 0)
        owner = first // PITCH
    at = slot_at(turns, rows, rank)[:, None] // 2 + (outputs - owner * PITCH)[None, :]
    mask = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    for index in gl.static_range(1 if PITCH > 0 else RANKS):
        receiver = owner if PITCH > 0 else (rank + index) % RANKS
        base = gl.load(bases + receiver).to(gl.pointer_type(gl.int16))
        gl.store(gl.multiple_of(base, 16) + at, words, mask=mask)


@launched
@gluon.jit(do_not_specialize=["num_rows"])
def _streamed_product(
    vectors,
    matrix,
    bias,
    out,
    num_rows,
    num_outputs,
    num_inputs,
    rank,
    HAS_BIAS: gl.constexpr,
    IS_GATED: gl.constexpr,
    RANKS: gl.constexpr,
    PITCH: gl.constexpr,
    OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
    SHARES: gl.constexpr,
    PDL: gl.constexpr,
):
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    ROWS: gl.constexpr = vectors.block_shape[0]
    warps: gl.constexpr = ROWS // _WARP_ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [_WARP_ROWS, OUTPUTS, 16])
    type: gl.constexpr = vectors.dtype
    xs = gl.allocate_shared_memory(type, [STAGES, ROWS, INPUTS], vectors.layout)
    ws = gl.allocate_shared_memory(type, [STAGES * HALVES, OUTPUTS, INPUTS], matrix.layout)
    full, empty = _stage_barriers(STAGES)
    sums = gl.zeros((ROWS, OUTPUTS), gl.float32, layout)
    up_sums = gl.zeros((ROWS, OUTPUTS), gl.float32, layout)
    share, num_steps = gl.program_id(1), gl.cdiv(num_inputs, INPUTS)
    first_step = num_steps * share // SHARES
    num_steps = num_steps * (share + 1) // SHARES - first_step
    first_input = first_step * INPUTS
    sums, up_sums = gl.warp_specialize(
        [
            (_multiply, (xs, ws, full, empty, num_steps, sums, up_sums, HALVES)),
            (
                _fill,
                (
                    vectors,
                    matrix,
                    xs,
                    ws,
                    full,
                    empty,
                    num_outputs,
                    first_input,
                    num_steps,
                    HALVES,
                    EARLY,
                    PDL,
                ),
            ),
        ],
        [1],
        [_PRODUCER_REGISTERS],
    )
    first = gl.program_id(0) * OUTPUTS
    outputs = first + gl.arange(0, OUTPUTS, gl.SliceLayout(0, layout))
    is_output = outputs < num_outputs
    if HAS_BIAS:
        is_added = is_output & (share == 0)
        sums += gl.load(bias + outputs, mask=is_added, other=0.0).to(gl.float32)[None, :]
        if IS_GATED:
            up_bias = gl.load(bias + num_outputs + outputs, mask=is_output, other=0.0)
            up_sums += up_bias.to(gl.float32)[None, :]
    if IS_GATED:  # as in ops_triton.py, round the products as if they had been stored
        gate = sums.to(type).to(gl.float32)
        gated = (gate / (1.0 + gl.exp(-gate))).to(type).to(gl.float32)
        sums = gated * up_sums.to(type).to(gl.float32)
    if RANKS > 1:
        wait_for_previous(PDL)  # these warps, too, read other kernels' output
        _send(sums.to(type), first, out, rank, num_rows, num_outputs, RANKS, PITCH)
    else:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        at = out + (rows * SHARES + share) * num_outputs + outputs[None, :]
        gl.store(at, sums.to(type), mask=(rows < num_rows) & is_output[None, :])
