"""Which products of 33 to 64 rows streamed_product_gluon.py computes, and how they are cut up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..row_room import LEAST_ROWS, ROWS_AT_ONCE, has_room

_LEAST_TILES, _LEAST_NARROW_TILES = 96, 72  # that keep an H200 busy
_ALIGNED = 16  # bytes, of a row


@dataclass(frozen=True, slots=True)
class Stages:
    """How a product is cut up: a program's outputs, and what it has in flight."""

    outputs: int  # of a gated product twice as many
    inputs: int  # of a stage
    count: int
    early: int  # so many of them before the kernel in front has ended


def choose_stages(x: Tensor, weight: Tensor, *, is_gated: bool) -> Stages | None:
    """What is fastest on an H200; None where that is cuBLAS."""
    if not LEAST_ROWS <= len(x) <= ROWS_AT_ONCE or x.itemsize != 2:
        return None
    if not has_room(x) or x.shape[1] * x.itemsize % _ALIGNED or x.data_ptr() % _ALIGNED:
        return None
    if is_gated:
        return Stages(64, 128, 4, 2) if len(weight) >= 2 * 64 * _LEAST_TILES else None
    if len(weight) >= 128 * _LEAST_TILES:
        return Stages(128, 128, 4, 3)
    if len(weight) >= 64 * _LEAST_TILES:
        return Stages(64, 128, 6, 4)
    return Stages(32, 128, 9, 3) if len(weight) >= 32 * _LEAST_NARROW_TILES else None
