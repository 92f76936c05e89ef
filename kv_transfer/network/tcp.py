"""`tcp`: blocks on the data connection itself, between hosts without a better link.

    source    pool ─► copy ─► frames with CRC-32          puller    frames ─► staging ─► pool
                                                                          once the verdict is good
A GPU's blocks pass through host memory at both ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.channels.engine_tls import WrapSocket
from ...core.errors import HandoffFailed
from ...engine.kv.kv_memory import CpuKvMemory, CudaKvMemory
from ..window.block_pairs import Ids
from ..window.block_pieces import BlockCut, BlockPiece
from ..window.network_address import RemotePool
from . import data_wire as wire
from .data_client import DataClient, connect
from .remote_window import RemoteWindow
from .stream import Deadline, Stream

_REQUEST_BYTES = 16 << 20  # of a puller's staging buffer
_SENT_AT_ONCE_BYTES = 2 << 20
_SEND_S = 10.0  # for a frame that is sent slowly, but without silence

Bytes = npt.NDArray[np.uint8]


class BlockBytes(Protocol):
    """Pieces of one pool's blocks as plain bytes. One thread at a time may use it.

    pool  [blocks, rows, pitch] ── read ──► tight [blocks, rows, width] ── write ──► pool
    """

    def read(self, block_ids: Ids) -> Bytes:
        """A copy [blocks * piece_bytes], valid until the next call."""

    def write(self, block_ids: Ids, data: Bytes) -> None:
        """Copy `data`, from `read` at the source, into local blocks."""


class HostBlockBytes:
    """A pool in host memory. `read` cuts its blocks like a source's, `write` like local ones."""

    def __init__(self, pool: CpuKvMemory, cut: BlockCut) -> None:
        self._pool = pool
        self._cut = cut
        self._buffer: Bytes = np.empty(0, np.uint8)  # kept: new pages cost as much as the copy

    def read(self, block_ids: Ids) -> Bytes:
        cut = self._cut
        # Created in each call: while it exists, the pool cannot be closed.
        rows = cut.there(self._pool.view, self._pool.num_blocks)
        num_bytes = len(block_ids) * cut.piece_bytes
        if len(self._buffer) < num_bytes:
            self._buffer = np.empty(num_bytes, np.uint8)
        data = self._buffer[:num_bytes]
        pieces = data.view(rows.dtype).reshape(-1, *rows.shape[1:])
        for piece, block_id in zip(pieces, block_ids.tolist(), strict=True):
            piece[:] = rows[block_id]
        return data

    def write(self, block_ids: Ids, data: Bytes) -> None:
        rows = self._cut.here(self._pool.view, self._pool.num_blocks)
        pieces = data.view(rows.dtype).reshape(-1, *rows.shape[1:])
        for piece, block_id in zip(pieces, block_ids.tolist(), strict=True):
            rows[block_id] = piece


# `BlockBytes` of this rank's pool, in pieces of that cut.
MakeBytes = Callable[[BlockCut], BlockBytes]


