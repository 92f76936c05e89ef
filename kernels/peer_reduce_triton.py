"""All-reduces of small tensors over GPUs, in one kernel each, without a library: ranks write to
peers' memory, and poll the values themselves to see whether they have arrived.

    exchange memory of a rank, mapped by all:
    | state [programs, 3] | slots [3, programs, ranks, region] | results [3, programs, region] |

    at once     x ─► all ranks' slots ─ arrived? ─► add up the slots ─► out
    in parts    x ─► a part to each rank's slots ─ arrived? ─► add up ─► all ranks' results
                                                   ─ arrived? ─► out

At once, each rank sends (ranks - 1) times the tensor over its links; in parts at most twice the
tensor, but it waits twice. The sum may be added to the residual stream and normalised in the same
kernel, one row per program; a product kernel may then write x to the slots itself. Program c of
every rank processes chunk c of x, uses region c only, and exchanges data with programs c only.

A word not written yet is ABSENT: minus zero, which no rank sends (it sends plus zero). So a sum
waits for one write over the link, where a flag after the data would be a second one (Lamport's
method, as in TensorRT-LLM's all-reduces).

Three buffers take turns, counted by each program: while one is written, the previous sum's buffer
is reset to absent. A rank writes to that buffer two sums later: by then it has received its peer's
data of the sum in between (or results made of it), sent by a kernel after the one that reset it.
Sums are in float32 and in rank order: the same bits on all ranks, and for an element at any tensor
size. The turn is in device memory, so a CUDA graph can contain the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import launch_options, let_next_in, wait_for_previous
from .launched import cdiv, launched, next_power_of_2
from .row_room import empty_rows

MAX_RANKS = 8
MAX_PROGRAMS = 128  # all resident at once on every supported GPU
_REGION_BYTES = 16 << 10
MAX_BYTES = MAX_PROGRAMS * _REGION_BYTES
MAX_ROWS, MAX_ROW_BYTES = MAX_PROGRAMS, _REGION_BYTES  # with a norm
_LEAST_BLOCK = 1024
_NUM_BUFFERS = 3
_STATE_WORDS = 3  # turn; 2-byte halves of the last sum in each slot; the same in the results
_ABSENT = {2: -(1 << 15), 4: -(1 << 31) + (1 << 15)}  # by word size; memory starts as the first

SLOTS_AT = MAX_PROGRAMS * _STATE_WORDS * 4
_RESULTS_AT = SLOTS_AT + _NUM_BUFFERS * MAX_PROGRAMS * MAX_RANKS * _REGION_BYTES
EXCHANGE_BYTES = _RESULTS_AT + _NUM_BUFFERS * MAX_PROGRAMS * _REGION_BYTES

# The same as constants of kernels.
_PROGRAMS, _MOST_RANKS = tl.constexpr(MAX_PROGRAMS), tl.constexpr(MAX_RANKS)
_REGION, _STATE = tl.constexpr(_REGION_BYTES), tl.constexpr(_STATE_WORDS)
_SLOTS, _RESULTS = tl.constexpr(SLOTS_AT), tl.constexpr(_RESULTS_AT)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's access to the exchange memories. `bases` [ranks] int64, ranks a power of two: the
    address of each rank's memory, its own included, as mapped on this device."""

    bases: Tensor
    rank: int

    @property
    def num_ranks(self) -> int:
        return len(self.bases)

    def pitch(self, width: int, *, in_parts: bool) -> int:
        """Elements from one rank's part to the next, of `width` per program; 0 if not in parts."""
        return _block(width) // self.num_ranks if in_parts else 0


def prepare_exchange(memory: Tensor) -> None:
    """Initialise a rank's memory, [EXCHANGE_BYTES] uint8 of zeros, before peers can write to it."""
    memory[SLOTS_AT:].view(torch.int16).fill_(_ABSENT[2])


def peer_sum(x: Tensor, exchange: Exchange, *, in_parts: bool) -> Tensor:
    """The sum of all ranks' x (contiguous, of equal shapes, at most MAX_BYTES), in a new tensor.

    The kernel waits until the other ranks have launched the same sum.
    """
    width = _block(cdiv(x.numel(), MAX_PROGRAMS))
    out = torch.empty_like(x)
    _launch(x, x, x, out, exchange, width, 0.0, in_parts=in_parts, has_norm=False)
    return out


