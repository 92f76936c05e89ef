"""What puller and source say on a data connection: fixed headers, raw bytes, lengths with caps.

    puller                                   source
      │ opening   magic, mode, pool, nonce     │
      │ ─────────────────────────────────────► │
      │   challenge   magic, nonce, proof      │  both know the key that the source gave its
      │ ◄───────────────────────────────────── │  linked peers over their control streams
      │ proof, the piece of each block         │
      │ ─────────────────────────────────────► │
      │   description of the pool              │
      │ ◄───────────────────────────────────── │
      │ request   ids, generations, CRC-32     │
      │ ─────────────────────────────────────► │  generations as announced?
      │   begin │ data, CRC-32 ... │ verdict   │  still, behind the last byte?
      │ ◄───────────────────────────────────── │

Between GPUs both ends launch at once: nothing is said before the verdict. All numbers are
little-endian. Trusts nothing that it decodes; opens no socket.
"""

from __future__ import annotations

import enum
import hmac
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..core.errors import HandoffFailed
from .head_ranges import BlockCut
from .transport import PullOutcome

MAX_FRAME_BYTES = 1 << 20
MAX_REQUEST_BLOCKS = 16_384
MAX_DESCRIPTION_BYTES = 4096
NONCE_BYTES, PROOF_BYTES = 16, 32
PAIR_ID_BYTES = 128  # sizeof(ncclUniqueId)

_MAGIC = b"BATONKVD"
_VERSION = 3  # of what is said here, and of how a request is cut (parts.py)
_OPENING = struct.Struct("<8sHH16s16s")  # magic, version, mode, pool, nonce
_CHALLENGE = struct.Struct("<8s16s32s")  # magic, nonce, the source's proof
_CUT = struct.Struct("<4I")  # rows, width, pitch and offset in the source's blocks
_LENGTH = struct.Struct("<I")
_REQUEST = struct.Struct("<4sII")  # tag, number of blocks, CRC-32
_FRAME = struct.Struct("<4sII")  # tag, length or outcome, CRC-32 of the data
_TAG_REQUEST, _TAG_BEGIN, _TAG_DATA, _TAG_END = b"PULL", b"BEGN", b"DATA", b"DONE"

OPENING_BYTES = _OPENING.size
CHALLENGE_BYTES = _CHALLENGE.size
CUT_BYTES = _CUT.size
LENGTH_BYTES = _LENGTH.size
NO_CUT = bytes(CUT_BYTES)  # in place of a piece: the description is all that is wanted
REQUEST_BYTES = _REQUEST.size
FRAME_BYTES = _FRAME.size
BYTES_PER_BLOCK = 16  # of a request's body

_OUTCOMES = tuple(PullOutcome)


class Mode(enum.IntEnum):
    """How the blocks themselves travel."""

    BYTES = 0  # on this connection
    NCCL = 1  # between the GPUs; the pair's id follows the piece

    @property
    def id_bytes(self) -> int:
        """How long that id is."""
        return PAIR_ID_BYTES if self is Mode.NCCL else 0

    @property
    def says_begin(self) -> bool:
        """Whether the source first says if it has the blocks. Where it does not, it sends what lies
        there, and tells at the end what that was worth."""
        return self is Mode.BYTES


@dataclass(frozen=True, slots=True)
class Opening:
    """A puller's first words."""

    mode: Mode
    pool: str
    nonce: bytes

    def pack(self) -> bytes:
        return _OPENING.pack(_MAGIC, _VERSION, self.mode, bytes.fromhex(self.pool), self.nonce)

    @classmethod
    def unpack(cls, packed: bytes | bytearray) -> Opening:
        """Raises HandoffFailed if that is no puller of this version."""
        magic, version, mode, pool, nonce = _OPENING.unpack(packed)
        if magic != _MAGIC or version != _VERSION or mode not in set(Mode):
            raise HandoffFailed("bad magic, or another version")
        return cls(Mode(mode), pool.hex(), nonce)


def pack_challenge(nonce: bytes, proof: bytes) -> bytes:
    return _CHALLENGE.pack(_MAGIC, nonce, proof)


def unpack_challenge(packed: bytes | bytearray) -> tuple[bytes, bytes]:
    """Nonce and proof; raises HandoffFailed if that is no source of this version."""
    magic, nonce, proof = _CHALLENGE.unpack(packed)
    if magic != _MAGIC:
        raise HandoffFailed("the other end is no source of this version")
    return nonce, proof


