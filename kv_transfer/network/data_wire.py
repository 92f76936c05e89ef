"""The messages of a data connection: fixed headers, raw bytes, bounded lengths.

    puller                                   source
      │ core/channels/handshake.py             │  with the key that the source gave this puller over
      │ ◄────────────────────────────────────► │  their link; the answer covers what follows:
      │ mode, the piece of each block, an id   │
      │ ─────────────────────────────────────► │
      │   description of the pool              │
      │ ◄───────────────────────────────────── │
      │ request   ids, generations, CRC-32     │
      │ ─────────────────────────────────────► │  generations as announced?
      │   begin │ data, CRC-32 ... │ verdict   │  still, behind the last byte?
      │ ◄───────────────────────────────────── │

Generations are drawn at random: only a puller that received a block's announcement can request it.
Between GPUs both ends launch at once: nothing is sent before the verdict, and the padding block is
sent in place of blocks with other generations than announced. All numbers are little-endian. Checks
all that it decodes; opens no socket.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from ...core.errors import HandoffFailed
from ..export.pool_address import MAX_DESCRIPTION_BYTES
from ..window.block_pairs import Generations, Ids
from ..window.block_pieces import BlockCut
from ..window.transport import PullOutcome

MAX_FRAME_BYTES = 1 << 20
MAX_REQUEST_BLOCKS = 16_384
PAIR_ID_BYTES = 128  # sizeof(ncclUniqueId)

PURPOSE = b"kv data 9"  # of the handshake; the number is the version of what is sent here
# Mode; rows, width, pitch and offset in the source's blocks (0: only the description is requested);
# the pair's id.
_TERMS = struct.Struct(f"<H4I{PAIR_ID_BYTES}s")
_LENGTH = struct.Struct("<I")
_REQUEST = struct.Struct("<4sII")  # tag, number of blocks, CRC-32
_FRAME = struct.Struct("<4sII")  # tag, length or outcome, CRC-32 of the data
_TAG_REQUEST, _TAG_BEGIN, _TAG_DATA, _TAG_END = b"PULL", b"BEGN", b"DATA", b"DONE"

TERMS_BYTES = _TERMS.size
LENGTH_BYTES = _LENGTH.size
REQUEST_BYTES = _REQUEST.size
FRAME_BYTES = _FRAME.size
BYTES_PER_BLOCK = 16  # of a request's body

_OUTCOMES = tuple(PullOutcome)


class Mode(enum.IntEnum):
    """How the blocks are sent."""

    BYTES = 0  # on this connection
    NCCL = 1  # between the GPUs, which connect by the pair's id

    @property
    def sends_begin(self) -> bool:
        """Whether the source confirms that it has the blocks before it sends them."""
        return self is Mode.BYTES


def pack_terms(mode: Mode, cut: BlockCut | None, pair_id: bytes) -> bytes:
    """Sent with a puller's part of the handshake. `cut` None: only the description is requested."""
    piece = (0, 0, 0, 0)
    if cut is not None:
        piece = (cut.num_rows, cut.width, cut.source_pitch, cut.source_offset)
    return _TERMS.pack(mode, *piece, pair_id)


def unpack_terms(packed: bytes, block_bytes: int) -> tuple[Mode, BlockCut | None, bytes]:
    """The mode, the piece, the pair's id. Raises HandoffFailed."""
    mode, *piece, pair_id = _TERMS.unpack(packed)
    if mode not in set(Mode):
        raise HandoffFailed("it requests an unknown mode of transfer")
    return Mode(mode), _cut_of(block_bytes, *piece) if any(piece) else None, pair_id


def pack_length(num_bytes: int) -> bytes:
    """The length of the description, sent before it."""
    return _LENGTH.pack(num_bytes)


def unpack_length(packed: bytes | bytearray) -> int:
    """Raises HandoffFailed if it is more than the longest description."""
    (num_bytes,) = _LENGTH.unpack(packed)
    if num_bytes > MAX_DESCRIPTION_BYTES:
        raise HandoffFailed(f"the source announces a description of {num_bytes} bytes")
    return int(num_bytes)


def _cut_of(block_bytes: int, num_rows: int, width: int, pitch: int, offset: int) -> BlockCut:
    """The piece, contiguous at this end. Raises HandoffFailed if it is not within a block."""
    is_cut = num_rows and width and pitch and block_bytes % pitch == 0
    row, begin = divmod(offset, pitch) if is_cut else (0, 0)
    if not is_cut or begin + width > pitch or row + num_rows > block_bytes // pitch:
        raise HandoffFailed(f"a block has {block_bytes} bytes here: that is no piece of it")
    return BlockCut(num_rows, width, pitch, offset, width, 0, block_bytes, num_rows * width)


def pack_request(ids: Ids, generations: Generations) -> bytes:
    body = ids.tobytes() + generations.tobytes()
    return _REQUEST.pack(_TAG_REQUEST, len(ids), zlib.crc32(body)) + body


def unpack_request(packed: bytes | bytearray) -> tuple[int, int]:
    """The number of blocks and the CRC of the body. Raises HandoffFailed."""
    tag, num_blocks, crc = _REQUEST.unpack(packed)
    if tag != _TAG_REQUEST or not 1 <= num_blocks <= MAX_REQUEST_BLOCKS:
        raise HandoffFailed(f"no request, or one for {num_blocks} blocks")
    return num_blocks, crc


def unpack_body(body: bytes | bytearray, num_blocks: int, crc: int) -> tuple[Ids, Generations]:
    """Ids and generations. Raises HandoffFailed if they were damaged."""
    if zlib.crc32(body) != crc:
        raise HandoffFailed("a request was damaged on the way")
    return (
        np.frombuffer(body, "<i8", num_blocks),
        np.frombuffer(body, "<u8", num_blocks, 8 * num_blocks),
    )


def pack_begin() -> bytes:
    """The generations were right: the blocks follow."""
    return _FRAME.pack(_TAG_BEGIN, 0, 0)


def pack_data(data: memoryview) -> bytes:
    """The header of a frame; `data` is sent after it."""
    assert 0 < len(data) <= MAX_FRAME_BYTES
    return _FRAME.pack(_TAG_DATA, len(data), checksum(data))


def checksum(data: memoryview) -> int:
    """CRC-32: eight times as fast as BLAKE2b, and detects what TCP's own checksum misses."""
    return zlib.crc32(data)


def pack_end(outcome: PullOutcome) -> bytes:
    """The verdict on all blocks sent; the end of a request."""
    return _FRAME.pack(_TAG_END, _OUTCOMES.index(outcome), 0)


@dataclass(frozen=True, slots=True)
class DataFrame:
    """The header of a data frame: the number of bytes that follow, and their CRC-32."""

    num_bytes: int
    crc: int


def unpack_frame(packed: bytes | bytearray) -> DataFrame | PullOutcome | None:
    """A data frame, the verdict, or None for the begin frame. Raises HandoffFailed."""
    tag, number, crc = _FRAME.unpack(packed)
    if tag == _TAG_BEGIN:
        return None
    if tag == _TAG_DATA and 0 < number <= MAX_FRAME_BYTES:
        return DataFrame(number, crc)
    if tag == _TAG_END and number < len(_OUTCOMES):
        outcome: PullOutcome = _OUTCOMES[number]
        return outcome
    raise HandoffFailed("the source sent an invalid frame")
