"""Products with weights in FP8, each read once: our kernels' ways beside torch's _scaled_mm.

python -m baton.bench.kernels.fp8_products [--shape NAME] [--tp N] [--rows N,N] [--out FILE]
                                           [--table FILE]

As in a model: what a product reads comes from a norm that quantises, and each has a weight of its
own, which no cache holds. Times are of both; floor: reading the weight, or its operations. What is
fastest of each kind goes to the table that `fp8_product.choose` reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.kernels.layers.ops_triton import TritonOps
from baton.kernels.products.fp8_product import (
    MAX_FEW_ROWS,
    TABLE,
    WAYS,
    ScaledMm,
    Way,
    multiply_by,
)
from baton.kernels.products.fp8_triton import Fp8Stages, Fp8Tiling
from baton.kernels.products.weights import FP8, BlockScaled, Fp8Rows, Fp8Weight, RowScaled

from ..floors.figures import ROOT, Figure, machine, table, write
from ..floors.gpu_shapes import BYTES_PER_S, FP8_BLOCK_FLOPS, FP8_FLOPS, SHAPES, Shape
from .graph_times import graph_times_us
from .products import products_of

_ROWS = (1, 16, 32, 64, 128, 256, 512)
_WEIGHT_BYTES = 300 << 20  # of all weights of a graph: more than the L2 cache has
_MOST_WEIGHTS = 16
_REPEATS = 5
_NUM_TOLD = 3
_COMPILERS = 14
_SHARED_BYTES = 220 << 10
_KINDS: dict[str, type[Fp8Weight]] = {"row": RowScaled, "block": BlockScaled}

_TILINGS = [Fp8Tiling(*one) for one in itertools.product((64, 128), (4, 6))]
_STAGES = [
    Fp8Stages(outputs, chunks, count, early)
    for outputs, chunks, count, early in itertools.product(
        (32, 64, 128), (1, 2), (3, 4, 6, 8), (3, 6)
    )
    if outputs * chunks <= 128 and outputs * chunks * count >= 192 and early <= count
]


class Chain:
    """Norm and product in turn, each product with the next of some weights."""

    def __init__(self, num_rows: int, num_outputs: int, num_inputs: int, kind: str) -> None:
        self.num_bytes = num_outputs * num_inputs
        rate = FP8_BLOCK_FLOPS if kind == "block" else FP8_FLOPS
        self._floor_us = 1e6 * max(
            self.num_bytes / BYTES_PER_S, 2 * self.num_bytes * num_rows / rate
        )
        count = min(_MOST_WEIGHTS, max(3, _WEIGHT_BYTES // self.num_bytes))
        self.weights = [self._weight(num_outputs, num_inputs, kind) for _ in range(count)]
        self.x = torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16)
        self._scales = torch.rand(num_inputs, device="cuda", dtype=torch.bfloat16)

    @staticmethod
    def _weight(num_outputs: int, num_inputs: int, kind: str) -> Fp8Weight:
        data = torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16).to(FP8)
        shape = (num_outputs,)
        if kind == "block":
            shape = (math.ceil(num_outputs / 128), math.ceil(num_inputs / 128))
        return _KINDS[kind](data, torch.rand(shape, device="cuda") + 0.5)

    def product(self, weight: Fp8Weight, way: Way) -> Tensor:
        """A norm and a product."""
        x = TritonOps().rms_norm(self.x, self._scales, 1e-5, weight)
        assert isinstance(x, Fp8Rows)
        return multiply_by(way, x, weight, None)

    def norm(self, weight: Fp8Weight) -> None:
        TritonOps().rms_norm(self.x, self._scales, 1e-5, weight)

    def figure(self, name: str, product: Callable[[Fp8Weight], object]) -> Figure:
        calls = [partial(product, weight) for weight in self.weights]
        times_us = graph_times_us(calls, _REPEATS)
        return Figure(name, "us", times_us, self._floor_us, "reading or operations")

    def check(self, way: Way) -> None:
        """Raises AssertionError if a way gives something else than floats do."""
        weight = self.weights[0]
        found = self.product(weight, way).float()
        x = TritonOps().rms_norm(self.x, self._scales, 1e-5, weight)
        assert isinstance(x, Fp8Rows)
        expected = x.dequantised(torch.float32) @ weight.dequantised(torch.float32).t()
        difference = (found - expected).norm() / expected.norm()
        # torch has rows' products added up in 14 bits.
        limit = 5e-2 if isinstance(way, ScaledMm) else 1e-2
        assert difference < limit, f"{way}: {difference:.1e}"


def ways_of(num_rows: int, num_outputs: int) -> list[Way]:
    """Those that fit into shared memory, and are enough programs."""
    if num_rows > MAX_FEW_ROWS:
        return [ScaledMm()]
    room = max(16, 1 << (num_rows - 1).bit_length())
    stages = [
        one for one in _STAGES if (64 + one.outputs) * 128 * one.chunks * one.count <= _SHARED_BYTES
    ]
    tilings = [one for one in _TILINGS if (room + one.outputs) * 128 * one.stages <= _SHARED_BYTES]
    return [
        *(way for way in (*stages, *tilings) if num_outputs / way.outputs >= 60),
        ScaledMm(),
    ]


def compile_all(rows: list[int]) -> None:
    """Into Triton's cache, in many processes at once."""
    rooms = sorted({max(16, 1 << (n - 1).bit_length()) for n in rows if n <= MAX_FEW_ROWS})
    todo = [
        (way, num_rows, kind)
        for num_rows, kind in itertools.product(rooms, _KINDS)
        for way in ways_of(num_rows, 1 << 20)
    ]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_COMPILERS, mp_context=spawned) as pool:
        list(pool.map(_compile, *zip(*todo, strict=True), chunksize=4))


