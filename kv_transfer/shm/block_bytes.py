"""Pieces of blocks as plain bytes, out of a pool and into one: what a network needs of memory.

pool  [blocks, rows, pitch] ── read ──► tight [blocks, rows, width] ── write ──► pool
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..window.block_pairs import Ids
from ..window.head_ranges import BlockCut
from .shm import HostPool

Bytes = npt.NDArray[np.uint8]


class BlockBytes(Protocol):
    """One pool's. Any thread, one at a time for each object."""

    def read(self, block_ids: npt.NDArray[np.int64]) -> Bytes:
        """[blocks * piece_bytes], valid until the next call: a copy, however the pool changes."""
        ...

    def write(self, block_ids: npt.NDArray[np.int64], data: Bytes) -> None:
        """Put what `read` gave into blocks of ours."""
        ...


class HostBlockBytes:
    """Of a pool in host memory, whose blocks are cut as at the source (read) or here (write)."""

    def __init__(self, pool: HostPool, cut: BlockCut) -> None:
        self._pool = pool
        self._cut = cut
        self._buffer: Bytes = np.empty(0, np.uint8)  # kept: new pages cost as much as the copy

    def read(self, block_ids: Ids) -> Bytes:
        cut = self._cut
        rows = self._rows(cut.source_pitch)[:, :, cut.source_offset :][:, :, : cut.width]
        num_bytes = len(block_ids) * cut.piece_bytes
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(num_bytes, np.uint8)
        data = self._buffer[:num_bytes]
        pieces = data.reshape(len(block_ids), cut.num_rows, cut.width)
        for piece, block_id in zip(pieces, block_ids.tolist(), strict=True):
            piece[:] = rows[block_id]
        return data

    def write(self, block_ids: Ids, data: Bytes) -> None:
        cut = self._cut
        rows = self._rows(cut.pitch)[:, :, cut.offset :][:, :, : cut.width]
        pieces = data.reshape(len(block_ids), cut.num_rows, cut.width)
        for piece, block_id in zip(pieces, block_ids.tolist(), strict=True):
            rows[block_id] = piece

    def _rows(self, pitch: int) -> Bytes:
        """[blocks, rows, pitch]; made for each call, or the pool could not be closed."""
        flat = np.frombuffer(self._pool.view, np.uint8)
        return flat.reshape(self._pool.num_blocks, -1, pitch)
