"""Sampling without filters in Triton: one pass over the logits. The reference is sampling.py.

    pass 1, (row, chunk of the vocabulary): best score and its id, largest logit, sum of exp
    (ranks: every rank gets the chunks of all)
    pass 2, (row): the best of the chunks, and its log-probability

score = logit / temperature + gumbel(key, id), or the logit itself at temperature 0. Ranks that
share the vocabulary all-reduce the results of their chunks, each with zeros in the places of the
others: logits are not exchanged, and all ranks choose from identical bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dependent_launch import launch_options, let_next_in, wait_for_previous
from ..launched import cdiv, launched, next_power_of_2

_CHUNK = 2048
_MAX_VOCAB = 1 << 24  # ids are passed as float32, exact below this
_MIN_TEMPERATURE = tl.constexpr(1e-5)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_BELOW_ONE = tl.constexpr(1 - 2.0**-24)


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A rank's part of the vocabulary: with n logits on each rank, ids from `rank` * n on.

    Ids from `vocab_size` on are padding. `add_up` is an all-reduce (sum): all ranks must call it.
    """

    rank: int
    num_ranks: int
    vocab_size: int
    add_up: Callable[[Tensor], Tensor]


def sample_unfiltered(
    logits: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    token_ids: Tensor,
    logprobs: Tensor,
    part: VocabularyPart | None = None,
) -> None:
    """logits [rows, vocab], or the rank's `part` of them -> token_ids [rows] int64, logprobs [rows]
    float32, the same on all ranks.

    temperatures [rows] of a float type, 0 for greedy; keys [rows] int64 bit patterns. Does not wait
    for the device.
    """
    num_rows, width = logits.shape
    rank, num_ranks, vocab_size = 0, 1, width
    if part is not None:
        rank, num_ranks, vocab_size = part.rank, part.num_ranks, part.vocab_size
    assert vocab_size <= _MAX_VOCAB
    num_own = cdiv(width, _CHUNK)
    num_chunks = num_ranks * num_own
    device = logits.device
    partial = torch.empty((5, num_rows, num_chunks), dtype=torch.float32, device=device)
    _score[(num_rows, num_own)](
        logits,
        temperatures,
        keys,
        partial,
        rank,
        width,
        vocab_size,
        logits.stride(0),
        partial.stride(0),
        RANKS=num_ranks,
        CHUNK=_CHUNK,
        num_warps=4,
        **launch_options(device),
    )
    if part is not None:
        partial = part.add_up(partial)
    _choose[(num_rows,)](
        partial,
        token_ids,
        logprobs,
        num_chunks,
        partial.stride(0),
        CHUNKS_PADDED=next_power_of_2(num_chunks),
        num_warps=1,
        **launch_options(device),
    )


@triton.jit
def _gumbel(key, ids):
    golden = tl.full((), _GOLDEN, tl.uint64)
    bits = key.to(tl.uint64, bitcast=True) + (ids + 1).to(tl.uint64) * golden
    mix_1, mix_2 = tl.full((), _MIX_1, tl.uint64), tl.full((), _MIX_2, tl.uint64)
    bits = (bits ^ (bits >> 30)) * mix_1
    bits = (bits ^ (bits >> 27)) * mix_2
    bits = bits ^ (bits >> 31)
    v = (bits >> 1).to(tl.int64).to(tl.float32) * 2.0**-63 + 2.0**-64
    v = tl.minimum(v, _LARGEST_BELOW_ONE)
    # log1p(-v), exact to a few ulp although 1 - v is rounded (Goldberg 1991, theorem 4).
    rest = 1.0 - v
    log1p = tl.where(rest == 1.0, -v, tl.log(rest) * (v / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(-log1p)


@launched
@triton.jit
def _score(
    logits,
    temperatures,
    keys,
    partial,
    rank,
    width,
    vocab_size,
    row_stride,
    kind_stride,
    RANKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = rank * width + columns
    mask = (columns < width) & (ids < vocab_size)
    source = logits + row * row_stride + columns
    logit = tl.load(source, mask=mask, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row).to(tl.float32)
    score = logit
    if temperature > 0:
        noise = _gumbel(tl.load(keys + row), ids)
        score = tl.div_rn(logit, tl.maximum(temperature, _MIN_TEMPERATURE)) + noise
    best = tl.argmax(score, axis=0, tie_break_left=True)
    is_best = tl.arange(0, CHUNK) == best
    largest = tl.max(logit, axis=0)
    best_score = tl.max(score, axis=0)
    best_logit = tl.sum(tl.where(is_best, logit, 0.0), axis=0)
    # If all logits of a chunk are -inf, so is `largest`, and the difference would be NaN.
    is_impossible = logit == float("-inf")
    total = tl.sum(tl.where(is_impossible, 0.0, tl.exp(logit - largest)), axis=0)
    # With NaN `best` may be beyond the vocabulary, and the next step would look up that id.
    best_id = tl.minimum(rank * width + chunk * CHUNK + best, vocab_size - 1).to(tl.float32)
    target = partial + row * RANKS * tl.num_programs(1) + chunk
    for each in tl.static_range(RANKS):
        is_own = rank == each
        tl.store(target, tl.where(is_own, best_score, 0.0))
        tl.store(target + kind_stride, tl.where(is_own, best_logit, 0.0))
        tl.store(target + 2 * kind_stride, tl.where(is_own, largest, 0.0))
        tl.store(target + 3 * kind_stride, tl.where(is_own, total, 0.0))
        tl.store(target + 4 * kind_stride, tl.where(is_own, best_id, 0.0))
        target += tl.num_programs(1)


@launched
@triton.jit
def _choose(
    partial,
    token_ids,
    logprobs,
    num_chunks,
    kind_stride,
    CHUNKS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS_PADDED)
    mask = chunks < num_chunks
    source = partial + row * num_chunks + chunks
    score = tl.load(source, mask=mask, other=float("-inf"))
    logit = tl.load(source + kind_stride, mask=mask, other=0.0)
    largest = tl.load(source + 2 * kind_stride, mask=mask, other=float("-inf"))
    total = tl.load(source + 3 * kind_stride, mask=mask, other=0.0)
    is_best = chunks == tl.argmax(score, axis=0, tie_break_left=True)
    top = tl.max(largest, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
    ids = tl.load(source + 4 * kind_stride, mask=mask, other=0.0)
    tl.store(token_ids + row, tl.sum(tl.where(is_best, ids, 0.0), axis=0).to(tl.int64))
    tl.store(logprobs + row, tl.sum(tl.where(is_best, logit, 0.0), axis=0) - log_sum)
