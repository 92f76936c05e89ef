"""Sampling without filters in Triton: one pass over the logits. The reference is sampling.py.

    pass 1, (row, chunk of the vocabulary): best score and its id, largest logit, sum of exp
    pass 2, (row): the best of the chunks, and its log-probability

score = logit / temperature + gumbel(key, id); a temperature of 0 takes the logit itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import launch_options, let_next_in, wait_for_previous

_CHUNK = 2048
_MIN_TEMPERATURE = tl.constexpr(1e-5)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_BELOW_ONE = tl.constexpr(1 - 2.0**-24)


def sample_unfiltered(
    logits: Tensor, temperatures: Tensor, keys: Tensor, token_ids: Tensor, logprobs: Tensor
) -> None:
    """logits [rows, vocab] -> token_ids [rows] int64, logprobs [rows] float32.

    temperatures [rows] of a float type, 0 for greedy; keys [rows] int64 bit patterns. Waits for
    nothing.
    """
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    device = logits.device
    partial = torch.empty((4, num_rows, num_chunks), dtype=torch.float32, device=device)
    partial_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    _score[(num_rows, num_chunks)](
        logits,
        temperatures,
        keys,
        partial,
        partial_ids,
        vocab_size,
        logits.stride(0),
        partial.stride(0),
        CHUNK=_CHUNK,
        num_warps=4,
        **launch_options(device),
    )
    _choose[(num_rows,)](
        partial,
        partial_ids,
        token_ids,
        logprobs,
        num_chunks,
        partial.stride(0),
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks),
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


@triton.jit
def _score(
    logits,
    temperatures,
    keys,
    partial,
    partial_ids,
    vocab_size,
    row_stride,
    kind_stride,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_in(PDL)
    wait_for_previous(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = ids < vocab_size
    logit = tl.load(logits + row * row_stride + ids, mask=mask, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + row).to(tl.float32)
    score = logit
    if temperature > 0:
        noise = _gumbel(tl.load(keys + row), ids)
        score = tl.div_rn(logit, tl.maximum(temperature, _MIN_TEMPERATURE)) + noise
    best = tl.argmax(score, axis=0, tie_break_left=True)
    is_best = tl.arange(0, CHUNK) == best
    largest = tl.max(logit, axis=0)
    target = partial + row * tl.num_programs(1) + chunk
    tl.store(target, tl.max(score, axis=0))
    tl.store(target + kind_stride, tl.sum(tl.where(is_best, logit, 0.0), axis=0))
    tl.store(target + 2 * kind_stride, largest)
    exponent = tl.where(mask, tl.exp(logit - largest), 0.0)
    tl.store(target + 3 * kind_stride, tl.sum(exponent, axis=0))
    # Among NaN the best may lie behind the end, and the next step would look that id up.
    best_id = tl.minimum(chunk * CHUNK + best, vocab_size - 1)
    tl.store(partial_ids + row * tl.num_programs(1) + chunk, best_id)


@triton.jit
def _choose(
    partial,
    partial_ids,
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
    ids = tl.load(partial_ids + row * num_chunks + chunks, mask=mask, other=0)
    tl.store(token_ids + row, tl.sum(tl.where(is_best, ids, 0), axis=0).to(tl.int64))
    tl.store(logprobs + row, tl.sum(tl.where(is_best, logit, 0.0), axis=0) - log_sum)
