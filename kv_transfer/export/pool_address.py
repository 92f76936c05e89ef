"""How a puller finds and trusts a source's memory on this host: name, user, key, description.

    puller                                       exporter thread of the source
      │ connect "\\0baton-kv-<uid>-<incarnation>"    │
      │ ───────────────────────────────────────►   │ same user?
    same user?       core/channels/handshake.py, with the key that came over the pair's link
      │ ◄─────────────────────────────────────────  │ description + descriptors

          offered        description                     descriptors
          host memory    shape, parts                    [pool, generations]
          GPU memory     shape, GPU, IPC handle, parts   [generations]

Each rank of an engine has a pool with its KV heads and layers, which the rank's process exports
under an id of its own. The id of rank 0's pool is the engine's incarnation, and every description
lists the pools of all ranks. Block ids are the same in all of them, and there is one page of
generations. The socket's name is in the kernel's abstract namespace: no path, and nothing is left
after kill -9.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

import msgspec

from ...core.channels.accept_thread import AcceptThread, Newcomers
from ...core.channels.addresses import require_same_user, socket_address
from ...core.channels.handshake import (
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    OPENING_BYTES,
    Dialer,
    Listener,
)
from ...core.errors import HandoffFailed, StartupFailed, Unauthenticated
from ...engine.kv.block_pool import CANARY_BLOCK
from ..window.network_address import RemotePool, keys_of

PURPOSE = b"pool 7"  # of the handshake, with the description's version
ADDRESS = "this host"  # a constant: the socket's name identifies the pool
MAX_DESCRIPTION_BYTES = 4096
_MAX_FDS = 2
_BACKLOG = 64
_TIMEOUT_S = 1.0  # for each message
_log = logging.getLogger(__name__)

_PoolName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class CudaMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory of a GPU that another process can open."""

    # The GPU's UUID, which is the same in all processes.
    gpu_uuid: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    # cudaIpcMemHandle_t
    ipc_handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class PoolPart(msgspec.Struct, frozen=True, array_like=True):
    """One rank's pool: the part of all blocks with these KV heads and layers (first, count).

    `port`: where it is served to other hosts, if the sender knows. `host`: empty on rank 0's host.
    """

    pool: _PoolName
    heads: tuple[_Count, _Count]
    layers: tuple[_Count, _Count]
    port: _Count = 0
    host: Annotated[str, msgspec.Meta(max_length=255)] = ""


class PoolDescription(msgspec.Struct, frozen=True, array_like=True):
    """The memory that an exporter passes; without `cuda` it is host memory.

    `incarnation`: the id of this pool. `parts`: the pools of the whole engine, by rank.
    """

    incarnation: _PoolName
    block_bytes: Annotated[int, msgspec.Meta(gt=0)]
    num_blocks: Annotated[int, msgspec.Meta(gt=CANARY_BLOCK)]
    cuda: CudaMemory | None = None
    parts: tuple[PoolPart, ...] = ()

    @property
    def num_fds(self) -> int:
        """How many descriptors come with it: the pool, if in host memory, and the generations."""
        return 2 if self.cuda is None else 1

    @property
    def engine(self) -> str:
        """The incarnation of the engine and of its page of generations."""
        return self.parts[0].pool if self.parts else self.incarnation

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(packed: bytes) -> PoolDescription:
        """Raises HandoffFailed if it is not a description of this version."""
        try:
            return _decoder.decode(packed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HandoffFailed(f"the exporter hung up or has another version: {error}") from error

    def require(self, incarnation: str, block_bytes: int | None) -> None:
        """Raises HandoffFailed unless it is this incarnation's pool with blocks of `block_bytes`
        (None: any)."""
        if self.incarnation != incarnation:
            raise HandoffFailed(f"the exporter is {self.incarnation}")
        if block_bytes not in (None, self.block_bytes):
            raise HandoffFailed(f"a block has {self.block_bytes} bytes there, {block_bytes} here")


# Created at import: msgspec crashes when two threads use a type for the first time.
_decoder = msgspec.msgpack.Decoder(PoolDescription)


@contextlib.contextmanager
def received(
    source: RemotePool, block_bytes: int | None = None
) -> Iterator[tuple[PoolDescription, list[int]]]:
    """The description and descriptors of a pool with blocks of `block_bytes` (None: any), from its
    exporter. The descriptors are closed at the end of the `with` block.

    Raises HandoffFailed if the pool is not exported, the exporter is another user's or does not
    hold the key, or the description is invalid. Blocks for up to a second if the exporter hangs.
    """
    with contextlib.ExitStack() as opened:
        description, fds = _receive(source, opened)
        description.require(source.name, block_bytes)
        yield description, fds


def _receive(source: RemotePool, opened: contextlib.ExitStack) -> tuple[PoolDescription, list[int]]:
    name = source.name
    address = socket_address(name)  # also checks the name
    ours = Dialer(source.key, PURPOSE, dialer=source.puller, listener=name, address=ADDRESS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(address)
            require_same_user(connection)
            connection.send(ours.opening)
            connection.send(ours.answer(connection.recv(CHALLENGE_BYTES)))
            packed, fds, _, _ = socket.recv_fds(
                connection, MAX_DESCRIPTION_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
            for fd in fds:
                opened.callback(os.close, fd)
            description = PoolDescription.unpack(packed)
            if len(fds) != description.num_fds:
                raise HandoffFailed(f"the exporter passed {len(fds)} descriptors")
        except OSError as error:
            raise HandoffFailed(f"no exporter of {name} on this host: {error}") from error
        except Unauthenticated as error:
            raise HandoffFailed(f"the exporter of {name}: {error.message}") from error
    return description, fds


def describe(source: RemotePool) -> PoolDescription:
    """Like `received`, without the memory."""
    with received(source) as (description, _):
        return description


class PoolExporter:
    """Sends a description and file descriptors to processes of the same user that hold a puller's
    key, until `close`. The memory and the descriptors must stay open as long.
    """

    def __init__(self, description: PoolDescription, fds: Sequence[int], key: bytes) -> None:
        """`key`: pullers' keys are derived from it. Raises StartupFailed if the incarnation is
        exported already."""
        self._packed = description.pack()
        self._fds = list(fds)
        self._key_of = keys_of(description.incarnation, key)
        self._newcomers = Newcomers()
        # SEQPACKET: each message arrives whole, with its descriptors, or not at all.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(socket_address(description.incarnation))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise StartupFailed(f"cannot export the KV pool: {error}") from error
        self._accepting = AcceptThread(listener, "kv-exporter", self._newcomers, self._hand_over)

    def close(self) -> None:
        """Stop serving. Existing mappings of pullers stay valid."""
        self._accepting.close()
        self._newcomers.close(_TIMEOUT_S)

    def _hand_over(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_TIMEOUT_S)
            try:
                require_same_user(connection)
                theirs = Listener(self._key_of, (PURPOSE,), (ADDRESS,))
                connection.send(theirs.challenge(connection.recv(OPENING_BYTES)))
                theirs.check(connection.recv(ANSWER_BYTES))
                socket.send_fds(connection, [self._packed], self._fds)
            except (OSError, HandoffFailed, Unauthenticated) as error:
                _log.warning("the KV pool was not passed to a peer: %s", error)
