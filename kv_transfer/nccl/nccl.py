"""`nccl`: blocks between GPUs without peer access, over whatever link NCCL finds.

    puller   draws the pair's id ─► data connection, mode NCCL ─► both ends connect
    a pull   request ─► send ~ receive, part by part ─► generations still the same? verdict

Each pair of ranks has its own communicator. When it stalls, or the connection ends, only this
communicator is aborted and the pull fails; the next pull creates a new one, since that takes too
long within a pull. Not tested across two hosts.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.channels.engine_tls import WrapSocket
from ...core.errors import HandoffFailed
from ..network import data_wire as wire
from ..network.data_client import DataClient, connect
from ..network.remote_window import RemoteWindow
from ..network.stream import SILENCE_S, Deadline, Stream
from ..window.block_pairs import Ids
from ..window.block_pieces import BlockCut, BlockPiece
from ..window.network_address import RemotePool
from .nccl_lane import NcclLane

_SET_UP_S = 20.0  # to connect, and for the first transfers, which connect further
_SLOWEST_BYTES_PER_S = 1e9

# Opens a source's end of a pair, for pieces of that cut and the pair's id. Raises HandoffFailed.
OpenOutlet = Callable[[BlockCut, bytes, Deadline], NcclLane]
# Opens a puller's end, for its piece of blocks. Raises HandoffFailed.
OpenCarrier = Callable[[BlockPiece | None, bytes, Deadline], NcclLane]


class NcclOutlet:
    """Sends pieces over a communicator. A `MakeOutlet`, once `open_lane` is bound."""

    def __init__(
        self, open_lane: OpenOutlet, stream: Stream, cut: BlockCut, unique_id: bytes
    ) -> None:
        self._stream = stream
        self._lane = open_lane(cut, unique_id, stream.watched(_SET_UP_S))
        self._piece_bytes = cut.piece_bytes

    def send(self, block_ids: Ids) -> None:
        """See `Outlet`."""
        self._lane.send(block_ids, _deadline(self._stream, len(block_ids) * self._piece_bytes))

    def close(self) -> None:
        self._lane.close()


class NcclTransport:
    """Opens windows onto pools of GPUs that NCCL can connect."""

    name = "nccl"

    def __init__(
        self,
        open_lane: OpenCarrier,
        block_bytes: int,
        new_id: Callable[[], bytes],
        wrap: WrapSocket = lambda connection: connection,
    ) -> None:
        """`open_lane`: opens lanes that write to the local pool."""
        self._open_lane = open_lane
        self._block_bytes = block_bytes
        self._new_id = new_id
        self._wrap = wrap

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> RemoteWindow:
        """Raises HandoffFailed if the source has no port or no GPU, or NCCL does not connect.

        Takes seconds, in which NCCL searches for a link.
        """
        if not source.port:
            raise HandoffFailed("the source has no port")
        cut = BlockCut.of(piece, self._block_bytes)

        def open_pair() -> tuple[DataClient, NcclLane]:
            unique_id = self._new_id()
            client = connect(source, cut, wire.Mode.NCCL, self._wrap, unique_id)
            try:
                return client, self._open_lane(piece, unique_id, client.stream.watched(_SET_UP_S))
            except BaseException:
                client.close()
                raise

        return RemoteWindow(source.name, _NcclCarrier(open_pair, cut), cut)


class _NcclCarrier:
    """A `Carrier` with a new pair for each connection."""

    transport = "nccl"
    connects_quickly = False

    def __init__(self, open_pair: Callable[[], tuple[DataClient, NcclLane]], cut: BlockCut) -> None:
        self._open_pair = open_pair
        self._cut = cut
        self._lane: NcclLane | None = None
        self.max_request_blocks = wire.MAX_REQUEST_BLOCKS

    def connect(self, deadline: Deadline | None = None) -> DataClient:
        client, self._lane = self._open_pair()
        return client

    def receive(
        self, client: DataClient, num_blocks: int, block_ids: Ids | None, deadline: Deadline
    ) -> bool:
        assert self._lane is not None
        by = _deadline(client.stream, num_blocks * self._cut.piece_bytes)
        self._lane.receive(num_blocks, block_ids, by)
        return True

    def commit(self, block_ids: Ids) -> None:
        """Nothing to do: `receive` wrote to the pool, to blocks that nothing reads before."""

    def first_piece(self) -> bytes:
        assert self._lane is not None
        return self._lane.first_piece()

    def hang_up(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None


def _deadline(stream: Stream, num_bytes: int) -> Deadline:
    """When a transfer is treated as stalled; it ends too if `stream` closes."""
    return stream.watched(SILENCE_S + num_bytes / _SLOWEST_BYTES_PER_S)
