"""How a puller finds and trusts a source's memory on this host: name, description, user.

    puller                                       exporter thread of the source
      │ connect "\\0baton-kv-<uid>-<incarnation>"    │
      │ ───────────────────────────────────────►   │ same user?
      │ ◄─────────────────────────────────────────  │ description + [pool fd, generations fd]
    same user?

The name lies in the kernel's abstract namespace: no path, nothing left behind by kill -9.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from ..core.errors import HandoffFailed
from ..engine.block_pool import CANARY_BLOCK

NUM_FDS = 2  # the pool, the generation page

_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_DESCRIPTION = struct.Struct("=8s16sQQ")
_MAGIC = b"BATONKV1"
_UCRED = struct.Struct("=3i")  # struct ucred: pid, uid, gid


class HostPool(Protocol):
    """A KV pool in host memory, as far as transports care."""

    num_blocks: int
    view: memoryview  # all of it, writable
    fd: int  # its memfd

    @property
    def block_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PoolDescription:
    """What an exporter says of the memory that it passes."""

    incarnation: str
    block_bytes: int
    num_blocks: int

    def pack(self) -> bytes:
        incarnation = bytes.fromhex(self.incarnation)
        return _DESCRIPTION.pack(_MAGIC, incarnation, self.block_bytes, self.num_blocks)

    @classmethod
    def unpack(cls, packed: bytes) -> PoolDescription:
        """Raises HandoffFailed if it is not a description of this version."""
        if len(packed) != _DESCRIPTION.size:
            raise HandoffFailed("the exporter hung up or speaks another version")
        magic, incarnation, block_bytes, num_blocks = _DESCRIPTION.unpack(packed)
        if magic != _MAGIC or not block_bytes or num_blocks <= CANARY_BLOCK:
            raise HandoffFailed("the exporter speaks another version")
        return cls(incarnation.hex(), block_bytes, num_blocks)


DESCRIPTION_BYTES = _DESCRIPTION.size


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
