"""GEMMs with weights in FP8 and int4, each weight read once: our kernels beside torch's.

python -m baton.bench.kernels.quantised_products [--weights row block int4] [--shape NAME] [--tp N]
                                                 [--rows N,N] [--out FILE] [--table FILE]

As in a model, the input of a GEMM comes from a norm, which quantises it for FP8, and each GEMM has
its own weight, which no cache holds. Times are of norm and GEMM; floor: reading the weight, or its
operations. The fastest of each kind is written to the table by which models choose kernels
(way_table.py), where it replaces the row of the same kind, weight and number of rows.
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
from typing import Any, TypeAlias

import torch
from torch import Tensor

from baton.kernels.layers.ops_triton import TritonOps
from baton.kernels.products import fp8_product, int4_product
from baton.kernels.products.fp8_product import (
    MAX_FEW_ROWS,
    MAX_STREAMED_ROWS,
    ScaledMm,
    multiply_by,
    summands,
)
from baton.kernels.products.fp8_triton import Fp8Stages, Fp8Tiling
from baton.kernels.products.int4_product import Dequantised
from baton.kernels.products.int4_triton import Int4Row, Int4Stages, Int4Tiling
from baton.kernels.products.int4_weights import Int4Weight
from baton.kernels.products.way_table import TABLE
from baton.kernels.products.weights import (
    FP8,
    Activations,
    BlockScaled,
    Fp8Rows,
    Fp8Weight,
    RowScaled,
    Summands,
)
from baton.kernels.row_room import ROWS_AT_ONCE, room_of

from ..floors.figures import ROOT, Figure, machine, table, write
from ..floors.gpu_shapes import BYTES_PER_S, FLOPS, FP8_BLOCK_FLOPS, FP8_FLOPS, SHAPES
from .graph_times import graph_times_us
from .products import products_of

_ROWS = (1, 16, 32, 64, 128, 256, 512)
_WEIGHT_BYTES = 300 << 20  # all weights of a graph together: more than the L2 cache holds
_MOST_WEIGHTS = 16
_REPEATS = 5
_NUM_TOLD = 3
_MOST_WIDE_PROGRAMS = 530  # four per multiprocessor of an H200
_COMPILERS = 14
_LEAST_SHARED_BYTES, _SHARED_BYTES = 32 << 10, 220 << 10
_RATES = {"row": FP8_FLOPS, "block": FP8_BLOCK_FLOPS, "int4": FLOPS}
_GROUP = 128  # the group size of int4
_WAYS = fp8_product.WAYS | int4_product.WAYS

Int4Way: TypeAlias = int4_product.Way
AnyWay: TypeAlias = fp8_product.Way | Int4Way

_TILINGS = [Fp8Tiling(*one) for one in itertools.product((64, 128), (4, 6))]
_STAGES = [
    Fp8Stages(outputs, chunks, count, early, is_turned)
    for outputs, chunks, count, early, is_turned in itertools.product(
        (32, 64, 128), (1, 2), (3, 4, 6, 8), (3, 6), (False, True)
    )
    if outputs * chunks <= (256 if is_turned else 128)
    and outputs * chunks * count >= 192
    and early <= count
]
# For more rows: outputs are the rows of wgmma, and a program has tiles of 128 rows of the batch.
_WIDE_STAGES = [
    Fp8Stages(outputs, chunks, count, 2, True, shares, warps)
    for (outputs, warps), (chunks, count), shares in itertools.product(
        ((64, 4), (128, 8)), ((1, 4), (1, 6), (2, 3), (2, 4)), (1, 2, 3, 4)
    )
]
_INT4_TILINGS = [
    Int4Tiling(*one)
    for one in itertools.product((64, 128, 256), (1, 4, 8), (4,), (4, 8))
    if (one[0], one[3]) not in ((64, 8), (256, 4))
]
_INT4_STAGES = [
    Int4Stages(outputs, shares, *one)
    for outputs, shares, one in itertools.product(
        (64, 128, 256),
        (1, 2, 4, 8),
        (
            *((1, 3, 2, 4), (1, 6, 4, 4), (2, 4, 3, 4), (2, 4, 4, 4), (4, 3, 2, 4)),
            *((1, 4, 3, 8), (2, 4, 3, 8)),
        ),
    )
    if (outputs == 64) == (one[3] == 4)
]
_INT4_ROWS = [
    Int4Row(rows, shares, *one, warps, programs)
    for (rows, warps), shares, one, programs in itertools.product(
        ((64, 4), (128, 4), (128, 8)),
        (2, 4),
        ((2, 4, 3), (4, 3, 2), (4, 4, 3)),
        (1, 2, 3),
    )
]
_ROW_BYTES = (68, 768 + 32)  # bytes per chunk: of a tile's row, and of a share


class Chain:
    """Alternating norms and GEMMs, each GEMM with the next of several weights."""

    def __init__(self, num_rows: int, num_outputs: int, num_inputs: int, kind: str) -> None:
        num_weights = num_outputs * num_inputs
        num_bytes = num_weights // 2 + num_weights // _GROUP * 4 if kind == "int4" else num_weights
        self._floor_us = 1e6 * max(
            num_bytes / BYTES_PER_S, 2 * num_weights * num_rows / _RATES[kind]
        )
        count = min(_MOST_WEIGHTS, max(3, _WEIGHT_BYTES // num_bytes))
        self.weights = [self._weight(num_outputs, num_inputs, kind) for _ in range(count)]
        self.x = torch.randn(num_rows, num_inputs, device="cuda", dtype=torch.bfloat16)
        self._scales = torch.rand(num_inputs, device="cuda", dtype=torch.bfloat16)
        self._residual = torch.randn(num_rows, num_outputs, device="cuda", dtype=torch.bfloat16)

    @staticmethod
    def _weight(num_outputs: int, num_inputs: int, kind: str) -> Fp8Weight | Int4Weight:
        if kind == "int4":
            weight = Int4Weight.empty(num_outputs, num_inputs, _GROUP, torch.device("cuda"))
            weight.data.random_(-(1 << 15), 1 << 15)
            scale = torch.rand(weight.groups.shape, device="cuda") + 0.5
            weight.groups.copy_((scale.view(torch.int32) & ~0xFF) | 8)
            return weight
        data = torch.randn(num_outputs, num_inputs, device="cuda", dtype=torch.bfloat16).to(FP8)
        if kind == "row":
            return RowScaled(data, torch.rand(num_outputs, device="cuda") + 0.5)
        shape = (math.ceil(num_outputs / 128), math.ceil(num_inputs / 128))
        return BlockScaled(data, torch.rand(shape, device="cuda") + 0.5)

    def product(self, weight: Fp8Weight | Int4Weight, way: AnyWay) -> Tensor:
        """A norm and a GEMM."""
        x = self.norm(weight)
        if isinstance(weight, Int4Weight):
            assert isinstance(way, Int4Way) and isinstance(x, Tensor)
            return int4_product.multiply_by(way, x, weight, None)
        assert isinstance(x, Fp8Rows) and not isinstance(way, Int4Way)
        return multiply_by(way, x, weight, None)

    def summed(self, weight: Fp8Weight | Int4Weight, way: AnyWay) -> None:
        """The same; where candidates differ in it, also the norm that adds up their outputs."""
        if len(self.x) <= MAX_FEW_ROWS or not isinstance(weight, BlockScaled):
            self.product(weight, way)
            return
        summand: Tensor | Summands
        if isinstance(way, Fp8Stages) and way.shares > 1:
            x = self.norm(weight)
            assert isinstance(x, Fp8Rows)
            summand = summands(x, weight, None, way)
        else:
            summand = self.product(weight, way)
        TritonOps().add_rms_norm(summand, self._residual, self._residual[0], 1e-5)

    def norm(self, weight: Fp8Weight | Int4Weight) -> Activations:
        reader = None if isinstance(weight, Int4Weight) else weight
        return TritonOps().rms_norm(self.x, self._scales, 1e-5, reader)

    def figure(self, name: str, product: Callable[[Any], object]) -> Figure:
        calls = [partial(product, weight) for weight in self.weights]
        times_us = graph_times_us(calls, _REPEATS)
        return Figure(name, "us", times_us, self._floor_us, "reading or operations")

    def check(self, way: AnyWay) -> None:
        """Raises AssertionError if a candidate's result differs from that of dequantised floats."""
        weight = self.weights[0]
        found = self.product(weight, way).float()
        x = self.norm(weight)
        floats = x.float() if isinstance(x, Tensor) else x.dequantised(torch.float32)
        expected = floats @ weight.dequantised(torch.float32).t()
        difference = (found - expected).norm() / expected.norm()
        # torch accumulates row-scaled GEMMs in 14 bits.
        limit = 5e-2 if isinstance(way, ScaledMm) else 1e-2
        assert difference < limit, f"{way}: {difference:.1e}"


