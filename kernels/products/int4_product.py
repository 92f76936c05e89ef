"""How a product with a weight in int4 is computed, by shape and rows.

    few rows     packed: the kernel reads four bits a weight
    more         the weight is dequantised into memory that the next product uses again, then cuBLAS

What is fastest was measured (`python -m baton.bench.kernels.quantised_products`): see way_table.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from .int4_triton import Int4Tiling, dequantised, int4_product
from .int4_weights import CHUNK, Int4Weight
from .way_table import look_up

MAX_FEW_ROWS = 256
_USUAL_FEW_ROWS = 128  # where nothing was measured
_PROGRAMS = 264  # two for each multiprocessor of an H200
_LEAST_CHUNKS = 8  # of a share


@dataclass(frozen=True, slots=True)
class Dequantised:
    """By cuBLAS."""


Way: TypeAlias = Int4Tiling | Dequantised
WAYS: dict[str, type[Way]] = {"int4": Int4Tiling, "dequantised": Dequantised}


def multiply_by(way: Way, x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """The same in the way that is said."""
    if isinstance(way, Int4Tiling):
        return int4_product(x, weight, bias, way)
    return F.linear(x, dequantised(weight, x.dtype), bias)


def choose(num_rows: int, weight: Int4Weight) -> Way:
    """What is fastest on an H200."""
    if num_rows > MAX_FEW_ROWS:
        return Dequantised()
    num_outputs, num_inputs = weight.shape
    found = look_up("int4", num_rows, num_outputs, num_inputs, tuple(WAYS))
    if found is not None and weight.data.is_cuda:
        return WAYS[found.kind](**found.way)
    return (
        usual_tiling(num_rows, num_outputs, num_inputs)
        if num_rows <= _USUAL_FEW_ROWS
        else Dequantised()
    )


def usual_tiling(num_rows: int, num_outputs: int, num_inputs: int) -> Int4Tiling:
    """Where nothing was measured: the vectors are read by each program, so that many of them ask
    for many outputs a program."""
    outputs = 64 if num_rows <= 16 else 128
    most = max(1, num_inputs // CHUNK // _LEAST_CHUNKS)
    wanted = _PROGRAMS * outputs // num_outputs
    shares = 1
    while 2 * shares <= min(wanted, most):
        shares *= 2
    return Int4Tiling(outputs, shares, 6 if num_rows <= 16 else 4, 4 if outputs == 64 else 8)
