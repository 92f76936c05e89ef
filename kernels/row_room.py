"""Small tensors with memory after their rows, from which a kernel may load more rows than it needs.

streamed_product_gluon.py loads 64 or 128 rows at once, int4_streamed_gluon.py 8 to 64. For rows
outside of a tensor the hardware fills in zeros, so slowly that a product of 16 rows took up to
twice the time of one of 64. Rows in memory, whatever their contents, cost nothing: no row of a
product depends on another.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_ROWS, ROWS_AT_ONCE = 33, 64  # with fewer than LEAST_ROWS, no kernel loads ROWS_AT_ONCE
MOST_ROWS = 128  # with more, no kernel loads rows outside of the tensor
_LEAST_ROOM = 8


def room_of(num_rows: int) -> int:
    """The rows to allocate for `num_rows`: 8, 16, 32, 64, 128, or above that `num_rows`."""
    if num_rows > MOST_ROWS:
        return num_rows
    return max(_LEAST_ROOM, 1 << max(0, num_rows - 1).bit_length())


def empty_rows(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised [rows, ...] of the type and device of `like`, with memory for `room_of(rows)`
    rows."""
    rows = room_of(shape[0])
    return torch.empty((rows, *shape[1:]), dtype=like.dtype, device=like.device)[: shape[0]]


def has_room(x: Tensor) -> bool:
    """Whether x [rows, size] is contiguous and has memory for `room_of(rows)` rows."""
    num_elements = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.is_contiguous() and num_elements >= room_of(len(x)) * x.shape[1]