def ways_of(kind: str, num_rows: int, num_outputs: int, num_inputs: int) -> list[AnyWay]:
    """The candidates that fit into shared memory and registers, with enough but not too many
    programs."""
    if kind == "int4":
        return _int4_ways(num_rows, num_outputs, num_inputs)
    if num_rows > MAX_FEW_ROWS:
        is_streamed = kind == "block" and num_rows <= MAX_STREAMED_ROWS
        wide = _wide_stages(num_rows, num_outputs, num_inputs) if is_streamed else []
        return [ScaledMm(), *wide]
    room = max(16, 1 << (num_rows - 1).bit_length())
    stages = [
        one
        for one in _STAGES
        for rows in [room + max(64, one.outputs) if one.is_turned else 64 + one.outputs]
        if rows * 128 * one.chunks * one.count <= _SHARED_BYTES
    ]
    stages = [way for way in stages if num_outputs / way.outputs >= 60]
    if kind == "row":  # activations have a scale per 128 inputs, which no other kernel supports
        return [*stages]
    tilings = [one for one in _TILINGS if (room + one.outputs) * 128 * one.stages <= _SHARED_BYTES]
    return [
        *stages,
        *(way for way in tilings if num_outputs / way.outputs >= 60),
        ScaledMm(),
    ]


