"""Memory behind the rows of a small tensor, from which a kernel may load more rows than there are.

streamed_product_gluon.py loads 64 rows at once. Of rows beyond a tensor the hardware makes zeros,
so slowly that a product of 16 rows took up to twice the time of one of 64. Rows that are there,
whatever they hold, cost nothing: no row of a product depends on another.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_ROWS, ROWS_AT_ONCE = 33, 64  # with fewer, nobody loads 64


def empty_rows(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised [rows, ...] of the type and device of `like`; with room for 64, if fewer."""
    rows = ROWS_AT_ONCE if LEAST_ROWS <= shape[0] < ROWS_AT_ONCE else shape[0]
    return torch.empty((rows, *shape[1:]), dtype=like.dtype, device=like.device)[: shape[0]]


def has_room(x: Tensor) -> bool:
    """Whether 64 rows can be loaded from the first of x [rows, size] on."""
    num_elements = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
    return x.is_contiguous() and num_elements >= ROWS_AT_ONCE * x.shape[1]
