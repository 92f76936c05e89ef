"""Small sums over GPUs in one kernel each, without a library: ranks read and write peers' memory.

    exchange memory of a rank, mapped by all:
    | signals [2 phases, ranks, programs] | epochs [programs] | data [2, programs, region] | results

    at once     x ─► own data │ all there? │ add up all ranks' data ─► out
    in parts    x ─► own data │ all there? │ add up one part of the data ─► all ranks' results
                              │ all there? │ own results ─► out

Each rank moves (ranks - 1) times the tensor over its links at once, in parts twice the tensor at
most, but waits twice. What was added up may be added to the residual stream and normed in the same
kernel, a row a program. Program c of every rank takes chunk c of x, uses region c alone and meets
program c of the others alone. Its epoch counts the sums; regions alternate with its last bit. A
rank comes back to a region two sums later: the signals of the sum between were given by kernels
that followed those which used it. Sums are in float32 and in the ranks' order: the same bits on all
ranks, and for each element whatever the size. The epoch lies in memory, so a CUDA graph can hold
the kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import launch_options, let_next_in, wait_for_previous

MAX_RANKS = 8
MAX_PROGRAMS = 128  # all resident at once on any GPU that this is for
_REGION_BYTES = 16 << 10
MAX_BYTES = MAX_PROGRAMS * _REGION_BYTES
MAX_ROWS, MAX_ROW_BYTES = MAX_PROGRAMS, _REGION_BYTES  # of what is normed as well
_LEAST_BLOCK = 1024
_WORD_BYTES = 4

_PHASE_BYTES = MAX_RANKS * MAX_PROGRAMS * _WORD_BYTES
_EPOCHS_AT = 2 * _PHASE_BYTES
_DATA_AT = _EPOCHS_AT + MAX_PROGRAMS * _WORD_BYTES
_RESULTS_AT = _DATA_AT + 2 * MAX_BYTES
EXCHANGE_BYTES = _RESULTS_AT + 2 * MAX_BYTES  # zero before the first sum


def peer_sum(x: Tensor, bases: Tensor, rank: int, *, in_parts: bool) -> Tensor:
    """The sum of all ranks' x (contiguous, of equal shapes, at most MAX_BYTES): a new tensor.

    bases [ranks] int64, ranks a power of two: where each rank's exchange memory, its own too, lies
    for this device. Waits, on the device, for the other ranks to launch the same.
    """
    num_elements = x.numel()
    block = max(_LEAST_BLOCK, triton.next_power_of_2(triton.cdiv(num_elements, MAX_PROGRAMS)))
    out = torch.empty_like(x)
    _launch(x, x, x, out, bases, rank, block, block, 0.0, in_parts=in_parts, has_norm=False)
    return out


def peer_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    bases: Tensor,
    rank: int,
    *,
    in_parts: bool,
) -> Tensor:
    """Add `peer_sum` of x to `residual` in place and return the norm of that; both [rows, dim].

    At most MAX_ROWS rows of MAX_ROW_BYTES: a program has a row.
    """
    dim = x.shape[1]
    block = max(_LEAST_BLOCK, triton.next_power_of_2(dim))
    out = torch.empty_like(x)
    _launch(
        x, residual, weight, out, bases, rank, dim, block, eps, in_parts=in_parts, has_norm=True
    )
    return out


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    bases: Tensor,
    rank: int,
    width: int,
    block: int,
    eps: float,
    *,
    in_parts: bool,
    has_norm: bool,
) -> None:
    _peer_sum[(triton.cdiv(x.numel(), width),)](
        x,
        residual,
        weight,
        out,
        bases,
        rank,
        x.numel(),
        width,
        eps,
        RANKS=len(bases),
        BLOCK=block,
        PROGRAMS=MAX_PROGRAMS,
        REGION_BYTES=_REGION_BYTES,
        PHASE_BYTES=_PHASE_BYTES,
        EPOCHS_AT=_EPOCHS_AT,
        DATA_AT=_DATA_AT,
        RESULTS_AT=_RESULTS_AT,
        IN_PARTS=in_parts,
        HAS_NORM=has_norm,
        num_warps=min(16, block // 256),
        **launch_options(x.device),
    )


@triton.jit
def _meet(bases, own, rank, epoch, phase_at, RANKS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Tell this program of all ranks that this rank's came here, and wait for theirs.

    What the program stored before is then theirs to read, and the other way round.
    """
    tl.debug_barrier()  # all threads have stored before one of them signals
    words = tl.pointer_type(tl.int32)
    program = tl.program_id(0)
    ranks = tl.arange(0, RANKS)
    theirs = (tl.load(bases + ranks) + phase_at).to(words) + rank * PROGRAMS + program
    tl.atomic_xchg(theirs, tl.zeros((RANKS,), tl.int32) + epoch, sem="release", scope="sys")
    signals = (own + phase_at).to(words) + ranks * PROGRAMS + program
    behind = tl.min(tl.atomic_add(signals, 0, sem="acquire", scope="sys") - epoch, axis=0)
    while behind < 0:  # a difference, since epochs wrap around
        behind = tl.min(tl.atomic_add(signals, 0, sem="acquire", scope="sys") - epoch, axis=0)
    tl.debug_barrier()


