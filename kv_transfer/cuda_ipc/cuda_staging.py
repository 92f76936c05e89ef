"""Blocks through pinned host memory: for GPUs that cannot read each other's.

    source GPU ──stream there──► slot 0   slot 1   slot 2 ...  ──stream here──► our GPU
                 fills slot i+1             while slot i is emptied

Both directions are copy engines' work, ordered by events: the host only submits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...engine.kv.cuda_kv_memory import CudaKvMemory
from ..window.block_pairs import Ids, find_runs
from ..window.head_ranges import BlockCut
from .cuda_ipc_copy import copy_2d, copy_pieces

_NUM_SLOTS = 4
_SLOT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Slot:
    """Pinned memory for some blocks; the events say when it is full, and when empty again."""

    memory: Tensor
    is_full: torch.cuda.Event
    is_empty: torch.cuda.Event


class StagedCopy:
    """A `CopyMethod` that needs no peer access; takes 32 MB of pinned memory, or four blocks."""

    name = "staged"
    launches_at_once = False

    def __init__(self, address: int, source: torch.device, kv: CudaKvMemory, cut: BlockCut) -> None:
        """`address` is that of the source's pool as `source`, its GPU, sees it."""
        self._address = address
        self._source = source
        self._cut = cut
        self._blocks_per_slot = max(1, _SLOT_BYTES // cut.piece_bytes)
        slot_bytes = self._blocks_per_slot * cut.piece_bytes
        slots = []
        with torch.cuda.device(source):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            full = [torch.cuda.Event() for _ in range(_NUM_SLOTS)]  # type: ignore[no-untyped-call]
        for is_full in full:
            memory = torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True)
            is_empty = torch.cuda.Event()  # type: ignore[no-untyped-call]
            slots.append(_Slot(memory, is_full, is_empty))
        self._slots = itertools.cycle(slots)

    def prepare(self, ids: Ids, pool: Tensor, stream: torch.cuda.Stream) -> Callable[[], None]:
        """See `CopyMethod`."""
        return partial(self._launch, ids, pool, stream)

    def _launch(self, ids: Ids, pool: Tensor, stream: torch.cuda.Stream) -> None:
        for begin in range(0, ids.shape[1], self._blocks_per_slot):
            part = ids[:, begin : begin + self._blocks_per_slot]
            self._launch_slot(next(self._slots), part, pool, stream)

    def _launch_slot(self, slot: _Slot, ids: Ids, pool: Tensor, here: torch.cuda.Stream) -> None:
        with torch.cuda.device(self._source), torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.is_empty)
            self._fill(slot.memory.data_ptr(), ids[0])
            slot.is_full.record(self._stream)
        here.wait_event(slot.is_full)
        self._empty(slot.memory.data_ptr(), ids[1], pool.data_ptr(), here)
        slot.is_empty.record(here)

    def _fill(self, slot: int, source_ids: Ids) -> None:
        cut = self._cut
        if cut.is_whole:
            runs = find_runs(np.stack([source_ids, np.arange(len(source_ids))]))
            copy_pieces(self._address, slot, runs, cut.piece_bytes, self._stream)
            return
        shape = (cut.width, cut.width, cut.num_rows, self._stream)  # tight in the slot
        for index, block_id in enumerate(source_ids.tolist()):
            source = self._address + block_id * cut.source_block_bytes + cut.source_offset
            copy_2d(source, cut.source_pitch, slot + index * cut.piece_bytes, *shape)

    def _empty(self, slot: int, block_ids: Ids, pool: int, stream: torch.cuda.Stream) -> None:
        cut = self._cut
        if cut.is_whole:
            runs = find_runs(np.stack([np.arange(len(block_ids)), block_ids]))
            copy_pieces(slot, pool, runs, cut.piece_bytes, stream)
            return
        for index, block_id in enumerate(block_ids.tolist()):
            source = slot + index * cut.piece_bytes
            target = pool + block_id * cut.num_rows * cut.pitch + cut.offset
            copy_2d(source, cut.width, target, cut.pitch, cut.width, cut.num_rows, stream)
