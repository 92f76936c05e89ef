"""Copies a step's tokens into the next step's inputs, which were built before, and to the host.

A kernel writes them to pinned host memory: a copy engine executes copies in order, so the tokens
would wait for KV blocks being copied to host memory (engine/kv/host_copies.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launched import cdiv, launched

_ROWS = 128


def fill_in(token_ids: Tensor, places: Tensor, sampled: Tensor) -> None:
    """Set token_ids[i] to sampled[places[i]] where places[i] is not -1. All int64; token_ids and
    places are [tokens]."""
    n = len(token_ids)
    _fill_in[(cdiv(n, _ROWS),)](*(token_ids, places, sampled, n), ROWS=_ROWS, num_warps=1)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _fill_in(token_ids, places, sampled, num_rows, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.load(places + rows, mask=rows < num_rows, other=-1)
    is_awaited = place >= 0
    tl.store(token_ids + rows, tl.load(sampled + place, mask=is_awaited), mask=is_awaited)


def write_results(
    token_ids: Tensor, logprobs: Tensor, host_token_ids: Tensor, host_logprobs: Tensor
) -> None:
    """Copy the first n = len(host_token_ids) of token_ids int64 and logprobs float32 on the device
    to [n] in pinned memory. They are valid once an event recorded after this call has completed.
    Until then the caller keeps that memory: torch's allocator does not track the kernel's use."""
    if n := len(host_token_ids):
        _write_results[(cdiv(n, _ROWS),)](
            *(token_ids, logprobs, host_token_ids, host_logprobs, n), ROWS=_ROWS, num_warps=1
        )


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _write_results(
    token_ids, logprobs, host_token_ids, host_logprobs, num_rows, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = rows < num_rows
    tl.store(host_token_ids + rows, tl.load(token_ids + rows, mask=exists), mask=exists)
    tl.store(host_logprobs + rows, tl.load(logprobs + rows, mask=exists), mask=exists)