@triton.jit
def _peer_sum(
    x,
    residual,
    weight,
    out,
    bases,
    rank,
    num_elements,
    width,
    eps,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    REGION_BYTES: tl.constexpr,
    PHASE_BYTES: tl.constexpr,
    EPOCHS_AT: tl.constexpr,
    DATA_AT: tl.constexpr,
    RESULTS_AT: tl.constexpr,
    IN_PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    num_mine = tl.minimum(width, num_elements - program * width)
    elements = program * width + places
    mask = places < num_mine
    own = tl.load(bases + rank)
    if HAS_NORM:
        scales = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    let_next_in(PDL)
    wait_for_previous(PDL)
    epoch_at = (own + EPOCHS_AT).to(tl.pointer_type(tl.int32)) + program
    epoch = tl.load(epoch_at) + 1
    region = ((epoch & 1) * PROGRAMS + program).to(tl.int64) * REGION_BYTES
    mine = tl.multiple_of((own + DATA_AT + region).to(out.dtype), 16)
    tl.store(mine + places, tl.load(x + elements, mask=mask), mask=mask)
    _meet(bases, own, rank, epoch, 0, RANKS, PROGRAMS)

    NUM_ADDED: tl.constexpr = BLOCK // RANKS if IN_PARTS else BLOCK
    added = tl.arange(0, NUM_ADDED)
    if IN_PARTS:
        added += rank * NUM_ADDED
    is_there = added < num_mine
    total = tl.zeros((NUM_ADDED,), tl.float32)
    for index in tl.static_range(RANKS):
        source = tl.multiple_of((tl.load(bases + index) + DATA_AT + region).to(out.dtype), 16)
        part = tl.load(source + added, mask=is_there, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    summed = total.to(out.dtype.element_ty)
    if IN_PARTS:
        for index in tl.static_range(RANKS):
            target = (tl.load(bases + index) + RESULTS_AT + region).to(out.dtype)
            tl.store(tl.multiple_of(target, 16) + added, summed, mask=is_there)
        _meet(bases, own, rank, epoch, PHASE_BYTES, RANKS, PROGRAMS)
        results = tl.multiple_of((own + RESULTS_AT + region).to(out.dtype), 16)
        summed = tl.load(results + places, mask=mask, other=0.0, cache_modifier=".cg")
    if HAS_NORM:  # as in norm_triton.py
        earlier = tl.load(residual + elements, mask=mask, other=0.0)
        value = (summed.to(tl.float32) + earlier.to(tl.float32)).to(summed.dtype)
        tl.store(residual + elements, value, mask=mask)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        tl.store(out + elements, (wide * scale * scales).to(value.dtype), mask=mask)
    else:
        tl.store(out + elements, summed, mask=mask)
    tl.store(epoch_at, epoch)