class TcpOutlet:
    """Sends the pieces unchanged. A `MakeOutlet`, once `make_bytes` is bound."""

    def __init__(self, make_bytes: MakeBytes, stream: Stream, cut: BlockCut, _: bytes) -> None:
        self._stream = stream
        self._blocks = make_bytes(cut)
        self._at_once = max(1, _SENT_AT_ONCE_BYTES // cut.piece_bytes)

    def send(self, block_ids: Ids) -> None:
        """See `Outlet`."""
        for begin in range(0, len(block_ids), self._at_once):
            data = self._blocks.read(block_ids[begin : begin + self._at_once]).data
            for start in range(0, len(data), wire.MAX_FRAME_BYTES):
                part = data[start : start + wire.MAX_FRAME_BYTES]
                deadline = Deadline(_SEND_S)
                self._stream.write(wire.pack_data(part), deadline)
                self._stream.write(part, deadline)

    def close(self) -> None: ...


class TcpTransport:
    """Opens windows onto pools of other hosts; with `anywhere`, also onto pools of this host."""

    name = "tcp"

    def __init__(
        self,
        make_bytes: MakeBytes,
        block_bytes: int,
        *,
        anywhere: bool,
        wrap: WrapSocket = lambda connection: connection,
    ) -> None:
        """`make_bytes`: of the local pool to copy to, which must outlive the windows."""
        self._make_bytes = make_bytes
        self._block_bytes = block_bytes
        self._anywhere = anywhere
        self._wrap = wrap

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> RemoteWindow:
        """Raises HandoffFailed if the source has no port or sends none, or is on this host."""
        if not source.port:
            raise HandoffFailed("the source has no port")
        if not (source.is_elsewhere or self._anywhere):
            raise HandoffFailed("the source is on this host: only --kv-transport tcp takes it")
        cut = BlockCut.of(piece, self._block_bytes)
        carrier = _TcpCarrier(source, cut, self._make_bytes(cut), self._wrap)
        return RemoteWindow(source.name, carrier, cut)


class _TcpCarrier:
    """A `Carrier` that receives into staging, and copies into the pool at `commit`."""

    transport = "tcp"
    connects_quickly = True

    def __init__(
        self, source: RemotePool, cut: BlockCut, blocks: BlockBytes, wrap: WrapSocket
    ) -> None:
        self._source = source
        self._cut = cut
        self._blocks = blocks
        self._wrap = wrap
        self.max_request_blocks = min(
            max(1, _REQUEST_BYTES // cut.piece_bytes), wire.MAX_REQUEST_BLOCKS
        )
        self._staging: Bytes = np.empty(self.max_request_blocks * cut.piece_bytes, np.uint8)

    def connect(self, deadline: Deadline | None = None) -> DataClient:
        return connect(self._source, self._cut, wrap=self._wrap, deadline=deadline)

    def receive(
        self, client: DataClient, num_blocks: int, block_ids: Ids | None, deadline: Deadline
    ) -> bool:
        staged = self._staging.data[: num_blocks * self._cut.piece_bytes]
        return client.receive_data(staged, deadline)

    def commit(self, block_ids: Ids) -> None:
        self._blocks.write(block_ids, self._staging[: len(block_ids) * self._cut.piece_bytes])

    def first_piece(self) -> bytes:
        return self._staging[: self._cut.piece_bytes].tobytes()

    def hang_up(self) -> None: ...


class CudaBlockBytes:
    """`BlockBytes` of a GPU's pool; copies on its own stream."""

    def __init__(self, kv: CudaKvMemory, cut: BlockCut) -> None:
        self._kv = kv
        self._cut = cut
        self._device = kv.tensor.device
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def read(self, block_ids: Ids) -> Bytes:
        cut = self._cut
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                ids = torch.from_numpy(block_ids.copy()).to(self._device)
                pieces = self._rows(cut.source_pitch, cut.source_offset).index_select(0, ids)
                host = torch.empty(pieces.shape, dtype=torch.uint8, pin_memory=True)
                host.copy_(pieces, non_blocking=True)
                self._stream.synchronize()
        except RuntimeError as error:
            raise HandoffFailed(f"the pool cannot be read: {error}") from error
        data: Bytes = host.numpy().reshape(-1)
        return data

    def write(self, block_ids: Ids, data: Bytes) -> None:
        cut = self._cut
        pieces = torch.from_numpy(data).view(len(block_ids), cut.num_rows, cut.width)
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                ids = torch.from_numpy(block_ids.copy()).to(self._device)
                ours = self._rows(cut.pitch, cut.offset)
                ours.index_copy_(0, ids, pieces.to(self._device))
                self._stream.synchronize()
        except RuntimeError as error:
            raise HandoffFailed(f"the pool cannot be written: {error}") from error

    def _rows(self, pitch: int, offset: int) -> Tensor:
        """[blocks, rows, width], bytes."""
        flat = self._kv.tensor.view(-1).view(torch.uint8)
        row, begin = divmod(offset, pitch)
        rows = flat.view(self._kv.num_blocks, -1, pitch)[:, row : row + self._cut.num_rows]
        return rows[:, :, begin : begin + self._cut.width]
