"""Which kernel computes a product with a weight in int4, by shape and rows.

    one row      packed, in Gluon on Hopper: weights in FP8, the vector in four parts
    few rows     packed: the kernel reads four bits per weight; on Hopper, up to 64 rows, in Gluon
    more         the weight is dequantised into memory that the next product reuses, then cuBLAS

The choice was measured (`python -m baton.bench.kernels.quantised_products`): see way_table.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gluon_kernels import gluon_kernels
from ..row_room import ROWS_AT_ONCE, has_room
from .int4_triton import Int4Row, Int4Stages, Int4Tiling, dequantised, int4_product
from .int4_weights import CHUNK, Int4Weight
from .way_table import look_up

MAX_FEW_ROWS = 256
_USUAL_FEW_ROWS = 128  # where nothing was measured
_PROGRAMS = 264  # two for each multiprocessor of an H200
_LEAST_CHUNKS = 8  # of a split-K share
_ALIGNED = 16  # bytes, for TMA loads


@dataclass(frozen=True, slots=True)
class Dequantised:
    """Dequantise the weight, then cuBLAS."""


Way: TypeAlias = Int4Tiling | Int4Stages | Int4Row | Dequantised
WAYS: dict[str, type[Way]] = {
    "int4": Int4Tiling,
    "int4_streamed": Int4Stages,
    "int4_row": Int4Row,
    "dequantised": Dequantised,
}


def multiply_by(
    way: Way, x: Tensor, weight: Int4Weight, bias: Tensor | None, *, is_gated: bool = False
) -> Tensor:
    """x [rows, inputs] @ weight [outputs, inputs]^T + bias -> [rows, outputs], with this kernel.

    `is_gated`: `ops.silu_and_mul` of the product; only if the weight stays packed.
    """
    if isinstance(way, Dequantised):
        assert not is_gated
        return F.linear(x, dequantised(weight, x.dtype), bias)
    if isinstance(way, Int4Tiling):
        return int4_product(x, weight, bias, way, is_gated=is_gated)
    module = _row(x.device) if isinstance(way, Int4Row) else _streamed(x.device)
    assert module is not None
    kernel = module.int4_row_product if isinstance(way, Int4Row) else module.int4_streamed_product
    product: Tensor = kernel(x, weight, bias, way, is_gated=is_gated)
    return product


def choose(x: Tensor, weight: Int4Weight) -> Way:
    """The fastest kernel on an H200 among those that this device supports."""
    num_rows, (num_outputs, num_inputs) = len(x), weight.shape
    if num_rows > MAX_FEW_ROWS:
        return Dequantised()
    is_there = {"int4_streamed": can_stream(x, weight), "int4_row": is_row(x, weight)}
    kinds = tuple(kind for kind in WAYS if is_there.get(kind, True))
    found = look_up("int4", num_rows, num_outputs, num_inputs, kinds)
    if found is not None and weight.data.is_cuda:
        return WAYS[found.kind](**found.way)
    return (
        usual_tiling(num_rows, num_outputs, num_inputs)
        if num_rows <= _USUAL_FEW_ROWS
        else Dequantised()
    )


def can_stream(x: Tensor, weight: Int4Weight) -> bool:
    """Whether int4_streamed_gluon.py can compute this product."""
    is_small = len(x) <= ROWS_AT_ONCE and has_room(x)
    return is_small and _can_load(x, weight) and _streamed(x.device) is not None


def is_row(x: Tensor, weight: Int4Weight) -> bool:
    """Whether int4_row_gluon.py can compute this product."""
    is_even = len(x) == 1 and x.shape[1] % (2 * CHUNK) == 0
    return is_even and _can_load(x, weight) and _row(x.device) is not None


def _can_load(x: Tensor, weight: Int4Weight) -> bool:
    """Whether TMA can load x, the weight, and each half of the weight (gate and up)."""
    is_whole = weight.group_size == CHUNK and weight.data.is_contiguous()
    is_aligned = not (x.data_ptr() % _ALIGNED or len(weight) * 4 % (2 * _ALIGNED))
    return is_whole and is_aligned and x.itemsize == 2 and x.is_contiguous()


def _streamed(device: torch.device) -> ModuleType | None:
    return gluon_kernels("products.int4_streamed_gluon", device)


def _row(device: torch.device) -> ModuleType | None:
    return gluon_kernels("products.int4_row_gluon", device)


def usual_tiling(num_rows: int, num_outputs: int, num_inputs: int) -> Int4Tiling:
    """The tiling where nothing was measured. Every program reads all vectors, so many vectors
    need many outputs per program."""
    outputs = 64 if num_rows <= 16 else 128
    most = max(1, num_inputs // CHUNK // _LEAST_CHUNKS)
    wanted = _PROGRAMS * outputs // num_outputs
    shares = 1
    while 2 * shares <= min(wanted, most):
        shares *= 2
    return Int4Tiling(outputs, shares, 6 if num_rows <= 16 else 4, 4 if outputs == 64 else 8)
