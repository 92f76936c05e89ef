"""The products of decodes, each weight read once: cuBLAS beside our own, in a CUDA graph.

python -m baton.bench.kernels.products [--shape NAME] [--tp N] [--rows N,N] [--out FILE]

As in a model, each product follows a norm and has a weight of its own, which no cache holds. Floor:
reading the weight. Of all ways to cut it up the three best are told, and the one that models take.
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
from baton.kernels.products.streamed_product import Stages, choose_stages
from baton.kernels.products.streamed_product_gluon import streamed_product
from baton.kernels.row_room import LEAST_ROWS, ROWS_AT_ONCE, empty_rows

from ..floors.figures import ROOT, Figure, machine, table, write
from ..floors.gpu_shapes import BYTES_PER_S, SHAPES, Shape
from .graph_times import graph_times_us

_WEIGHT_BYTES = 400 << 20  # of all weights of a graph: more than the L2 cache has
_MOST_WEIGHTS = 40
_REPEATS = 9
_NUM_TOLD = 3
_COMPILERS = 12
_SHARED_BYTES = 225 << 10

Product = Callable[[Tensor, Tensor], Tensor]
Cut: TypeAlias = Tiling | Stages

_TILINGS = [
    Tiling(outputs, inputs, stages, warps)
    for outputs, inputs, stages, warps in itertools.product(
        (32, 64, 128), (64, 128), (3, 4, 6), (4, 8)
    )
    if warps == 4 or outputs == 128  # every warp has something to do
]
_STAGES = [
    Stages(outputs, inputs, count, early)
    for outputs, inputs, count, early in itertools.product(
        (32, 64, 128), (64, 128), (4, 6, 9), (0, 1, 2, 3, 4, 6, 9)
    )
    if early <= count
]


def products_of(shape: Shape, tp: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of one rank's products, by name."""
    heads, kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
    return {
        "qkv": ((heads + 2 * kv_heads) * shape.head_dim, shape.hidden),
        "out": (shape.hidden, heads * shape.head_dim),
        "gate_up": (2 * shape.inner // tp, shape.hidden),
        "down": (shape.hidden, shape.inner // tp),
        "head": (-(-shape.vocab // tp), shape.hidden),
    }


class Chain:
    """Norm and product in turn, each product with the next of some weights."""

    def __init__(self, num_rows: int, num_outputs: int, num_inputs: int) -> None:
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.num_bytes = num_outputs * num_inputs * 2
        count = min(_MOST_WEIGHTS, max(3, _WEIGHT_BYTES // self.num_bytes))
        self.weights = torch.randn(count, num_outputs, num_inputs, **options)
        self.x = empty_rows((num_rows, num_inputs), self.weights).normal_()
        self._scales = torch.rand(num_inputs, **options)

    def figure(self, name: str, product: Product) -> Figure:
        """Of a norm and a product."""
        floor_us = self.num_bytes / BYTES_PER_S * 1e6
        return Figure(name, "us", self._time_us(product), floor_us, "reading")

    def _time_us(self, product: Product) -> tuple[float, ...]:
        def run(weight: Tensor) -> None:
            product(TritonOps().rms_norm(self.x, self._scales, 1e-5), weight)

        return graph_times_us([partial(run, weight) for weight in self.weights], _REPEATS)

    def check(self, cut: Cut, is_gated: bool) -> None:
        """Raises AssertionError if a way gives something else than cuBLAS."""
        found, expected = (
            product(self.x, self.weights[0]).float()
            for product in (product_by(cut, is_gated), cublas_by(is_gated))
        )
        assert (found - expected).norm() / expected.norm() < 1e-2, cut


def product_by(cut: Cut, is_gated: bool) -> Product:
    if isinstance(cut, Tiling):
        return lambda x, weight: few_rows_product(x, weight, None, cut)
    return lambda x, weight: streamed_product(x, weight, None, cut, is_gated=is_gated)


def cublas_by(is_gated: bool) -> Product:
    if is_gated:
        return lambda x, weight: silu_and_mul(F.linear(x, weight))
    return F.linear


def cuts(num_rows: int, *, is_gated: bool) -> list[Cut]:
    """Those that fit into shared memory."""
    found: list[Cut] = []
    if num_rows <= MAX_FEW_ROWS and not is_gated:
        rows = max(16, triton.next_power_of_2(num_rows))
        found += [t for t in _TILINGS if _fits(t, t.stages, rows + t.outputs)]
    if LEAST_ROWS <= num_rows <= ROWS_AT_ONCE:
        halves = 2 if is_gated else 1
        found += [s for s in _STAGES if _fits(s, s.count, ROWS_AT_ONCE + halves * s.outputs)]
        if is_gated:
            found = [s for s in found if s.outputs < 128]
    return found


def _fits(cut: Cut, num_stages: int, num_rows: int) -> bool:
    return num_rows * cut.inputs * 2 * num_stages <= _SHARED_BYTES


def worth_it(num_outputs: int, cut: Cut) -> bool:
    """Whether enough multiprocessors have something to do."""
    least = 0.45 * torch.cuda.get_device_properties(0).multi_processor_count
    return num_outputs / cut.outputs >= least


def compile_all(rows: list[int]) -> None:
    """Into Triton's cache, in many processes at once."""
    spawned = multiprocessing.get_context("spawn")
    todo = {
        (cut, num_rows, is_gated)
        for num_rows, is_gated in itertools.product(rows, (False, True))
        for cut in cuts(num_rows, is_gated=is_gated)
    }
    with ProcessPoolExecutor(_COMPILERS, mp_context=spawned) as pool:
        list(pool.map(_compile, *zip(*todo, strict=True)))


def _compile(cut: Cut, num_rows: int, is_gated: bool) -> None:
    num_outputs = cut.outputs * (2 if is_gated else 1)
    Chain(num_rows, num_outputs, cut.inputs * 4).check(cut, is_gated)


def chosen(chain: Chain, is_gated: bool) -> Cut | None:
    """What models take; None: cuBLAS."""
    x, weight = chain.x, chain.weights[0]
    tiling = None if is_gated else few_rows_tiling(x, weight)
    return tiling or choose_stages(x, weight, is_gated=is_gated)


def measure(shape: Shape, tp: int, rows: list[int]) -> list[Figure]:
    """cuBLAS, what models take, and the best of our own."""
    figures = []
    for name, (num_outputs, num_inputs) in products_of(shape, tp).items():
        is_gated = name == "gate_up"
        for num_rows in rows:
            chain = Chain(num_rows, num_outputs, num_inputs)
            title = f"{name} {num_outputs} x {num_inputs}, {num_rows} rows"
            taken = chosen(chain, is_gated)
            found = []
            for cut in cuts(num_rows, is_gated=is_gated):
                if not worth_it(num_outputs // (2 if is_gated else 1), cut):
                    continue
                chain.check(cut, is_gated)
                is_taken = ", taken" if cut == taken else ""
                figure = chain.figure(f"{title}: {cut}{is_taken}", product_by(cut, is_gated))
                found.append(figure)
            found.sort(key=lambda figure: figure.median)
            found = [
                figure
                for index, figure in enumerate(found)
                if index < _NUM_TOLD or figure.name.endswith("taken")
            ]
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                found.append(chain.figure(f"{title}: {library}", cublas_by(is_gated)))
            found.append(chain.figure(f"{title}: the norm alone", lambda x, _: x))
            print(table(found), flush=True)
            figures += found
    return figures


def main(argv: list[str]) -> int:
    """Measure, print, write."""
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