def _wide_stages(num_rows: int, num_outputs: int, num_inputs: int) -> list[Fp8Stages]:
    """Split-K only for outputs added to the residual stream: the norm after them adds up the
    shares."""
    is_summand = num_outputs <= num_inputs
    return [
        way
        for way in _WIDE_STAGES
        for programs in [
            math.ceil(num_outputs / way.outputs) * math.ceil(num_rows / 128) * way.shares
        ]
        if 60 <= programs <= _MOST_WIDE_PROGRAMS and (way.shares == 1 or is_summand)
    ]


def _int4_ways(num_rows: int, num_outputs: int, num_inputs: int) -> list[AnyWay]:
    def fits(way: Int4Tiling | Int4Stages, chunks: int, room: int, most_programs: int) -> bool:
        num_bytes = chunks * (way.outputs * 68 + room * 256)  # words, groups, inputs
        sums = way.outputs * room // (32 * way.warps)  # accumulator registers of a thread, twice
        programs = way.shares * math.ceil(num_outputs / way.outputs)
        is_enough = programs >= 60 and (way.shares == 1 or programs <= most_programs)
        of_share = num_inputs // _GROUP // way.shares
        has_memory = _LEAST_SHARED_BYTES <= num_bytes <= _SHARED_BYTES
        return has_memory and sums <= 64 and is_enough and of_share >= 4

    ways: list[AnyWay] = []
    if num_rows <= int4_product.MAX_FEW_ROWS:
        room = min(128, max(16, room_of(num_rows)))
        ways += [way for way in _INT4_TILINGS if fits(way, way.stages, room, 1100)]
    if num_rows <= ROWS_AT_ONCE:
        room = room_of(num_rows)
        stages = [way for way in _INT4_STAGES if way.chunks * room <= 64]
        ways += [way for way in stages if fits(way, way.chunks * way.count, room, 530)]
    if num_rows == 1:
        of_row, of_share = _ROW_BYTES
        ways += [
            way
            for way in _INT4_ROWS
            for num_bytes in [way.chunks * way.count * (way.rows * of_row + way.shares * of_share)]
            if num_bytes * way.programs <= _SHARED_BYTES
        ]
    return [*ways, *([Dequantised()] if num_rows >= 32 else [])]


