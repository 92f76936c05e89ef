"""Attention of a step's prompts on a GPU, per layer: our kernel beside FlashAttention 3.

python -m baton.bench.kernels.prefill_attention [--shape NAME] [--out FILE]

A case is a number of new tokens after a number of cached tokens. Short prompts run in CUDA graphs;
long ones and those over an 8-bit pool do not. Each layer has its own KV, so that no cache holds it.
The outputs of both kernels must agree. Floor: reading K and V, or operations.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.kernels.attention.attention_flashinfer import FlashInferPrefill
from baton.kernels.attention.attention_gpu import PrefillPart
from baton.kernels.attention.attention_triton import TritonGraphPrefill, TritonPrefill
from baton.kernels.kv.kv_8bit import SCALE_BYTES

from ..floors.figures import ROOT, Figure, command_line, table, write_figures
from ..floors.gpu_shapes import BYTES_PER_S, FLOPS, SHAPES, Shape
from .graph_times import graph_times_us

_BLOCK_SIZE, _LAYERS, _MAX_SLICES, _MAX_LEN = 16, 8, 8, 16_384
_REPEATS = 9
_TOLERANCE = 2e-2  # relative error in the norm
_IN_GRAPHS = [
    *((64, 0), (64, 2000), (208, 0), (208, 1400), (208, 2800)),
    *((208, 8000), (512, 0), (512, 3500), (512, 8000)),
]
_OF_8_BITS = [[(8192, 0)], [(2048, 6000)], [(512, 0)] * 16, [(208, 2800)]]


@dataclass(frozen=True)
class Case:
    """A step: (new tokens, tokens before them) of each prompt."""

    prompts: Sequence[tuple[int, int]]

    @property
    def name(self) -> str:
        (new, cached), count = self.prompts[0], len(self.prompts)
        several = f"{count} x " if count > 1 else ""
        return f"{several}{new} tokens behind {cached}"

    def floor_us(self, shape: Shape, value_bytes: int) -> tuple[float, str]:
        """The floor of one layer, and its limit: reading or multiplying."""
        keys = sum(map(sum, self.prompts))
        pairs = sum(new * (cached + (new + 1) / 2) for new, cached in self.prompts)
        read_us = 2 * keys * shape.kv_heads * shape.head_dim * value_bytes / BYTES_PER_S * 1e6
        product_us = 4 * shape.heads * shape.head_dim * pairs / FLOPS * 1e6
        return max((read_us, "reading"), (product_us, "multiplying"))


class Layers:
    """The KV pools of several layers, and the q, k and v of a step."""

    def __init__(self, shape: Shape, case: Case, *, is_8bit: bool) -> None:
        torch.manual_seed(0)
        self._query_lens = [new for new, _ in case.prompts]
        self._seq_lens = [sum(both) for both in case.prompts]
        count = itertools.count()
        self._tables = [
            [next(count) for _ in range(-(-length // _BLOCK_SIZE))] for length in self._seq_lens
        ]
        size = (next(count), _LAYERS, 2, shape.kv_heads, _BLOCK_SIZE, shape.head_dim)
        if is_8bit:  # zeros with zero scales: values do not affect the time
            size = (*size[:-1], size[-1] + SCALE_BYTES)
            self.pool = torch.zeros(size, dtype=torch.float8_e4m3fn, device="cuda")
        else:
            self.pool = torch.randn(size, dtype=torch.bfloat16, device="cuda")
        rows = sum(self._query_lens)
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self._qkv = torch.randn(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim, **options)
        self.out = torch.empty(rows, shape.heads, shape.head_dim, **options)
        if not is_8bit:
            self._store(shape)

    def _store(self, shape: Shape) -> None:
        """Store the step's keys and values in each layer; for a prompt without cached tokens,
        kernels may read them from the pool or from q, k, v."""
        new = self._qkv[:, shape.heads :].unflatten(1, (2, shape.kv_heads))
        ends = itertools.accumulate(self._query_lens)
        lengths = zip(self._seq_lens, self._query_lens, ends, strict=True)
        for blocks_of, (length, count, end) in zip(self._tables, lengths, strict=True):
            places = torch.arange(length - count, length)
            blocks = torch.tensor(blocks_of)[places // _BLOCK_SIZE]
            self.pool[blocks, :, :, :, places % _BLOCK_SIZE] = new[end - count : end, None]

    def times_us(self, part: PrefillPart) -> tuple[float, ...]:
        """Microseconds per layer; the last layer's output is in `out`."""
        part.plan(self._query_lens, self._seq_lens, self._tables)
        calls = [
            partial(part.run, self._qkv, self.pool[:, layer], self.out, None)
            for layer in range(_LAYERS)
        ]
        return graph_times_us(calls, _REPEATS)


def in_graphs(shape: Shape, case: Case) -> list[Figure]:
    """Our kernel and FA3, whose outputs must agree."""
    layers = Layers(shape, case, is_8bit=False)
    ours = TritonGraphPrefill(layers.pool, shape.heads, torch.bfloat16, _MAX_SLICES, _MAX_LEN)
    theirs = FlashInferPrefill(layers.pool, shape.heads, torch.bfloat16)
    found, outputs = [], list[Tensor]()
    for name, part in (("ours", ours), ("FA3", theirs)):
        times_us = layers.times_us(part)
        outputs.append(layers.out.float().clone())
        floor_us, bound = case.floor_us(shape, 2)
        found.append(Figure(f"{case.name}: {name}", "us", times_us, floor_us, bound))
    ours_out, expected = outputs
    assert (ours_out - expected).norm() / expected.norm() < _TOLERANCE, case
    return found


def of_8_bits(shape: Shape, case: Case) -> list[Figure]:
    """Our kernel alone: FA3 cannot read an 8-bit pool."""
    layers = Layers(shape, case, is_8bit=True)
    times_us = layers.times_us(TritonPrefill(layers.pool, shape.heads, torch.bfloat16))
    return [Figure(f"{case.name}, 8 bits", "us", times_us, *case.floor_us(shape, 1))]


def main(argv: list[str]) -> int:
    """Measure, print the figures and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--commit", help="what is measured, where git does not know")
    default = ROOT / "bench" / "results" / "prefill_attention.json"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args(argv)
    shape = SHAPES[arguments.shape]
    figures = [f for one in _IN_GRAPHS for f in in_graphs(shape, Case([one]))]
    figures += [f for prompts in _OF_8_BITS for f in of_8_bits(shape, Case(prompts))]
    print(table(figures))
    command = command_line("kernels.prefill_attention", argv)
    write_figures(arguments.out, figures, command, arguments.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
