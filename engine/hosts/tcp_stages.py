"""Stages of a pipeline on several hosts: a TCP connection between the like ranks of two stages.

    stage n    step's thread ─► queue ─► thread: send ─── length: uint64, the tensor's bytes ──┐
    stage n+1  step's thread ◄─ queue ◄─ thread: receive ◄── dialled by this stage ◄───────────┘

Both ends prove the key that rank 0 drew for this engine, within TLS where the cluster has it. What
comes is taken from the wire at once, whatever the step's thread does: no more than the steps in
flight. Tensors lie in host memory. Knows no model.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.channels.admission import ADMIT_S, accept, admit, dial, tune
from ...core.channels.engine_tls import EngineTls
from ...core.channels.handshake import Listener
from ...core.errors import BatonError, EngineFailed, StartupFailed
from ..model.communicator import Stages
from .joining import id_of

_PURPOSE = b"stage 1"  # of the handshake; the number is the version of what is sent here
_LENGTH = struct.Struct("<Q")
_MAX_BYTES = 1 << 34  # of a tensor
_LAST_S = 0.3  # rank 0 is to hear of a rank's end from that rank, not from its neighbour


@dataclass(frozen=True, slots=True)
class StageLink:
    """This rank among those of all stages. `host`: where its peers dial it; `key`: the engine's."""

    rank: int
    stage_size: int
    host: str
    key: bytes
    tls: EngineTls | None


class TcpStages(Stages):
    """One rank's connections to the stage before and to the one behind."""

    def __init__(
        self, link: StageLink, stage: int, num_stages: int, timeouts_s: tuple[float, float]
    ) -> None:
        """`timeouts_s`: of connecting, and of `least`. Listens; raises StartupFailed."""
        self.stage, self.num_stages = stage, num_stages
        self.addresses: Sequence[str] = ()  # of all ranks, known before `connect`
        self._link = link
        self._to_connect_s, self._to_agree_s = timeouts_s
        self._before: _Connection | None = None
        self._behind: _Connection | None = None
        self._listener: socket.socket | None = None
        self.address = ""
        if stage + 1 < num_stages:
            family = socket.AF_INET6 if ":" in link.host else socket.AF_INET
            try:
                self._listener = socket.create_server((link.host, 0), family=family)
            except OSError as error:
                raise StartupFailed(
                    f"rank {link.rank} cannot listen at {link.host}: {error}",
                    hint="--host: an address of this host that the others reach",
                ) from error
            host = f"[{link.host}]" if ":" in link.host else link.host
            self.address = f"{host}:{self._listener.getsockname()[1]}"

    def connect(self) -> None:
        """Raises StartupFailed."""
        link = self._link
        try:
            if self.stage > 0:
                before = link.rank - link.stage_size
                connection = dial(
                    _PURPOSE,
                    link.key,
                    dialer=id_of(link.rank),
                    listener=id_of(before),
                    address=self.addresses[before],
                    secure=None if link.tls is None else link.tls.puller_wrap(),
                )
                self._before = _Connection(connection, self.stage - 1)
            if self._listener is not None:
                self._behind = _Connection(self._accept(self._listener), self.stage + 1)
            # All stages stand behind this: only then do the threads take over.
            self.least(0)
        except (OSError, BatonError) as error:
            text = error.message if isinstance(error, BatonError) else str(error)
            raise StartupFailed(f"rank {link.rank} does not reach its stages: {text}") from error

    def _accept(self, listener: socket.socket) -> socket.socket:
        """Of the stage behind, and of nobody else. Raises OSError once that takes too long."""
        link, until_s = self._link, time.monotonic() + self._to_connect_s
        secure = None if link.tls is None else link.tls.source_wrap()
        while True:
            listener.settimeout(max(0.001, until_s - time.monotonic()))
            connection, _ = listener.accept()
            try:
                connection.settimeout(ADMIT_S)
                connection = connection if secure is None else secure(connection)
                theirs = Listener(
                    lambda o: link.key if o.listener == id_of(link.rank) else None,
                    (_PURPOSE,),
                    (self.address,),
                )
                admit(connection, theirs)
                accept(connection)
            except (OSError, BatonError):  # somebody else: the one that is awaited may yet come
                connection.close()
                continue
            tune(connection, _PURPOSE)
            listener.close()
            return connection

    def receive(self, x: Tensor) -> None:
        assert self._before is not None
        self._before.receive(x)

    def send(self, x: Tensor) -> None:
        assert self._behind is not None
        self._behind.send(x)

    def least(self, value: int) -> int:
        """To the last stage, and back."""
        if self._before is not None:
            value = min(value, self._before.read_number(self._to_agree_s))
        if self._behind is not None:
            self._behind.write_number(value)
            value = self._behind.read_number(self._to_agree_s)
        if self._before is not None:
            self._before.write_number(value)
        return value

    def broadcast(self, x: Tensor) -> None:
        """From stage to stage."""
        if self._before is not None:
            self._before.receive(x)
        if self._behind is not None:
            self._behind.send(x.clone())

    def close(self) -> None:
        for connection in (self._before, self._behind):
            if connection is not None:
                connection.close()
        self._before = self._behind = None
        if self._listener is not None:
            self._listener.close()