def peer_add_rms_norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    exchange: Exchange,
    *,
    in_parts: bool,
) -> Tensor:
    """Add `peer_sum` of x to `residual` in place and return the norm of the result; both
    [rows, dim].

    At most MAX_ROWS rows of MAX_ROW_BYTES: one row per program. If x is None, the previous kernels
    on all ranks have sent the summands: `streamed_product_gluon.send_streamed_product`.
    """
    dim = residual.shape[1]
    out = empty_rows(residual.shape, residual)
    _launch(x, residual, weight, out, exchange, dim, eps, in_parts=in_parts, has_norm=True)
    return out


def _block(width: int) -> int:
    return max(_LEAST_BLOCK, next_power_of_2(width))


def _launch(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    exchange: Exchange,
    width: int,
    eps: float,
    *,
    in_parts: bool,
    has_norm: bool,
) -> None:
    block, pitch = _block(width), exchange.pitch(width, in_parts=in_parts)
    num_elements = out.numel()
    _peer_sum[(cdiv(num_elements, width),)](
        residual if x is None else x,
        residual,
        weight,
        out,
        exchange.bases,
        exchange.rank,
        num_elements,
        width,
        eps,
        IS_SENT=x is None,
        RANKS=exchange.num_ranks,
        BLOCK=block,
        NUM_ADDED=pitch or block,  # elements summed by one rank
        PITCH=pitch,
        WORD=tl.int16 if out.itemsize == 2 else tl.int32,
        HALVES=out.itemsize // 2,
        ABSENT=_ABSENT[out.itemsize],
        HAS_NORM=has_norm,
        num_warps=min(16, block // 256),
        **launch_options(out.device),
    )


@triton.jit
def state_of(own, program):
    """Pointer to a program's state in its rank's exchange memory at `own`; the turn comes first."""
    return own.to(tl.pointer_type(tl.int32)) + program * _STATE


@triton.jit
def slot_at(turn, program, rank):
    """Byte offset, in the exchange memory, of a rank's summand for a program."""
    return _SLOTS + ((turn * _PROGRAMS + program) * _MOST_RANKS + rank).to(tl.int64) * _REGION


@triton.jit
def _result_at(turn, program):
    """Byte offset, in the exchange memory, of a program's result."""
    return _RESULTS + (turn * _PROGRAMS + program).to(tl.int64) * _REGION


@triton.jit
def _sent(values, WORD: tl.constexpr, ABSENT: tl.constexpr):
    """Values as words, with plus zero in place of minus zero (ABSENT)."""
    words = values.to(WORD, bitcast=True)
    return tl.where(words == ABSENT, 0, words).to(WORD)


@triton.jit
def _words_at(addresses, WORD: tl.constexpr):
    """Pointers to exchange memory at addresses [n, 1], aligned for vectorised access."""
    return tl.multiple_of(addresses.to(tl.pointer_type(WORD)), (16, 16))


@triton.jit
def _arrived(words_at, mask, TYPE: tl.constexpr, ABSENT: tl.constexpr):
    """Wait until no word is absent; return the values."""
    words = tl.load(words_at, mask=mask, other=0, volatile=True)
    while tl.max((words == ABSENT).to(tl.int32), axis=None) > 0:
        words = tl.load(words_at, mask=mask, other=0, volatile=True)
    return words.to(TYPE, bitcast=True)


@triton.jit
def _in_order(parts, RANKS: tl.constexpr, COUNT: tl.constexpr):
    """The sum of [RANKS, COUNT] over the ranks, in rank order, each element in one thread."""
    if RANKS == 2:
        a, b = tl.split(tl.permute(parts, (1, 0)))
        total = a + b
    elif RANKS == 4:
        low, high = tl.split(tl.permute(tl.reshape(parts, (2, 2, COUNT)), (2, 1, 0)))
        a, b = tl.split(low)
        c, d = tl.split(high)
        total = a + b + c + d
    else:
        tl.static_assert(RANKS == 8)
        low, high = tl.split(tl.permute(tl.reshape(parts, (2, 2, 2, COUNT)), (3, 2, 1, 0)))
        low_low, low_high = tl.split(low)
        high_low, high_high = tl.split(high)
        a, b = tl.split(low_low)
        c, d = tl.split(low_high)
        total = a + b + c + d
        a, b = tl.split(high_low)
        c, d = tl.split(high_high)
        total = total + a + b + c + d
    return total


@triton.jit
def _clear(address, num_halves, STEP: tl.constexpr):
    """Set the first `num_halves` halves at an address, rounded up to 8, to absent; those beyond
    `num_halves` are absent already."""
    halves = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
    end = tl.cdiv(num_halves, 8) * 8  # for vectorised stores
    for first in range(0, end, STEP):
        places = first + tl.arange(0, STEP)
        tl.store(halves + places, tl.full((STEP,), -32768, tl.int16), mask=places < end)


@launched
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
    IS_SENT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_ADDED: tl.constexpr,
    PITCH: tl.constexpr,
    WORD: tl.constexpr,
    HALVES: tl.constexpr,
    ABSENT: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    num_mine = tl.minimum(width, num_elements - program * width)
    elements = program * width + places
    mask = places < num_mine
    ranks = tl.arange(0, RANKS)[:, None]
    added = tl.arange(0, NUM_ADDED)[None, :]
    targets = (ranks + rank) % RANKS  # each rank begins with a different target
    target_bases = tl.load(bases + targets)
    own = tl.load(bases + rank)
    if HAS_NORM:
        scales = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    let_next_in(PDL)
    wait_for_previous(PDL)
    state = state_of(own, program)
    turn = tl.load(state)
    slot_halves, result_halves = tl.load(state + 1), tl.load(state + 2)
    if not IS_SENT:
        pieces = targets * PITCH + added
        is_mine = pieces < num_mine
        values = tl.load(x + program * width + pieces, mask=is_mine, other=0.0)
        slots = target_bases + slot_at(turn, program, rank)
        tl.store(_words_at(slots, WORD) + added, _sent(values, WORD, ABSENT), mask=is_mine)

    # Reset the buffers of the previous sum while this sum's data is in flight.
    before = (turn + 2) % 3
    for index in tl.static_range(RANKS):
        _clear(own + slot_at(before, program, index), slot_halves, BLOCK)
    _clear(own + _result_at(before, program), result_halves, BLOCK)

    own_slots = own + slot_at(turn, program, ranks)
    is_there = rank * PITCH + added < num_mine
    parts = _arrived(_words_at(own_slots, WORD) + added, is_there, out.dtype.element_ty, ABSENT)
    total = _in_order(parts.to(tl.float32), RANKS, NUM_ADDED)
    summed = total.to(out.dtype.element_ty)
    if PITCH > 0:
        result = _result_at(turn, program)
        results = _words_at(target_bases + result + rank * PITCH * HALVES * 2, WORD)
        words = tl.broadcast_to(_sent(summed, WORD, ABSENT)[None, :], (RANKS, NUM_ADDED))
        tl.store(results + added, words, mask=is_there)
        whole = (own + result).to(tl.pointer_type(WORD))
        summed = _arrived(tl.multiple_of(whole, 16) + places, mask, out.dtype.element_ty, ABSENT)
    if HAS_NORM:  # as in ops_triton.py
        earlier = tl.load(residual + elements, mask=mask, other=0.0)
        value = (summed.to(tl.float32) + earlier.to(tl.float32)).to(summed.dtype)
        tl.store(residual + elements, value, mask=mask)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        tl.store(out + elements, (wide * scale * scales).to(value.dtype), mask=mask)
    else:
        tl.store(out + elements, summed, mask=mask)
    tl.store(state, (turn + 1) % 3)
    num_parts = tl.minimum(tl.maximum(num_mine - rank * PITCH, 0), NUM_ADDED)
    tl.store(state + 1, num_parts * HALVES)
    tl.store(state + 2, num_mine * HALVES if PITCH > 0 else 0)
