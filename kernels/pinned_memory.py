"""Pinned memory that steps upload by, taken before there are any.

torch's pinned allocator rounds sizes to powers of two. What it has none of it takes from the
system, which waits for all that the device has to do.
"""

from __future__ import annotations

import torch

_LARGE_BYTES, _MOST_BYTES = 64 << 10, 4 << 20
_NUM_SMALL, _NUM_LARGE = 16, 4  # buffers of a size that two steps may have at once


def reserve_pinned_memory() -> None:
    """Let torch have what two steps in flight may need, 34 MB. It keeps what is freed until a graph
    is captured."""
    sizes = [1 << n for n in range(_MOST_BYTES.bit_length())]
    held = [
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for size in sizes
        for _ in range(_NUM_SMALL if size < _LARGE_BYTES else _NUM_LARGE)
    ]
    del held  # all at once: one that is free would be given out again