class _Connection:
    """To the stage `other`. Numbers pass in both directions, until the first tensor: then it has
    one direction, and a thread. An `Exception` in the queue is why no more comes."""

    def __init__(self, connection: socket.socket, other: int) -> None:
        self._socket = connection
        self._other = other
        self._error: EngineFailed | None = None
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[Tensor | bytearray | None] = queue.SimpleQueue()

    def write_number(self, value: int) -> None:
        """Raises OSError."""
        self._socket.sendall(_LENGTH.pack(value))

    def read_number(self, timeout_s: float) -> int:
        """Raises OSError."""
        self._socket.settimeout(timeout_s)
        packed = bytearray(_LENGTH.size)
        self._fill(memoryview(packed))
        value: int = _LENGTH.unpack(packed)[0]
        return value

    def send(self, x: Tensor) -> None:
        """Returns at once; x is kept until it is gone. Raises EngineFailed."""
        self._start(self._send_all)
        if self._error is not None:
            raise self._error
        self._queue.put(x)

    def receive(self, x: Tensor) -> None:
        """Raises EngineFailed."""
        self._start(self._receive_all)
        received = self._queue.get()
        if received is None:
            self._queue.put(None)
            raise self._error or EngineFailed("the stages are closed")
        assert isinstance(received, bytearray)
        if len(received) != x.nbytes:
            raise EngineFailed(f"stage {self._other} sent {len(received)} bytes, not {x.nbytes}")
        x.view(-1).view(torch.uint8).copy_(torch.frombuffer(received, dtype=torch.uint8))

    def _start(self, run: object) -> None:
        if self._thread is None:
            self._socket.settimeout(None)
            assert callable(run)
            self._thread = threading.Thread(target=run, name="stage-link", daemon=True)
            self._thread.start()

    def _send_all(self) -> None:
        try:
            while (x := self._queue.get()) is not None:
                assert isinstance(x, Tensor)
                data = x.contiguous().view(-1).view(torch.uint8).numpy()
                self._socket.sendall(_LENGTH.pack(len(data)))
                self._socket.sendall(data.data)
        except OSError as error:
            self._broken(error)

    def _receive_all(self) -> None:
        try:
            while True:
                packed = bytearray(_LENGTH.size)
                self._fill(memoryview(packed))
                (num_bytes,) = _LENGTH.unpack(packed)
                if num_bytes > _MAX_BYTES:
                    raise ConnectionError(f"a tensor of {num_bytes} bytes")
                received = bytearray(num_bytes)
                self._fill(memoryview(received))
                self._queue.put(received)
        except OSError as error:
            self._broken(error)

    def _fill(self, rest: memoryview) -> None:
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise ConnectionError("it hung up")
            rest = rest[count:]

    def _broken(self, error: OSError) -> None:
        time.sleep(_LAST_S)
        self._error = EngineFailed(f"the connection to stage {self._other} broke: {error}")
        self._queue.put(None)

    def close(self) -> None:
        self._queue.put(None)
        self._socket.close()