def compile_all(rows: list[int], kinds: list[str], sizes: list[tuple[int, int]]) -> None:
    """Compile all candidates into Triton's cache, in many processes."""
    rooms = sorted({max(16, 1 << (n - 1).bit_length()) for n in rows if n <= MAX_FEW_ROWS})
    in_fp8 = [kind for kind in kinds if kind != "int4"]
    todo: list[tuple[AnyWay, int, str]] = [
        (way, num_rows, kind)
        for num_rows, kind in itertools.product(rooms, in_fp8)
        for way in ways_of(kind, num_rows, 1 << 20, 4096)
    ]
    if "int4" in kinds:
        few = {min(128, room_of(n)) for n in rows} | ({1} & set(rows))
        found = {(w, n) for n, size in itertools.product(few, sizes) for w in _int4_ways(n, *size)}
        todo += [(way, num_rows, "int4") for way, num_rows in found]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_COMPILERS, mp_context=spawned) as pool:
        list(pool.map(_compile, *zip(*todo, strict=True), chunksize=4))


def _compile(way: AnyWay, num_rows: int, kind: str) -> None:
    chain = Chain(num_rows, 256, 4096, kind)
    chain.check(way)


def measure(
    products: dict[str, tuple[int, int]], kinds: list[str], rows: list[int]
) -> tuple[list[Figure], list[dict[str, object]]]:
    """(figures, rows of the table)."""
    figures: list[Figure] = []
    entries: list[dict[str, object]] = []
    for kind, (name, (num_outputs, num_inputs)) in itertools.product(kinds, products.items()):
        for num_rows in rows:
            chain = Chain(num_rows, num_outputs, num_inputs, kind)
            title = f"{kind}, {name} {num_outputs} x {num_inputs}, {num_rows} rows"
            found: list[tuple[Figure, AnyWay]] = []
            for way in ways_of(kind, num_rows, num_outputs, num_inputs):
                chain.check(way)
                product = partial(chain.summed, way=way)
                found.append((chain.figure(f"{title}: {way}", product), way))
            found.sort(key=lambda pair: pair[0].median)
            for way_name, way_type in _WAYS.items():
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
            shown = [
                figure
                for index, (figure, way) in enumerate(found)
                if index < _NUM_TOLD or isinstance(way, ScaledMm | Dequantised)
            ]
            shown.append(chain.figure(f"{title}: the norm alone", chain.norm))
            print(table(shown), flush=True)
            figures += shown
    return figures, entries


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", nargs="*", choices=_RATES, default=list(_RATES))
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rows", default=",".join(map(str, _ROWS)))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/quantised_products.json")
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse_args(argv)
    rows = [int(number) for number in arguments.rows.split(",")]
    where = machine() | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    begin_s = time.perf_counter()
    kinds = list(arguments.weights)
    products = products_of(SHAPES[arguments.shape], arguments.tp)
    products = {name: size for name, size in products.items() if name != "head"}
    compile_all(rows, kinds, list(products.values()))
    print(f"compiled in {time.perf_counter() - begin_s:.0f} s", flush=True)
    figures, entries = measure(products, kinds, rows)
    write(arguments.out, {f"tp {arguments.tp}": figures}, where, "kernels.quantised_products")
    if arguments.table.is_file():
        kept = json.loads(arguments.table.read_text())
        again = {(one["weight"], one["rows"], one["kind"]) for one in entries}
        kept = [one for one in kept if (one["weight"], one["rows"], one["kind"]) not in again]
        entries = kept + entries
    lines = ",\n".join(" " + json.dumps(entry) for entry in entries)
    arguments.table.write_text(f"[\n{lines}\n]\n")
    print(f"{len(entries)} rows in {arguments.table}, {time.perf_counter() - begin_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
