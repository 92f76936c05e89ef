"""Which products of 33 to 128 rows streamed_product_gluon.py computes, and with which tiles."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..row_room import LEAST_ROWS, MOST_ROWS, has_room, room_of

_ALIGNED = 16  # bytes, of a row's start


@dataclass(frozen=True, slots=True)
class StreamTiling:
    """Tiling of a product: outputs of a program, and its pipeline stages."""

    outputs: int  # per program; a gated product loads twice as many rows of the weight
    inputs: int  # per stage
    count: int  # of stages
    early: int  # stages whose weights are loaded before the preceding kernel has ended
    shares: int = 1  # split-K: shares of the inputs, a program each


# The fastest on an H200, by room for rows and use of the product: pairs of the least number of
# outputs of the weight and its stages, in descending order. None, or fewer outputs than in every
# pair: cuBLAS. Summands may use split-K; without stages here they are computed like products.
_FASTEST: dict[tuple[int, str], tuple[tuple[int, StreamTiling | None], ...]] = {
    (64, "product"): (
        (12_288, StreamTiling(128, 128, 4, 3)),
        (6144, StreamTiling(64, 128, 6, 4)),
        (2304, StreamTiling(32, 128, 9, 3)),
    ),
    (64, "summand"): (),
    (64, "gated"): ((12_288, StreamTiling(64, 128, 4, 2)),),
    (128, "product"): (),
    (128, "summand"): ((4353, None), (3072, StreamTiling(64, 64, 9, 5, shares=2))),
    (128, "gated"): (
        (24_576, StreamTiling(128, 64, 4, 3)),
        (12_288, StreamTiling(64, 64, 7, 4)),
    ),
}


def choose_stages(
    x: Tensor, weight: Tensor, *, is_gated: bool, is_summand: bool = False
) -> StreamTiling | None:
    """The fastest stages on an H200; None where cuBLAS is faster. Only a summand may use split-K:
    the norm that adds it to the residual stream also sums the shares."""
    if not LEAST_ROWS <= len(x) <= MOST_ROWS or x.itemsize != 2:
        return None
    if not has_room(x) or x.shape[1] * x.itemsize % _ALIGNED or x.data_ptr() % _ALIGNED:
        return None
    room, num_outputs = room_of(len(x)), len(weight)
    if is_gated:
        return _look_up(room, "gated", num_outputs)
    of_summand = _look_up(room, "summand", num_outputs) if is_summand else None
    return of_summand or _look_up(room, "product", num_outputs)


def _look_up(room: int, kind: str, num_outputs: int) -> StreamTiling | None:
    return next((stages for least, stages in _FASTEST[room, kind] if num_outputs >= least), None)
