"""Stages of a pipeline on several hosts: a TCP connection for each column between two stages.

    stage n    step's thread ─► queue ─► thread: send ─── length: uint64, the tensor's bytes ──┐
    stage n+1  step's thread ◄─ queue ◄─ thread: receive ◄── dialled by this stage ◄───────────┘

Both ends prove the key that rank 0 drew for this engine, inside TLS if the cluster uses it. Tensors
are received at once, whatever the step's thread does; there are at most those of the steps in
flight. Between GPU and queues, tensors are copied in the order of the step's stream: the sending
thread waits for an event, the step's thread only for bytes not yet received. The buffers are
torch's pinned memory, which torch reuses only after the copy.

Before `begin` there are no threads, and a stage may be seconds behind another: more data than the
kernel's buffers hold would break the connection (TCP_USER_TIMEOUT). So only numbers and a few bytes
are sent, synchronously, and the warm-up steps compute with zeros. Knows no model.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.channels.admission import ADMIT_S, accept, admit, dial, tune
from ...core.channels.engine_tls import EngineTls
from ...core.channels.handshake import Listener
from ...core.errors import BatonError, EngineFailed, StartupFailed
from ..model.stages import Stages
from .joining import id_of

_PURPOSE = b"stage 1"  # of the handshake; the number is the protocol version
_LENGTH = struct.Struct("<Q")
_MAX_BYTES = 1 << 34  # of a tensor
_LAST_S = 0.3  # delay of a failure: rank 0 is to learn it from the failed rank first


@dataclass(frozen=True, slots=True)
class StageLink:
    """This rank's place in the pipeline. `host`: the address at which its peers connect; `key`: the
    secret that the engine's ranks share."""

    rank: int
    stage_size: int
    host: str
    key: bytes
    tls: EngineTls | None


class TcpStages(Stages):
    """One rank's connections to the previous stage and to the next."""

    can_be_captured = False

    def __init__(
        self,
        link: StageLink,
        stage: int,
        num_stages: int,
        timeout_s: float,
        *,
        is_on_gpu: bool = False,
    ) -> None:
        """Listens for the next stage. `timeout_s`: of waits for another stage before `begin`.
        Raises StartupFailed."""
        self.stage, self.num_stages = stage, num_stages
        self.addresses: Sequence[str] = ()  # of all ranks; set before `connect`
        self._link = link
        self._timeout_s = timeout_s
        self._is_on_gpu = is_on_gpu
        self._has_begun = False
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
        """Raises StartupFailed, as do all methods before `begin`."""
        link = self._link
        with self._starting():
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
                self._before = self._connection(connection, self.stage - 1)
            if self._listener is not None:
                self._behind = self._connection(self._accept(self._listener), self.stage + 1)
        self.least(0)  # returns once all stages are connected

    def _connection(self, connection: socket.socket, other: int) -> _Connection:
        connection.settimeout(self._timeout_s)
        return _Connection(connection, other, is_on_gpu=self._is_on_gpu)

    @contextmanager
    def _starting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, BatonError) as error:
            time.sleep(_LAST_S)
            text = error.message if isinstance(error, BatonError) else str(error)
            rank = self._link.rank
            raise StartupFailed(f"rank {rank} cannot reach its stages: {text}") from error

    def _accept(self, listener: socket.socket) -> socket.socket:
        """Accept the next stage and refuse other dialers. Raises OSError on timeout."""
        link, until_s = self._link, time.monotonic() + self._timeout_s
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
            except (OSError, BatonError):  # another dialer: the next stage may still connect
                connection.close()
                continue
            tune(connection, _PURPOSE)
            listener.close()
            return connection

    def begin(self) -> None:
        if self._before is not None:
            self._before.begin(self._before.receive_all)
        if self._behind is not None:
            self._behind.begin(self._behind.send_all)
        self._has_begun = True

    def receive(self, x: Tensor) -> None:
        assert self._before is not None
        if self._has_begun:
            self._before.receive(x)
        else:
            x.zero_()

    def send(self, x: Tensor) -> None:
        assert self._behind is not None
        if self._has_begun:
            self._behind.send(x)

    def least(self, value: int) -> int:
        """The minimum over all stages, passed to the last stage and back."""
        with self._starting():
            if self._before is not None:
                value = min(value, self._before.read_number())
            if self._behind is not None:
                self._behind.write_number(value)
                value = self._behind.read_number()
            if self._before is not None:
                self._before.write_number(value)
        return value

    def broadcast(self, x: Tensor) -> None:
        """Pass the first stage's x of a few bytes from stage to stage."""
        with self._starting():
            if self._before is not None:
                _overwrite(x, self._before.read_tensor())
            if self._behind is not None:
                self._behind.write_tensor(x.cpu())

    def close(self) -> None:
        for connection in (self._before, self._behind):
            if connection is not None:
                connection.close()
        self._before = self._behind = None
        if self._listener is not None:
            self._listener.close()


