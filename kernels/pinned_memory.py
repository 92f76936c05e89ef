"""Reserves the pinned memory for the uploads of steps before the first step.

torch's pinned allocator rounds sizes to powers of two. If it has no free buffer of a size, it
allocates one from the system, which waits until the device has finished all queued work.
"""

from __future__ import annotations

import torch

_LARGE_BYTES, _MOST_BYTES = 64 << 10, 4 << 20
_NUM_SMALL, _NUM_LARGE = 16, 4  # buffers per size that two steps may use at once


def reserve_pinned_memory() -> None:
    """Fill torch's pinned allocator with the buffers that two steps in flight may need, 34 MB. It
    keeps freed buffers until a graph is captured."""
    sizes = [1 << n for n in range(_MOST_BYTES.bit_length())]
    held = [
        torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for size in sizes
        for _ in range(_NUM_SMALL if size < _LARGE_BYTES else _NUM_LARGE)
    ]
    del held  # all together: a buffer freed earlier would be allocated again
