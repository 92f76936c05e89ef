"""CUDA graphs of steps: one for each of a few sizes in tokens, all of a kind in one pool of memory.

A graph replays fixed kernels over fixed addresses: `inputs` is where every size reads what changes.
Knows neither model nor scheduler.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MAX_ROWS_OF_CUBLASLT = 64


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step of `size` tokens; `output` is valid until the next replay of its kind."""

    size: int
    output: Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


class StepGraphs:
    """The graphs of one kind by size, each over `num_inputs` inputs a token.

    `beside`: larger graphs of another kind, with as many inputs a token, whose inputs and memory
    these share: the output of neither is valid behind a replay of the other.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        num_inputs: int,
        device: torch.device,
        beside: StepGraphs | None = None,
    ) -> None:
        self.sizes = sizes
        self.capture_s = 0.0
        self._num_inputs = num_inputs
        self._beside = beside
        self._inputs: Tensor = (
            torch.zeros(num_inputs * sizes[-1], dtype=torch.int64, device=device)
            if beside is None
            else beside._inputs
        )
        self._graphs: dict[int, StepGraph] = {}
        self._memory: Any = None

    def inputs(self, size: int) -> Tensor:
        """The inputs [num_inputs, size] int64 of the graph of `size`."""
        return self._inputs[: self._num_inputs * size].view(self._num_inputs, size)

    def find(self, num_tokens: int) -> StepGraph | None:
        """The smallest captured graph for so many tokens."""
        size = next((size for size in self.sizes if size >= num_tokens), None)
        return None if size is None else self._graphs.get(size)

    def capture(self, size: int, step: Callable[[], Tensor]) -> None:
        """Capture `step`, which reads `inputs(size)` and returns its output."""
        begin_s = time.perf_counter()
        if self._beside is not None:
            self._memory = self._beside._memory
        with torch.inference_mode(), _blas_for(size):
            step()  # compiles kernels and makes lazy buffers, neither of which a capture may do
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._memory, _capture_stream(self._inputs.device)):
                output = step()
        self._memory = self._memory or graph.pool()
        self._graphs[size] = StepGraph(size, output, graph)
        self.capture_s += time.perf_counter() - begin_s


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: torch's own belongs to the first device that captures."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _blas_for(num_rows: int) -> Iterator[None]:
    """For few rows cuBLASLt's choice of kernels is the faster one, for more cuBLAS's own.

    All products of an 8B model on an H200: 3.8 instead of 4.0 ms for 64 rows, but 6.2 instead of
    5.8 ms for 256.
    """
    before = torch.backends.cuda.preferred_blas_library()
    if num_rows <= _MAX_ROWS_OF_CUBLASLT:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: closer together where a padded row costs a larger share."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in steps if size < max_num_seqs), max_num_seqs)


def mixed_decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of decodes to capture beside prompts: padding costs attention alone, of one block."""
    steps = (16, 32, 64, 96, 128, 192, 256, 384)
    return (*(size for size in steps if size < max_num_seqs), max_num_seqs)
