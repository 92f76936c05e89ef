"""GEMMs of decodes, each weight read once: cuBLAS beside our kernels, in a CUDA graph.

python -m baton.bench.kernels.products [--shape NAME] [--tp N] [--rows N,N] [--out FILE]

As in a model, each GEMM has its own weight, which no cache holds, and a norm before it, or after it
if the norm adds its output to the residual stream. Floor: reading the weight. Of all candidates the
three fastest are printed, and the one that models choose; if none, models use cuBLAS.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from baton.kernels.layers.ops_triton import TritonOps, silu_and_mul
from baton.kernels.products.gemv_triton import (
    MAX_FEW_ROWS,
    Tiling,
    few_rows_product,
    few_rows_tiling,
)
from baton.kernels.products.streamed_product import StreamTiling, choose_stages
from baton.kernels.products.streamed_product_gluon import streamed_product, streamed_summands
from baton.kernels.products.weights import Summands
from baton.kernels.row_room import LEAST_ROWS, MOST_ROWS, ROWS_AT_ONCE, empty_rows, room_of

from ..floors.figures import ROOT, Figure, machine, table, write
from ..floors.gpu_shapes import BYTES_PER_S, SHAPES, Shape
from .graph_times import graph_times_us

_WEIGHT_BYTES = 400 << 20  # all weights of a graph together: more than the L2 cache holds
_MOST_WEIGHTS = 40
_REPEATS = 9
_NUM_TOLD = 3
_COMPILERS = 12
_SHARED_BYTES = 225 << 10

Product = Callable[[Tensor, Tensor], Tensor | Summands]
Cut: TypeAlias = Tiling | StreamTiling

_TILINGS = [
    Tiling(outputs, inputs, stages, warps)
    for outputs, inputs, stages, warps in itertools.product(
        (32, 64, 128), (64, 128), (3, 4, 6), (4, 8)
    )
    if warps == 4 or outputs == 128  # so that every warp has work
]
_STAGES = [
    StreamTiling(outputs, inputs, count, early)
    for outputs, inputs, count, early in itertools.product(
        (32, 64, 128), (64, 128), (4, 6, 9), (0, 1, 2, 3, 4, 6, 9)
    )
    if early <= count
]
_STAGES_OF_SUMMANDS = [
    StreamTiling(64, 128, 6, 3, shares=2),
    StreamTiling(64, 128, 6, 4, shares=2),
    StreamTiling(128, 128, 4, 2, shares=4),
    StreamTiling(128, 128, 4, 3, shares=4),
]
# For more than 64 rows, candidates that occupy most multiprocessors and reread inputs little.
_STAGES_OF_MANY = {
    "product": [
        *(StreamTiling(64, 128, 4, early) for early in (2, 3, 4)),
        *(StreamTiling(64, 64, 9, early) for early in (4, 6)),
        StreamTiling(32, 128, 5, 3),
        StreamTiling(128, 64, 7, 3),
        StreamTiling(128, 128, 3, 2),
        *(StreamTiling(256, 64, 4, early) for early in (2, 3)),
    ],
    "summand": [
        StreamTiling(64, 128, 4, 3),
        *(StreamTiling(64, 128, 4, early, shares=2) for early in (2, 3)),
        StreamTiling(64, 64, 9, 5, shares=2),
        *(StreamTiling(128, 64, 7, early, shares=4) for early in (2, 3, 5)),
        StreamTiling(128, 128, 3, 2, shares=4),
        StreamTiling(128, 64, 7, 3, shares=2),
        *(StreamTiling(256, 64, 4, early, shares=8) for early in (2, 3)),
        StreamTiling(256, 64, 4, 3, shares=6),
    ],
    "gated": [
        *(StreamTiling(128, 64, 4, early) for early in (1, 2, 3, 4)),
        StreamTiling(128, 32, 9, 5),
        *(StreamTiling(64, 64, 7, early) for early in (2, 4, 6)),
        *(StreamTiling(64, 128, 3, early) for early in (1, 2, 3)),
    ],
}
_KINDS = {"out": "summand", "gate_up": "gated", "down": "summand"}  # else "product"


def products_of(shape: Shape, tp: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of one rank's GEMMs, by name."""
    heads, kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
    return {
        "qkv": ((heads + 2 * kv_heads) * shape.head_dim, shape.hidden),
        "out": (shape.hidden, heads * shape.head_dim),
        "gate_up": (2 * shape.inner // tp, shape.hidden),
        "down": (shape.hidden, shape.inner // tp),
        "head": (-(-shape.vocab // tp), shape.hidden),
    }


class Chain:
    """Alternating norms and GEMMs, each GEMM with the next of several weights."""

    def __init__(self, num_rows: int, num_outputs: int, num_inputs: int, kind: str) -> None:
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.kind = kind
        self.num_bytes = num_outputs * num_inputs * 2
        count = min(_MOST_WEIGHTS, max(3, _WEIGHT_BYTES // self.num_bytes))
        self.weights = torch.randn(count, num_outputs, num_inputs, **options)
        self.x = empty_rows((num_rows, num_inputs), self.weights).normal_()
        self._scales = torch.rand(num_outputs if kind == "summand" else num_inputs, **options)
        self._residual = torch.zeros(num_rows, num_outputs, **options)

    def figure(self, name: str, product: Product) -> Figure:
        """The time of a norm and a GEMM."""
        floor_us = self.num_bytes / BYTES_PER_S * 1e6
        return Figure(name, "us", self._time_us(product), floor_us, "reading")

    def _time_us(self, product: Product) -> tuple[float, ...]:
        ops = TritonOps()

        def run(weight: Tensor) -> None:
            if self.kind == "summand":
                ops.add_rms_norm(product(self.x, weight), self._residual, self._scales, 1e-5)
            else:
                normed = ops.rms_norm(self.x, self._scales, 1e-5)
                assert isinstance(normed, Tensor)
                product(normed, weight)

        return graph_times_us([partial(run, weight) for weight in self.weights], _REPEATS)

    def nothing(self, x: Tensor, _: Tensor) -> Tensor:
        """A GEMM that takes no time."""
        return self._residual if self.kind == "summand" else x

    def check(self, cut: Cut) -> None:
        """Raises AssertionError if a candidate's result differs from cuBLAS's."""
        found, expected = (
            _summed(product(self.x, self.weights[0]))
            for product in (product_by(cut, self.kind), cublas_by(self.kind))
        )
        assert (found - expected).norm() / expected.norm() < 1e-2, cut


def _summed(product: Tensor | Summands) -> Tensor:
    if isinstance(product, Tensor):
        return product.float()
    return product.data.float().unflatten(0, (-1, product.count)).sum(dim=1)


def product_by(cut: Cut, kind: str) -> Product:
    if isinstance(cut, Tiling):
        return lambda x, weight: few_rows_product(x, weight, None, cut)
    if cut.shares == 1:
        return lambda x, weight: streamed_product(x, weight, None, cut, is_gated=kind == "gated")
    return lambda x, weight: Summands(
        streamed_summands(x, weight, None, cut).flatten(0, 1), cut.shares
    )


def cublas_by(kind: str) -> Product:
    if kind == "gated":
        return lambda x, weight: silu_and_mul(F.linear(x, weight))
    return F.linear


def cuts(num_rows: int, kind: str) -> list[Cut]:
    """The candidates that fit into shared memory."""
    found: list[Cut] = []
    if num_rows <= MAX_FEW_ROWS and kind != "gated":
        rows = max(16, triton.next_power_of_2(num_rows))
        found += [t for t in _TILINGS if _fits(t, t.stages, rows + t.outputs)]
    if LEAST_ROWS <= num_rows <= ROWS_AT_ONCE:
        halves = 2 if kind == "gated" else 1
        found += [s for s in _STAGES if _fits(s, s.count, ROWS_AT_ONCE + halves * s.outputs)]
        if kind == "gated":
            found = [s for s in found if s.outputs < 128]
        if kind == "summand":
            found += _STAGES_OF_SUMMANDS
    if ROWS_AT_ONCE < num_rows <= MOST_ROWS:
        found += _STAGES_OF_MANY[kind]
    return found


def _fits(cut: Cut, num_stages: int, num_rows: int) -> bool:
    return num_rows * cut.inputs * 2 * num_stages <= _SHARED_BYTES


def worth_it(num_outputs: int, cut: Cut) -> bool:
    """Whether enough multiprocessors have work."""
    least = 0.45 * torch.cuda.get_device_properties(0).multi_processor_count
    shares = cut.shares if isinstance(cut, StreamTiling) else 1
    return num_outputs * shares / cut.outputs >= least


def compile_all(rows: list[int]) -> None:
    """Compile all candidates into Triton's cache, in many processes."""
    spawned = multiprocessing.get_context("spawn")
    todo = {
        (cut, room_of(num_rows) if num_rows > MAX_FEW_ROWS else num_rows, kind == "gated")
        for num_rows, kind in itertools.product(rows, ("product", "summand", "gated"))
        for cut in cuts(num_rows, kind)
    }
    with ProcessPoolExecutor(_COMPILERS, mp_context=spawned) as pool:
        list(pool.map(_compile, *zip(*todo, strict=True)))


def _compile(cut: Cut, num_rows: int, is_gated: bool) -> None:
    num_outputs = cut.outputs * (2 if is_gated else 1)
    kind = "gated" if is_gated else "product"
    Chain(num_rows, num_outputs, cut.inputs * 8, kind).check(cut)


def chosen(chain: Chain) -> Cut | None:
    """The candidate that models choose; None: cuBLAS."""
    x, weight, kind = chain.x, chain.weights[0], chain.kind
    tiling = None if kind == "gated" else few_rows_tiling(x, weight)
    is_summand = kind == "summand"
    return tiling or choose_stages(x, weight, is_gated=kind == "gated", is_summand=is_summand)


def measure(shape: Shape, tp: int, rows: list[int]) -> list[Figure]:
    """The figures of cuBLAS, of the models' choice and of our fastest candidates."""
    figures = []
    for name, (num_outputs, num_inputs) in products_of(shape, tp).items():
        kind = _KINDS.get(name, "product") if tp == 1 or name == "gate_up" else "product"
        for num_rows in rows:
            chain = Chain(num_rows, num_outputs, num_inputs, kind)
            title = f"{name} {num_outputs} x {num_inputs}, {num_rows} rows"
            taken = chosen(chain)
            ways = cuts(num_rows, kind)
            if taken is not None and taken not in ways:
                ways.append(taken)
            found = []
            for cut in ways:
                is_worth_it = worth_it(num_outputs // (2 if kind == "gated" else 1), cut)
                if not is_worth_it and cut != taken:
                    continue
                chain.check(cut)
                is_taken = ", taken" if cut == taken else ""
                figure = chain.figure(f"{title}: {cut}{is_taken}", product_by(cut, kind))
                found.append(figure)
            found.sort(key=lambda figure: figure.median)
            found = [
                figure
                for index, figure in enumerate(found)
                if index < _NUM_TOLD or figure.name.endswith("taken")
            ]
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                found.append(chain.figure(f"{title}: {library}", cublas_by(kind)))
            found.append(chain.figure(f"{title}: the norm alone", chain.nothing))
            print(table(found), flush=True)
            figures += found
    return figures


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", default=f"16,32,{MAX_FEW_ROWS}")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "products.json")
    arguments = parser.parse_args(argv)
    rows = [int(number) for number in arguments.rows.split(",")]
    where = machine() | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    compile_all(rows)
    figures = measure(SHAPES[arguments.shape], arguments.tp, rows)
    write(arguments.out, {f"tp {arguments.tp}": figures}, where, "kernels.products")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
