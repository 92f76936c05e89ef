"""One rank's adapters: in host memory, by digest, and in the slots of its device.

    read (any thread) ─► keep ─► host memory ── load ──► slot of the bank ─► steps

A copy into a slot is queued on the device after the launched steps and before the next step, so no
other ordering is needed; an adapter of rank 16 takes less than a step. Rank 0's AdapterRoom decides
which adapter is where.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import torch

from ...core.errors import AdapterRefused
from ...kernels.lora.lora import NO_SLOT, AddsAdapters, Int32s, TorchAdapters
from ..model.decoder import Decoder
from .adapter_files import HostAdapter, empty_rows, read_adapter
from .layout import AdapterLayout


class RankAdapters:
    """The adapters of one rank. Made before the KV pool, which gets the memory that is left."""

    def __init__(
        self,
        model: Decoder,
        dtype: torch.dtype,
        max_loras: int,
        max_rank: int,
        max_rows: int,
    ) -> None:
        """`max_rows`: the most rows of a step."""
        self._layout, self._max_rank, self._dtype = AdapterLayout.of(model), max_rank, dtype
        self._device = device = model.device
        shape = (max_loras, max_rank, self._layout.row_size)
        self._bank = torch.zeros(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            self._adds: AddsAdapters = TorchAdapters(self._bank)
        else:
            from ...kernels.lora.lora_triton import TritonAdapters

            self._adds = TritonAdapters(self._bank, max_rows)
        self._host: dict[str, HostAdapter] = {}
        for product, place in self._layout.products:
            product.adapters, product.place = self._adds, place

    def pin_memory(self, num_adapters: int) -> None:
        """Fill torch's cache of pinned memory: pinning more later would delay steps by 50 ms. Torch
        keeps freed memory until a graph is captured."""
        rows = [
            empty_rows(self._layout, self._max_rank, self._dtype, is_pinned=True)
            for _ in range(num_adapters)
        ]
        del rows

    def read(self, path: str, digest: str = "") -> HostAdapter:
        """Read the folder `path`, on any thread. Raises AdapterRefused, also if the content does
        not match `digest`."""
        is_gpu = self._device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(self._device)  # this thread pins memory for the device
        found = read_adapter(
            Path(path), self._layout, self._max_rank, self._dtype, is_pinned=is_gpu
        )
        if digest and found.digest != digest:
            raise AdapterRefused(f"{path} is another adapter than when it was loaded")
        return found

    def keep(self, adapter: HostAdapter) -> None:
        """Keep an adapter in host memory until `drop`."""
        self._host[adapter.digest] = adapter

    def forget(self, adapter: HostAdapter) -> None:
        """Discard an adapter that was read and is not kept; only its reader holds it."""

    def drop(self, digest: str) -> None:
        """Remove an adapter from host memory; copies in progress keep it alive."""
        self._host.pop(digest, None)

    def load(self, slot: int, digest: str) -> None:
        """Copy an adapter into a slot that no sequence uses any more."""
        adapter = self._host[digest]
        with torch.inference_mode():
            self._bank[slot, : adapter.rank].copy_(adapter.rows, non_blocking=True)
            self._adds.set_rank(slot, adapter.rank)

    def plan_step(
        self, lengths: Iterable[int], slots: Collection[int | None], num_rows: int
    ) -> bool:
        """`plan`, or `rest` if no slice has an adapter; returns whether any has."""
        if all(slot is None for slot in slots):
            self.rest()
            return False
        self.plan(lengths, slots, num_rows)
        return True

    def plan(self, lengths: Iterable[int], slots: Iterable[int | None], num_rows: int) -> None:
        """Plan the next step: the number of rows and the slot of each slice; further rows have no
        adapter."""
        numbers = [NO_SLOT if slot is None else slot for slot in slots]
        of_rows = np.full(num_rows, NO_SLOT, np.int32)
        found: Int32s = np.repeat(np.array(numbers, np.int32), [*lengths])
        of_rows[: len(found)] = found
        self._adds.plan(of_rows)
        self._adds.is_active = True

    def rest(self) -> None:
        """Plan a step without adapters."""
        self._adds.is_active = False