def prove(key: bytes, who: str, opening: Opening, nonce: bytes, said: bytes = b"") -> bytes:
    """That `who` knows the key, in this conversation, and said `said`."""
    text = b"|".join((b"baton kv data", who.encode(), opening.pack(), nonce, said))
    return hmac.digest(key, text, "sha256")


def is_proven(
    proof: bytes, key: bytes, who: str, opening: Opening, nonce: bytes, said: bytes = b""
) -> bool:
    """Whether `proof` is what `prove` gives, in constant time."""
    return hmac.compare_digest(proof, prove(key, who, opening, nonce, said))


def pack_length(num_bytes: int) -> bytes:
    """In front of the description."""
    return _LENGTH.pack(num_bytes)


def unpack_length(packed: bytes | bytearray) -> int:
    """Raises HandoffFailed if no description is so long."""
    (num_bytes,) = _LENGTH.unpack(packed)
    if num_bytes > MAX_DESCRIPTION_BYTES:
        raise HandoffFailed(f"the source announces a description of {num_bytes} bytes")
    return int(num_bytes)


def pack_cut(cut: BlockCut) -> bytes:
    return _CUT.pack(cut.num_rows, cut.width, cut.source_pitch, cut.source_offset)


def unpack_cut(packed: bytes | bytearray, block_bytes: int) -> BlockCut:
    """The piece, packed tightly here; raises HandoffFailed if blocks have not got it."""
    num_rows, width, pitch, offset = _CUT.unpack(packed)
    if num_rows * pitch != block_bytes or width == 0 or offset + width > pitch:
        raise HandoffFailed(f"a block has {block_bytes} bytes here: that is no piece of it")
    return BlockCut(num_rows, width, pitch, offset, width, 0)


def pack_request(ids: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]) -> bytes:
    body = ids.tobytes() + generations.tobytes()
    return _REQUEST.pack(_TAG_REQUEST, len(ids), zlib.crc32(body)) + body


def unpack_request(packed: bytes | bytearray) -> tuple[int, int]:
    """How many blocks, and the CRC of the body; raises HandoffFailed."""
    tag, num_blocks, crc = _REQUEST.unpack(packed)
    if tag != _TAG_REQUEST or not 1 <= num_blocks <= MAX_REQUEST_BLOCKS:
        raise HandoffFailed(f"no request, or one for {num_blocks} blocks")
    return num_blocks, crc


def unpack_body(
    body: bytes | bytearray, num_blocks: int, crc: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Ids and generations; raises HandoffFailed if they were damaged on the way."""
    if zlib.crc32(body) != crc:
        raise HandoffFailed("a request was damaged on the way")
    return (
        np.frombuffer(body, "<i8", num_blocks),
        np.frombuffer(body, "<u8", num_blocks, 8 * num_blocks),
    )


def pack_begin() -> bytes:
    """The generations were right: the blocks are on their way."""
    return _FRAME.pack(_TAG_BEGIN, 0, 0)


def pack_data(data: memoryview) -> bytes:
    """The header of a frame with `data`, which goes behind it."""
    assert 0 < len(data) <= MAX_FRAME_BYTES
    return _FRAME.pack(_TAG_DATA, len(data), checksum(data))


def checksum(data: memoryview) -> int:
    """CRC-32: eight times as fast as BLAKE2b here, and finds what TCP's own sum lets pass."""
    return zlib.crc32(data)


def pack_end(outcome: PullOutcome) -> bytes:
    """The verdict on all that was sent; the last word on a request."""
    return _FRAME.pack(_TAG_END, _OUTCOMES.index(outcome), 0)


@dataclass(frozen=True, slots=True)
class DataFrame:
    """So many bytes follow, with this CRC-32."""

    num_bytes: int
    crc: int


def unpack_frame(packed: bytes | bytearray) -> DataFrame | PullOutcome | None:
    """Data, the verdict, or None: it begins. Raises HandoffFailed."""
    tag, number, crc = _FRAME.unpack(packed)
    if tag == _TAG_BEGIN:
        return None
    if tag == _TAG_DATA and 0 < number <= MAX_FRAME_BYTES:
        return DataFrame(number, crc)
    if tag == _TAG_END and number < len(_OUTCOMES):
        outcome: PullOutcome = _OUTCOMES[number]
        return outcome
    raise HandoffFailed("the source sent a frame that makes no sense")
