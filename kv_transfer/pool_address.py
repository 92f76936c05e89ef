"""How a puller finds and trusts a source's memory on this host: name, description, user.

    puller                                       exporter thread of the source
      │ connect "\\0baton-kv-<uid>-<incarnation>"    │
      │ ───────────────────────────────────────►   │ same user?
      │ ◄─────────────────────────────────────────  │ description + descriptors
    same user?

          offered        description              descriptors
          host memory    shape                    [pool, generations]
          GPU memory     shape, GPU, IPC handle   [generations]

The name lies in the kernel's abstract namespace: no path, nothing left behind by kill -9.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from dataclasses import dataclass

from ..core.errors import HandoffFailed
from ..engine.block_pool import CANARY_BLOCK

IPC_HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)

_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_SHAPE = struct.Struct("=8s16sQQ")
_ON_GPU = struct.Struct(f"=16s{IPC_HANDLE_BYTES}s")
_MAGIC = b"BATONKV1"
_UCRED = struct.Struct("=3i")  # struct ucred: pid, uid, gid
_CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Memory of a GPU that another process can open."""

    gpu_uuid: bytes  # 16: which GPU, however processes number them
    ipc_handle: bytes


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """What an exporter says of the memory that it passes; without `cuda` it is host memory."""

    incarnation: str
    block_bytes: int
    num_blocks: int
    cuda: CudaMemory | None = None

    @property
    def num_fds(self) -> int:
        """Descriptors that come with it: the pool if it is host memory, the generation page."""
        return 2 if self.cuda is None else 1

    def pack(self) -> bytes:
        incarnation = bytes.fromhex(self.incarnation)
        shape = _SHAPE.pack(_MAGIC, incarnation, self.block_bytes, self.num_blocks)
        if self.cuda is None:
            return shape
        return shape + _ON_GPU.pack(self.cuda.gpu_uuid, self.cuda.ipc_handle)

    @classmethod
    def unpack(cls, packed: bytes) -> PoolDescription:
        """Raises HandoffFailed if it is not a description of this version."""
        if len(packed) not in (_SHAPE.size, _SHAPE.size + _ON_GPU.size):
            raise HandoffFailed("the exporter hung up or speaks another version")
        magic, incarnation, block_bytes, num_blocks = _SHAPE.unpack_from(packed)
        if magic != _MAGIC or not block_bytes or num_blocks <= CANARY_BLOCK:
            raise HandoffFailed("the exporter speaks another version")
        is_on_gpu = len(packed) > _SHAPE.size
        cuda = CudaMemory(*_ON_GPU.unpack_from(packed, _SHAPE.size)) if is_on_gpu else None
        return cls(incarnation.hex(), block_bytes, num_blocks, cuda)

    def require(self, incarnation: str, block_bytes: int) -> None:
        """Raises HandoffFailed unless it is this incarnation's pool, in blocks of this size."""
        if self.incarnation != incarnation:
            raise HandoffFailed(f"the exporter is {self.incarnation}")
        if self.block_bytes != block_bytes:
            raise HandoffFailed(f"a block has {self.block_bytes} bytes there, {block_bytes} here")


_MAX_DESCRIPTION_BYTES = _SHAPE.size + _ON_GPU.size
_MAX_FDS = 2


def receive(incarnation: str) -> tuple[PoolDescription, list[int]]:
    """Ask the exporter of `incarnation`. The caller closes the descriptors.

    Raises HandoffFailed: nobody exports it, another user does, or what came is no description.
    Blocks for up to a second if the exporter hangs.
    """
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        try:
            connection.connect(socket_address(incarnation))
            require_same_user(connection)
            packed, fds, _, _ = socket.recv_fds(
                connection, _MAX_DESCRIPTION_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
            description = PoolDescription.unpack(packed)
            if len(fds) != description.num_fds:
                raise HandoffFailed(f"the exporter passed {len(fds)} descriptors")
        except OSError as error:
            raise HandoffFailed(f"no exporter of {incarnation} on this host: {error}") from error
        except HandoffFailed:
            for fd in fds:
                os.close(fd)
            raise
    return description, fds


def socket_address(incarnation: str) -> bytes:
    """The abstract address of an incarnation's exporter, of this user.

    Raises HandoffFailed unless it is 32 hex digits: a peer must not choose what is connected to.
    """
    if not _INCARNATION.fullmatch(incarnation):
        raise HandoffFailed("an incarnation has 32 hex digits")
    return f"\0baton-kv-{os.geteuid()}-{incarnation}".encode()


def require_same_user(connection: socket.socket) -> None:
    """Raises HandoffFailed if another user sits at the other end; the kernel vouches for it."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    if uid != os.geteuid():
        raise HandoffFailed(f"the other end belongs to user {uid}")
