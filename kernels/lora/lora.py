"""Adds low-rank adapters (LoRA, Hu et al. 2021) to a product: y += (x A^T) B^T; each row of y has
an adapter of its own or none. Plain torch: the CPU backend and the reference of lora_triton.py.

    bank   [slots, max rank, row size]: an adapter is contiguous; one of rank r fills r rows

           row i | A[i] of q, k, v | B[:, i] of q, k, v | A[i] of o | B[:, i] of o | ...
                   └─ Place.inputs_at  └─ outputs_at       then the next layers

B includes the adapter's scaling. Knows no file and no request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..layers.ops import silu_and_mul
from ..products.weights import Activations

Int32s = NDArray[np.int32]

BLOCK_ROWS = 16  # rows of one adapter per program of the kernels
NO_SLOT = -1


class Place(NamedTuple):
    """Where a product's adapters are in the rows of a bank. The product consists of projections of
    the same `num_inputs`; `parts` are their numbers of outputs."""

    inputs_at: int
    outputs_at: int
    num_inputs: int
    parts: tuple[int, ...]


class AddsAdapters(ABC):
    """Adds a step's adapters to products; to be called only if `is_active`."""

    is_active = False

    @abstractmethod
    def set_rank(self, slot: int, rank: int) -> None: ...

    @abstractmethod
    def plan(self, slots: Int32s) -> None:
        """Set the next step's adapters: the slot of each row, NO_SLOT for none."""

    @abstractmethod
    def shrink(self, x: Tensor, place: Place) -> Tensor:
        """x [rows, inputs] times the A of each row's adapter, for `expand`."""

    @abstractmethod
    def expand(self, y: Tensor, shrunk: Tensor, place: Place) -> None:
        """y [rows, outputs] += `shrunk` times the B of each row's adapter."""

    @abstractmethod
    def expand_gated(self, y: Tensor, shrunk: Tensor, place: Place) -> Tensor:
        """`ops.silu_and_mul` of the result of `expand`; y may be overwritten."""

    def add_to(self, product: Callable[[], Tensor], x: Activations, place: Place) -> Tensor:
        """`product` of x plus the adapters' part, launched right after it."""
        y, shrunk = self._beside(product, x, place)
        self.expand(y, shrunk, place)
        return y

    def add_to_gated(self, product: Callable[[], Tensor], x: Activations, place: Place) -> Tensor:
        """`ops.silu_and_mul` of `add_to`."""
        return self.expand_gated(*self._beside(product, x, place), place)

    def _beside(
        self, product: Callable[[], Tensor], x: Activations, place: Place
    ) -> tuple[Tensor, Tensor]:
        x = x if isinstance(x, Tensor) else x.dequantised(x.dtype)
        return product(), self.shrink(x, place)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Rows grouped by adapter, in blocks of at most BLOCK_ROWS, as the kernels read them.

        rows [rows]          rows without an adapter, then slot by slot
        blocks [3, blocks]   slot, first, end in `rows`; unused blocks are empty, of NO_SLOT

    The number of blocks depends on the numbers of rows and slots alone: a CUDA graph's grid.
    """

    rows: Int32s
    blocks: Int32s

    @classmethod
    def of(cls, slots: Int32s, num_slots: int) -> RowGroups:
        """`slots` [rows]: the adapter slot of each row, NO_SLOT for none."""
        order = np.argsort(slots, kind="stable").astype(np.int32)
        blocks = np.zeros((3, num_blocks(len(slots), num_slots)), np.int32)
        blocks[0] = NO_SLOT
        first, index = 0, 0
        for slot, count in zip(*np.unique(slots, return_counts=True), strict=True):
            end = first + int(count)
            for start in range(first, end, BLOCK_ROWS):
                blocks[:, index] = slot, start, min(start + BLOCK_ROWS, end)
                index += 1
            first = end
        return cls(order, blocks)


def num_blocks(num_rows: int, num_slots: int) -> int:
    """The maximum number of blocks of `num_rows` rows."""
    return min(num_rows, -(-num_rows // BLOCK_ROWS) + num_slots + 1)


class TorchAdapters(AddsAdapters):
    """`AddsAdapters` on a CPU, adapter by adapter.

    Sums in float64: the order in which BLAS sums depends on the number of rows, and a row's result
    must not.
    """

    def __init__(self, bank: Tensor) -> None:
        self._bank = bank
        self._ranks = [0] * len(bank)
        self._groups: list[tuple[int, Tensor]] = []

    def set_rank(self, slot: int, rank: int) -> None:
        """See `AddsAdapters`."""
        self._ranks[slot] = rank

    def plan(self, slots: Int32s) -> None:
        """See `AddsAdapters`."""
        found = np.unique(slots[slots != NO_SLOT]).tolist()
        self._groups = [(slot, torch.from_numpy(np.flatnonzero(slots == slot))) for slot in found]

    def shrink(self, x: Tensor, place: Place) -> Tensor:
        """Returns [rows, projections, max rank] float64."""
        count, max_rank = len(place.parts), self._bank.shape[1]
        shrunk = torch.zeros(len(x), count, max_rank, dtype=torch.float64)
        end = place.inputs_at + count * place.num_inputs
        for slot, rows in self._groups:
            rank = self._ranks[slot]
            weights = self._bank[slot, :rank, place.inputs_at : end].double()
            weights = weights.view(rank, count, place.num_inputs)
            shrunk[rows, :, :rank] = torch.einsum("ti,rpi->tpr", x[rows].double(), weights)
        return shrunk

    def expand(self, y: Tensor, shrunk: Tensor, place: Place) -> None:
        """See `AddsAdapters`."""
        for slot, rows in self._groups:
            rank, first, column = self._ranks[slot], place.outputs_at, 0
            for index, count in enumerate(place.parts):
                weights = self._bank[slot, :rank, first : first + count].double()
                of_part = y[rows, column : column + count].double()
                added = shrunk[rows, index, :rank] @ weights
                y[rows, column : column + count] = (of_part + added).to(y.dtype)
                first, column = first + count, column + count

    def expand_gated(self, y: Tensor, shrunk: Tensor, place: Place) -> Tensor:
        """See `AddsAdapters`."""
        self.expand(y, shrunk, place)
        return silu_and_mul(y)
