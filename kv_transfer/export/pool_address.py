"""How a puller finds and trusts a source's memory on this host: name, user, key, description.

    puller                                       exporter thread of the source
      │ connect "\\0baton-kv-<uid>-<incarnation>"    │
      │ ───────────────────────────────────────►   │ same user?
    same user?       core/channels/handshake.py, with the key that came over the pair's link
      │ ◄─────────────────────────────────────────  │ description + descriptors

          offered        description                     descriptors
          host memory    shape, parts                    [pool, generations]
          GPU memory     shape, GPU, IPC handle, parts   [generations]

An engine of several ranks has a pool on each, with the KV heads of that rank, and each is exported
by its own process under an id of its own. Rank 0's pool has the engine's incarnation for an id, and
every description lists the pools of all ranks. Blocks have the same ids in all of them, and one
page of generations. The name lies in the kernel's abstract namespace: no path, nothing left behind
by kill -9.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from ...core.channels.handshake import CHALLENGE_BYTES, Dialer
from ...core.channels.same_host import require_same_user, socket_address
from ...core.errors import HandoffFailed, Unauthenticated
from ...engine.kv.block_pool import CANARY_BLOCK
from ..window.network_address import RemotePool

PURPOSE = b"pool"  # of the handshake; its address is the same everywhere: the name has the rest
ADDRESS = "this host"

_IPC_HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)

_SHAPE = struct.Struct("=8s16sQQHH")  # ..., whether on a GPU, number of parts
_ON_GPU = struct.Struct(f"=16s{_IPC_HANDLE_BYTES}s")
_PART = struct.Struct("=16sHHH")
_MAX_PARTS = 64
_MAGIC = b"BATONKV3"
_CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Memory of a GPU that another process can open."""

    gpu_uuid: bytes  # 16: which GPU, however processes number them
    ipc_handle: bytes


@dataclass(frozen=True, slots=True)
class PoolPart:
    """One rank's pool: KV heads [first_kv_head, first_kv_head + num_kv_heads) of all blocks.

    `port`: where it is served to other hosts, as far as whoever says this knows.
    """

    pool: str  # 32 hex digits
    first_kv_head: int
    num_kv_heads: int
    port: int = 0


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """What an exporter says of the memory that it passes; without `cuda` it is host memory.

    `incarnation` names this pool. `parts` are those of the whole engine in the order of its ranks;
    none stands for an engine of one rank.
    """

    incarnation: str
    block_bytes: int
    num_blocks: int
    cuda: CudaMemory | None = None
    parts: tuple[PoolPart, ...] = ()

    @property
    def num_fds(self) -> int:
        """Descriptors that come with it: the pool if it is host memory, the generation page."""
        return 2 if self.cuda is None else 1

    @property
    def engine(self) -> str:
        """The incarnation of the engine, which is also that of its page of generations."""
        return self.parts[0].pool if self.parts else self.incarnation

    def pack(self) -> bytes:
        incarnation = bytes.fromhex(self.incarnation)
        sizes = (self.block_bytes, self.num_blocks, self.cuda is not None, len(self.parts))
        packed = [_SHAPE.pack(_MAGIC, incarnation, *sizes)]
        if self.cuda is not None:
            packed.append(_ON_GPU.pack(self.cuda.gpu_uuid, self.cuda.ipc_handle))
        for part in self.parts:
            pool = bytes.fromhex(part.pool)
            packed.append(_PART.pack(pool, part.first_kv_head, part.num_kv_heads, part.port))
        return b"".join(packed)

    @classmethod
    def unpack(cls, packed: bytes) -> PoolDescription:
        """Raises HandoffFailed if it is not a description of this version."""
        if len(packed) < _SHAPE.size:
            raise HandoffFailed("the exporter hung up or speaks another version")
        magic, incarnation, block_bytes, num_blocks, is_on_gpu, num_parts = _SHAPE.unpack_from(
            packed
        )
        parts_at = _SHAPE.size + is_on_gpu * _ON_GPU.size
        if magic != _MAGIC or is_on_gpu > 1 or len(packed) != parts_at + num_parts * _PART.size:
            raise HandoffFailed("the exporter speaks another version")
        if not block_bytes or num_blocks <= CANARY_BLOCK:
            raise HandoffFailed("the exporter speaks another version")
        cuda = CudaMemory(*_ON_GPU.unpack_from(packed, _SHAPE.size)) if is_on_gpu else None
        parts = tuple(
            PoolPart(pool.hex(), first, count, port)
            for pool, first, count, port in _PART.iter_unpack(packed[parts_at:])
        )
        return cls(incarnation.hex(), block_bytes, num_blocks, cuda, parts)

    def require(self, incarnation: str, block_bytes: int) -> None:
        """Raises HandoffFailed unless it is this incarnation's pool, in blocks of this size."""
        if self.incarnation != incarnation:
            raise HandoffFailed(f"the exporter is {self.incarnation}")
        if self.block_bytes != block_bytes:
            raise HandoffFailed(f"a block has {self.block_bytes} bytes there, {block_bytes} here")


_MAX_DESCRIPTION_BYTES = _SHAPE.size + _ON_GPU.size + _MAX_PARTS * _PART.size
_MAX_FDS = 2


def receive(incarnation: str, access: RemotePool | None) -> tuple[PoolDescription, list[int]]:
    """Ask the exporter of `incarnation`. The caller closes the descriptors.

    Raises HandoffFailed: nobody exports it, another user does, it does not hold the key, or what
    came is no description. Blocks for up to a second if the exporter hangs.
    """
    if access is None:
        raise HandoffFailed("the source has not said how its pools are reached")
    address, fds = socket_address(incarnation), list[int]()
    ours = Dialer(access.key, PURPOSE, dialer=access.puller, listener=incarnation, address=ADDRESS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(address)
            require_same_user(connection)
            connection.send(ours.opening)
            connection.send(ours.answer(connection.recv(CHALLENGE_BYTES)))
            packed, fds, _, _ = socket.recv_fds(
                connection, _MAX_DESCRIPTION_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
            description = PoolDescription.unpack(packed)
            if len(fds) != description.num_fds:
                raise HandoffFailed(f"the exporter passed {len(fds)} descriptors")
        except OSError as error:
            raise HandoffFailed(f"no exporter of {incarnation} on this host: {error}") from error
        except Unauthenticated as error:
            raise HandoffFailed(f"the exporter of {incarnation}: {error.message}") from error
        except HandoffFailed:
            for fd in fds:
                os.close(fd)
            raise
    return description, fds


def describe(incarnation: str, access: RemotePool) -> PoolDescription:
    """`receive` without the memory."""
    description, fds = receive(incarnation, access)
    for fd in fds:
        os.close(fd)
    return description
