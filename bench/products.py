"""The products of decodes, each weight read once: cuBLAS beside Triton's, in a CUDA graph.

python -m baton.bench.products [--shape NAME] [--tp N] [--rows N,N] [--out FILE]

As in a model, each product follows a norm and has a weight of its own, which no cache holds. Floor:
reading the weight. Of all tilings the three best are told, and the one that models take.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from baton.kernels.activation_triton import silu_and_mul
from baton.kernels.gemv_triton import MAX_FEW_ROWS, Tiling, few_rows_product, few_rows_tiling
from baton.kernels.norm_triton import rms_norm
from baton.kernels.ops_triton import TritonOps

from .figures import ROOT, Figure, machine, table, write
from .gpu_shapes import BYTES_PER_S, SHAPES, Shape

_WEIGHT_BYTES = 400 << 20  # of all weights of a graph: more than the L2 cache has
_MOST_WEIGHTS = 40
_REPEATS = 9
_NUM_TOLD = 3
_COMPILERS = 12
_SHARED_BYTES = 200 << 10
_TILINGS = [
    Tiling(outputs, inputs, stages, warps)
    for outputs, inputs, stages, warps in itertools.product(
        (32, 64, 128), (64, 128), (3, 4, 6), (4, 8)
    )
    if warps == 4 or outputs == 128  # every warp has something to do
]

Product = Callable[[Tensor, Tensor], Tensor]


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
        self.x = torch.randn(num_rows, num_inputs, **options)
        self._scales = torch.rand(num_inputs, **options)

    def figure(self, name: str, product: Product) -> Figure:
        """Of a norm and a product."""
        floor_us = self.num_bytes / BYTES_PER_S * 1e6
        return Figure(name, "us", self._time_us(product), floor_us, "reading")

    def _time_us(self, product: Product) -> tuple[float, ...]:
        self._run(product)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(product)
        graph.replay()
        samples = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / len(self.weights) * 1e3)
        return tuple(samples)

    def _run(self, product: Product) -> None:
        for weight in self.weights:
            product(rms_norm(self.x, self._scales, 1e-5), weight)

    def check(self, tiling: Tiling) -> None:
        """Raises AssertionError if a tiling gives something else than cuBLAS."""
        found, expected = (
            product(self.x, self.weights[0]).float() for product in (tiled(tiling), cublas)
        )
        assert (found - expected).norm() / expected.norm() < 1e-2, tiling


def tiled(tiling: Tiling) -> Product:
    return lambda x, weight: few_rows_product(x, weight, None, tiling)


def cublas(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def cublas_gated(x: Tensor, weight: Tensor) -> Tensor:
    return silu_and_mul(F.linear(x, weight))


def taken_gated(x: Tensor, weight: Tensor) -> Tensor:
    return TritonOps().gated_linear(x, weight, None)


def tilings(num_outputs: int, num_rows: int) -> list[Tiling]:
    """Those that could be the best one, and fit into shared memory."""
    least = 0.6 * torch.cuda.get_device_properties(0).multi_processor_count
    enough = [tiling for tiling in _TILINGS if num_outputs / tiling.outputs >= least]
    return [tiling for tiling in enough if _fits(tiling, num_rows)]


def _fits(tiling: Tiling, num_rows: int) -> bool:
    stage_bytes = (tiling.outputs + triton.next_power_of_2(num_rows)) * tiling.inputs * 2
    return stage_bytes * tiling.stages <= _SHARED_BYTES


def compile_all(rows: list[int]) -> None:
    """Into Triton's cache, in many processes at once."""
    spawned = multiprocessing.get_context("spawn")
    pairs = [pair for pair in itertools.product(_TILINGS, rows) if _fits(*pair)]
    with ProcessPoolExecutor(_COMPILERS, mp_context=spawned) as pool:
        list(pool.map(_compile, *zip(*pairs, strict=True)))


def _compile(tiling: Tiling, num_rows: int) -> None:
    Chain(num_rows, tiling.outputs, tiling.inputs * 4).check(tiling)


def measure(shape: Shape, tp: int, rows: list[int]) -> list[Figure]:
    """cuBLAS, what models take, and the best tilings."""
    figures = []
    for name, (num_outputs, num_inputs) in products_of(shape, tp).items():
        for num_rows in rows:
            chain = Chain(num_rows, num_outputs, num_inputs)
            title = f"{name} {num_outputs} x {num_inputs}, {num_rows} rows"
            taken = few_rows_tiling(chain.x, chain.weights[0])
            found = []
            for tiling in tilings(num_outputs, num_rows):
                chain.check(tiling)
                is_taken = ", taken" if tiling == taken else ""
                found.append(chain.figure(f"{title}: {_words(tiling)}{is_taken}", tiled(tiling)))
            found.sort(key=lambda figure: figure.median)
            found = [
                figure
                for index, figure in enumerate(found)
                if index < _NUM_TOLD or figure.name.endswith("taken")
            ]
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                found.append(chain.figure(f"{title}: {library}", cublas))
            if name == "gate_up":
                found.append(chain.figure(f"{title}: cublaslt, then the gate", cublas_gated))
                found.append(chain.figure(f"{title}: gated, taken", taken_gated))
            found.append(chain.figure(f"{title}: the norm alone", lambda x, _: x))
            print(table(found), flush=True)
            figures += found
    return figures


def _words(tiling: Tiling) -> str:
    return f"{tiling.outputs} x {tiling.inputs}, {tiling.stages} stages, {tiling.warps} warps"


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
    write(arguments.out, {f"tp {arguments.tp}": figures}, where, "baton.bench.products")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