class _Connection:
    """A connection to stage `other`. From `begin` on it has one direction and a thread. None in the
    queue marks its end, caused by `_error` if that is set."""

    def __init__(self, connection: socket.socket, other: int, *, is_on_gpu: bool) -> None:
        self._socket = connection
        self._other = other
        self._is_on_gpu = is_on_gpu
        self._error: EngineFailed | None = None
        # A tensor in host memory, and the event to wait for before it is sent.
        self._queue: queue.SimpleQueue[tuple[Tensor, torch.cuda.Event | None] | None]
        self._queue = queue.SimpleQueue()

    def begin(self, run: Callable[[], None]) -> None:
        """Start the thread; `run`: `send_all` or `receive_all`."""
        self._socket.settimeout(None)
        threading.Thread(target=run, name="stage-link", daemon=True).start()

    def send(self, x: Tensor) -> None:
        """Queue x and return at once. Raises EngineFailed."""
        if self._error is not None:
            raise self._error
        is_copied = None
        if self._is_on_gpu:
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            x = host.copy_(x, non_blocking=True)
            is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            is_copied.record()
        self._queue.put((x, is_copied))

    def receive(self, x: Tensor) -> None:
        """Overwrite x with the next tensor, waiting for it. Raises EngineFailed."""
        received = self._queue.get()
        if received is None:
            self._queue.put(None)
            raise self._error or EngineFailed("the stages are closed")
        data, _ = received
        if len(data) != x.nbytes:
            raise EngineFailed(f"stage {self._other} sent {len(data)} bytes, not {x.nbytes}")
        _overwrite(x, data)

    def send_all(self) -> None:
        try:
            while (sent := self._queue.get()) is not None:
                x, is_copied = sent
                if is_copied is not None:
                    is_copied.synchronize()
                self.write_tensor(x)
        except (OSError, RuntimeError) as error:  # of the connection or the device
            self._broken(error)

    def receive_all(self) -> None:
        try:
            while True:
                self._queue.put((self.read_tensor(), None))
        except (OSError, RuntimeError) as error:
            self._broken(error)

    def write_tensor(self, x: Tensor) -> None:
        """Send x, which is in host memory. Raises OSError."""
        data = x.contiguous().view(-1).view(torch.uint8).numpy()
        self.write_number(len(data))
        self._socket.sendall(data.data)

    def read_tensor(self) -> Tensor:
        """Receive a tensor's bytes, in host memory. Raises OSError."""
        num_bytes = self.read_number()
        if num_bytes > _MAX_BYTES:
            raise ConnectionError(f"a tensor of {num_bytes} bytes")
        data = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_on_gpu)
        self._fill(data.numpy().data)
        return data

    def write_number(self, value: int) -> None:
        """Raises OSError."""
        self._socket.sendall(_LENGTH.pack(value))

    def read_number(self) -> int:
        """Raises OSError."""
        packed = bytearray(_LENGTH.size)
        self._fill(memoryview(packed))
        value: int = _LENGTH.unpack(packed)[0]
        return value

    def _fill(self, rest: memoryview) -> None:
        while rest:
            count = self._socket.recv_into(rest)
            if count == 0:
                raise ConnectionError("it hung up")
            rest = rest[count:]

    def _broken(self, error: Exception) -> None:
        time.sleep(_LAST_S)
        self._error = EngineFailed(f"the connection to stage {self._other} broke: {error}")
        self._queue.put(None)

    def close(self) -> None:
        self._queue.put(None)
        self._socket.close()


def _overwrite(x: Tensor, data: Tensor) -> None:
    """Copy `data`, bytes in host memory, to x; on a GPU in the order of the stream."""
    x.copy_(data.view(x.dtype).view(x.shape), non_blocking=True)
