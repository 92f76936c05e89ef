"""The products of decodes, each weight read once: cuBLAS beside split-K in Triton, in a CUDA graph.

python -m baton.bench.products [--shape NAME] [--tp N] [--rows N,N] [--out FILE]

As in a model, each product follows a norm and has a weight of its own, which no cache holds. Floor:
reading the weight. Of the many tilings that are tried the five best are told.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.kernels.norm_triton import rms_norm
from baton.kernels.split_k_triton import MAX_ROWS, MAX_TILES, Tiling, split_k_product

from .figures import ROOT, Figure, machine, table, write
from .gpu_shapes import BYTES_PER_S, SHAPES, Shape

_WEIGHT_BYTES = 400 << 20  # of all weights of a graph: more than the L2 cache has
_MOST_WEIGHTS = 40
_REPEATS = 9
_NUM_TOLD = 5
_COMPILERS = 12
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_KERNELS = [
    Tiling(outputs, inputs, 1, stages, warps)
    for outputs, inputs, stages, warps in itertools.product(
        (32, 64, 128), (64, 128), (3, 4, 6), (4, 8)
    )
    # What fits into shared memory with 64 rows, and gives every warp something to do.
    if (outputs + 64) * inputs * 2 * stages <= 200 << 10 and (warps == 4 or outputs == 128)
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
        self._weights = torch.randn(count, num_outputs, num_inputs, **options)
        self._x = torch.randn(num_rows, num_inputs, **options)
        self._scales = torch.rand(num_inputs, **options)
        self.arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")

    def time_us(self, product: Product) -> tuple[float, ...]:
        """Microseconds of a norm and a product."""
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
            samples.append(begin.elapsed_time(end) / len(self._weights) * 1e3)
        return tuple(samples)

    def _run(self, product: Product) -> None:
        for weight in self._weights:
            product(rms_norm(self._x, self._scales, 1e-5), weight)

    def split_k(self, tiling: Tiling) -> Product:
        return lambda x, weight: split_k_product(x, weight, None, self.arrivals, tiling)

    def check(self, tiling: Tiling) -> None:
        """Raises AssertionError if a tiling gives something else than cuBLAS."""
        found, expected = (
            product(self._x, self._weights[0]).float() for product in (self.split_k(tiling), cublas)
        )
        assert (found - expected).norm() / expected.norm() < 1e-2, tiling


def cublas(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def tilings(num_outputs: int, num_inputs: int) -> Iterator[Tiling]:
    """Those that could be the best one."""
    num_processors = torch.cuda.get_device_properties(0).multi_processor_count
    for kernel in _KERNELS:
        tiles, steps = -(-num_outputs // kernel.outputs), -(-num_inputs // kernel.inputs)
        for splits in _SPLITS:
            programs = tiles * splits
            is_enough = programs > num_processors * 0.7
            is_too_many = splits > 1 and programs > num_processors * 5
            if tiles <= MAX_TILES and is_enough and not is_too_many and steps >= 2 * splits:
                yield replace(kernel, splits=splits)


def compile_all(rows: list[int]) -> None:
    """Into Triton's cache, in many processes at once."""
    tilings = [replace(kernel, splits=splits) for kernel in _KERNELS for splits in (1, 2)]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_COMPILERS, mp_context=spawned) as pool:
        list(pool.map(_compile, *zip(*itertools.product(tilings, rows), strict=True)))


def _compile(tiling: Tiling, num_rows: int) -> None:
    Chain(num_rows, tiling.outputs, tiling.inputs * 4).check(tiling)


def measure(shape: Shape, tp: int, rows: list[int]) -> list[Figure]:
    """cuBLAS and the best five tilings."""
    figures = []
    for name, (num_outputs, num_inputs) in products_of(shape, tp).items():
        for num_rows in rows:
            chain = Chain(num_rows, num_outputs, num_inputs)
            title = f"{name} {num_outputs} x {num_inputs}, {num_rows} rows"
            floor_us = chain.num_bytes / BYTES_PER_S * 1e6
            found = []
            for tiling in tilings(num_outputs, num_inputs):
                chain.check(tiling)
                samples = chain.time_us(chain.split_k(tiling))
                what = f"{title}: {_words(tiling)}"
                found.append(Figure(what, "us", samples, floor_us, "reading"))
            found = sorted(found, key=lambda figure: figure.median)[:_NUM_TOLD]
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                samples = chain.time_us(cublas)
                found.append(Figure(f"{title}: {library}", "us", samples, floor_us, "reading"))
            print(table(found), flush=True)
            figures += found
    return figures


def _words(tiling: Tiling) -> str:
    return (
        f"{tiling.outputs} x {tiling.inputs}, {tiling.splits} splits, "
        f"{tiling.stages} stages, {tiling.warps} warps"
    )


def main(argv: list[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", default=f"16,32,{MAX_ROWS}")
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
