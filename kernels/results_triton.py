"""A step's tokens into the next one, which was put together before, and to the host.

To the host they go by a kernel that writes them into pinned memory: a copy engine does one copy
after the other, and would have KV blocks on their way to host memory (engine/kv/host_copies.py) in
front of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launched import cdiv, launched

_ROWS = 128


def fill_in(token_ids: Tensor, places: Tensor, sampled: Tensor) -> None:
    """token_ids[i] becomes sampled[places[i]], and stays where places[i] is -1: all int64, the
    first two [tokens]."""
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
    """The first n = len(host_token_ids) of token_ids int64 and logprobs float32, on the device, to
    [n] in pinned memory; there once an event behind this has come to pass. Nobody may get that
    memory before: torch's allocator does not know of the kernel."""
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
