"""A step's tokens to the host, by a kernel that writes them into pinned memory.

A copy engine does one copy after the other, and would have KV blocks on their way to host memory
(engine/kv/host_copies.py) in front of the tokens; what a kernel writes goes beside them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128


def write_results(
    token_ids: Tensor, logprobs: Tensor, host_token_ids: Tensor, host_logprobs: Tensor
) -> None:
    """The first n = len(host_token_ids) of token_ids int64 and logprobs float32, on the device, to
    [n] in pinned memory; there once an event behind this has come to pass. Nobody may get that
    memory before: torch's allocator does not know of the kernel."""
    if n := len(host_token_ids):
        _write_results[(triton.cdiv(n, _ROWS),)](
            *(token_ids, logprobs, host_token_ids, host_logprobs, n), ROWS=_ROWS, num_warps=1
        )


@triton.jit(do_not_specialize=["num_rows"])
def _write_results(
    token_ids, logprobs, host_token_ids, host_logprobs, num_rows, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = rows < num_rows
    tl.store(host_token_ids + rows, tl.load(token_ids + rows, mask=exists), mask=exists)
    tl.store(host_logprobs + rows, tl.load(logprobs + rows, mask=exists), mask=exists)
