"""Pieces of a GPU pool's blocks as plain bytes, by way of pinned host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.errors import HandoffFailed
from ...engine.kv.cuda_kv_memory import CudaKvMemory
from ..window.block_pairs import Ids
from ..window.head_ranges import BlockCut
from .tcp import Bytes


class CudaBlockBytes:
    """See `BlockBytes`. Copies on a stream of its own."""

    def __init__(self, kv: CudaKvMemory, cut: BlockCut) -> None:
        self._kv = kv
        self._cut = cut
        self._device = kv.tensor.device
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def read(self, block_ids: Ids) -> Bytes:
        cut = self._cut
        begin, end = cut.source_offset, cut.source_offset + cut.width
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                ids = torch.from_numpy(block_ids.copy()).to(self._device)
                pieces = self._rows(cut.source_pitch)[:, :, begin:end].index_select(0, ids)
                host = torch.empty(pieces.shape, dtype=torch.uint8, pin_memory=True)
                host.copy_(pieces, non_blocking=True)
                self._stream.synchronize()
        except RuntimeError as error:
            raise HandoffFailed(f"the pool cannot be read: {error}") from error
        data: Bytes = host.numpy().reshape(-1)
        return data

    def write(self, block_ids: Ids, data: Bytes) -> None:
        cut = self._cut
        begin, end = cut.offset, cut.offset + cut.width
        pieces = torch.from_numpy(data).view(len(block_ids), cut.num_rows, cut.width)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                ids = torch.from_numpy(block_ids.copy()).to(self._device)
                ours = self._rows(cut.pitch)[:, :, begin:end]
                ours.index_copy_(0, ids, pieces.to(self._device))
                self._stream.synchronize()
        except RuntimeError as error:
            raise HandoffFailed(f"the pool cannot be written: {error}") from error

    def _rows(self, pitch: int) -> Tensor:
        """[blocks, rows, pitch], bytes."""
        flat = self._kv.tensor.view(-1).view(torch.uint8)
        return flat.view(self._kv.num_blocks, -1, pitch)