def _compile(way: Way, num_rows: int, kind: str) -> None:
    chain = Chain(num_rows, 256, 4096, kind)
    chain.check(way)


def measure(shape: Shape, tp: int, rows: list[int]) -> tuple[list[Figure], list[dict[str, object]]]:
    """(figures, rows of the table)."""
    figures: list[Figure] = []
    entries: list[dict[str, object]] = []
    products = {name: size for name, size in products_of(shape, tp).items() if name != "head"}
    for kind, (name, (num_outputs, num_inputs)) in itertools.product(_KINDS, products.items()):
        for num_rows in rows:
            chain = Chain(num_rows, num_outputs, num_inputs, kind)
            title = f"{kind}, {name} {num_outputs} x {num_inputs}, {num_rows} rows"
            found: list[tuple[Figure, Way]] = []
            for way in ways_of(num_rows, num_outputs):
                chain.check(way)
                product = partial(chain.product, way=way)
                found.append((chain.figure(f"{title}: {way}", product), way))
            found.sort(key=lambda pair: pair[0].median)
            for way_name, way_type in WAYS.items():
                best = next((pair for pair in found if type(pair[1]) is way_type), None)
                if best is not None:
                    entries.append(
                        {
                            "weight": kind,
                            "rows": num_rows,
                            "outputs": num_outputs,
                            "inputs": num_inputs,
                            "kind": way_name,
                            "way": dataclasses.asdict(best[1]),
                            "us": round(best[0].median, 2),
                        }
                    )
            told = [
                figure
                for index, (figure, way) in enumerate(found)
                if index < _NUM_TOLD or isinstance(way, ScaledMm)
            ]
            told.append(chain.figure(f"{title}: the norm alone", chain.norm))
            print(table(told), flush=True)
            figures += told
    return figures, entries


def main(argv: list[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", default=",".join(map(str, _ROWS)))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/fp8_products.json")
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args(argv)
    rows = [int(number) for number in arguments.rows.split(",")]
    where = machine() | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    begin_s = time.perf_counter()
    compile_all(rows)
    print(f"compiled in {time.perf_counter() - begin_s:.0f} s", flush=True)
    figures, entries = measure(SHAPES[arguments.shape], arguments.tp, rows)
    write(arguments.out, {f"tp {arguments.tp}": figures}, where, "kernels.fp8_products")
    lines = ",\n".join(" " + json.dumps(entry) for entry in entries)
    arguments.table.write_text(f"[\n{lines}\n]\n")
    print(f"{len(entries)} rows in {arguments.table}, {time.perf_counter() - begin_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
