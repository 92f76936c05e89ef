"""CUDA graphs of steps: one for each of a few sizes in tokens; those of a kind share a memory pool.

A graph replays fixed kernels over fixed addresses: all sizes read what varies from `inputs`. The
sizes, and the BLAS library of each graph's products, are chosen by measuring the products. Knows
neither model nor scheduler.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LIBRARIES = ("cublas", "cublaslt")
_FEW_ROWS = 64  # up to this number use our own kernels, or cuBLASLt where there is none
_MOST_PADDING = 127  # rows
_WORTH_PADDING = 0.97  # padding must reduce the time to less than this factor
_TIMED_CALLS, _ROUNDS = 3, 3
# Row counts that kernels are loaded for: for many rows the kernel chosen rarely changes.
_EACH_EIGHT, _ROWS_APART, _MOST_LOADED = 1024, 64, 8192

Product = Callable[[Tensor], object]  # [rows, inputs]


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured step of `size` tokens; `output` is valid until the next replay of its kind."""

    size: int
    output: Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


class StepGraphs:
    """The graphs of one kind by size, with `num_inputs` inputs per token.

    `beside`: larger graphs of another kind, with as many inputs per token, whose inputs and memory
    these share: the output of either is invalid after a replay of the other.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        num_inputs: int,
        device: torch.device,
        beside: StepGraphs | None = None,
    ) -> None:
        self.sizes = sizes
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
        """The graph of the smallest size for `num_tokens`; None if none is captured."""
        size = next((size for size in self.sizes if size >= num_tokens), None)
        return None if size is None else self._graphs.get(size)

    def capture(self, size: int, step: Callable[[], Tensor], library: str) -> None:
        """Capture `step`, which reads `inputs(size)` and returns its output; its products use
        `library`."""
        if self._beside is not None:
            self._memory = self._beside._memory
        with torch.inference_mode(), _blas(library):
            step()  # compiles kernels and allocates lazy buffers: not allowed in a capture
            graph = torch.cuda.CUDAGraph()
            with _captured(graph, self._inputs.device, self._memory):
                output = step()
        self._memory = self._memory or graph.pool()
        self._graphs[size] = StepGraph(size, output, graph)


def _captured(
    graph: torch.cuda.CUDAGraph, device: torch.device, memory: Any = None
) -> torch.cuda.graph:
    """Capture what the body launches. Only this thread is restricted: otherwise another engine of
    this process that pins its host memory would break the capture, and the capture the pinning."""
    stream = _capture_stream(device)
    return torch.cuda.graph(graph, memory, stream, capture_error_mode="thread_local")


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream per device: torch's own belongs to the first device that captures."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """The time of a layer's products by number of rows, and the faster library for each number.

    cuBLAS is not monotonic: an 8B model on an H200 takes 13.2 ms for 448 rows and 9.7 for 512. For
    96 rows cuBLASLt takes 4.1 ms and cuBLAS 4.4; for 256 rows 5.9 and 5.8.
    """

    ms: Mapping[int, float]
    libraries: Mapping[int, str]

    def library(self, rows: int) -> str:
        """The faster library for a graph of `rows` rows."""
        return self.libraries.get(rows, _LIBRARIES[1])

    def padded(self, rows: int) -> int:
        """`rows`, or a slightly larger number that was measured to take less time."""
        if rows not in self.ms:
            return rows
        more = [n for n in self.ms if rows < n <= rows + _MOST_PADDING]
        best = min(more, key=self.ms.__getitem__, default=rows)
        return best if self.ms[best] < _WORTH_PADDING * self.ms[rows] else rows


def measure_products(
    products: Sequence[tuple[int, Product]],
    rows: Sequence[int],
    like: Tensor,
    share: Callable[[Tensor], None],
) -> ProductTimes:
    """Time `products`, pairs (number of inputs, product), for all `rows`, also rounded up to
    multiples of 64 and 128. Few rows are not timed: launches would take longer than the products.

    `like` has their inputs' type and device. `share` overwrites a tensor by the first rank's.
    """
    many = [n for n in rows if n > _FEW_ROWS]
    counts = sorted({*many, *(-(-n // unit) * unit for n in many for unit in (64, 128))})
    if not counts or not products:
        return ProductTimes({}, {})
    taken = torch.empty((len(_LIBRARIES), len(counts)), device=like.device)
    inputs = {size: torch.randn_like(like.new_empty(counts[-1], size)) for size, _ in products}
    for library, row in zip(_LIBRARIES, taken, strict=True):
        with torch.inference_mode(), _blas(library):
            for index, count in enumerate(counts):
                row[index] = _products_ms([(inputs[n][:count], run) for n, run in products])
    share(taken)
    best = taken.min(0)
    chosen = [_LIBRARIES[index] for index in best.indices.tolist()]
    times = zip(counts, best.values.tolist(), strict=True)
    return ProductTimes(dict(times), dict(zip(counts, chosen, strict=True)))


def rows_with_kernels(most: int) -> list[int]:
    """Numbers of rows up to `most` that load the kernels of products of nearly all numbers of rows.

    cuBLAS has different kernels for each eight rows up to 512, and loads one when it first chooses
    it. Loading waits for all queued work of the device: on an H200 it takes 3 ms on an idle device,
    40 after a step.
    """
    most = min(most, _MOST_LOADED)
    ends = range(8, min(most, _EACH_EIGHT) + 8, 8)
    few = [min(most, rows) for end in ends for rows in (end - 7, end)]
    return sorted({*few, *range(_EACH_EIGHT, most, _ROWS_APART), most})


def load_products(products: Sequence[tuple[int, Product]], most: int, like: Tensor) -> None:
    """Run `products`, pairs (number of inputs, product), for all `rows_with_kernels(most)`. `like`
    has their inputs' type and device.

    The most rows come first, so that fewer rows reuse their memory. Kernels for more rows than fit
    into memory are loaded when they are first used.
    """
    rows = rows_with_kernels(most)
    with torch.inference_mode():
        for size, product in products:
            inputs: Tensor | None = None
            for num_rows in reversed(rows):
                with contextlib.suppress(torch.OutOfMemoryError):
                    inputs = like.new_zeros(num_rows, size) if inputs is None else inputs
                    product(inputs[:num_rows])


def _products_ms(products: Sequence[tuple[Tensor, Product]]) -> float:
    """Milliseconds for all products, in a CUDA graph: launched one by one they may be bound by the
    host."""
    for x, product in products:
        product(x)
    graph = torch.cuda.CUDAGraph()
    with _captured(graph, products[0][0].device):
        for _ in range(_TIMED_CALLS):
            for x, product in products:
                product(x)
    rounds = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / _TIMED_CALLS)
    return float(min(rounds))


@contextmanager
def _blas(library: str) -> Iterator[None]:
    """Use `library` for the body's products."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: closer together where a padded row costs a larger fraction."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 32)]
    return (*(size for size in steps if size < max_num_seqs), max_num_seqs)


def prefill_sizes(most: int, more: Sequence[int] = ()) -> tuple[int, ...]:
    """Sizes in tokens to capture for steps with prompts, up to `most`, including `more`.

    576 is among them: a chunk of 512 and a few decodes. Padded to 640 it takes 5 % longer.
    """
    steps = sorted({*range(64, 640, 64), *range(640, most, 128), *more})
    return (*(size for size in steps if size < most), most)
