"""A communicator of two ranks, through NCCL's C interface: non-blocking, and aborted on its own.

Launching a transfer takes 0.15 to 0.25 ms in non-blocking mode, and 0.03 ms from a graph. The
watchdog of torch's process groups ends the process when one peer hangs; here only the pair ends.
The library is the one that torch has loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from functools import partial

import torch
from torch import Tensor

from ...core.errors import HandoffFailed
from ..cuda_ipc.launch_graph import LaunchGraph, give_back_stream, take_stream
from ..network.data_wire import PAIR_ID_BYTES
from ..network.stream import Deadline

SOURCE_RANK, PULLER_RANK = 0, 1

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1  # ncclUint8
_MAGIC = 0xCAFEBEEF
_VERSION = 21_800  # that has the fields below: 2.18
_UNDEFINED = -(2**31)
_LOOK_S = 20e-6  # NCCL signals no completion on the host: it is polled
_ABORT_S = 20.0  # on a dead device it may never end
_RECORD_S = 10.0  # normally half a millisecond
_QUICK_LOOKS = 100  # without sleep: a transfer is launched in 10 us, less than the shortest sleep


class _UniqueId(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = [("internal", ctypes.c_ubyte * PAIR_ID_BYTES)]


class _Config(ctypes.Structure):
    """The first fields of ncclConfig_t; `size` and `version` tell NCCL which fields exist."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises HandoffFailed if it is not loaded."""
    # On hosts with shared GPUs, a program that uses multicast can take all of them down.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    # Recorded transfers would map each end's memory into the other; measured: not faster.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise HandoffFailed(f"there is no NCCL: {error}") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def new_unique_id() -> bytes:
    """The id by which two ranks connect. Raises HandoffFailed."""
    unique_id = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique_id)), "no id")
    return bytes(unique_id.internal)


class NcclPair:
    """One end. Work is queued on its `stream`; the other end must launch the counterparts."""

    def __init__(self, unique_id: bytes, rank: int, device: torch.device) -> None:
        """Begin to connect; `wait_ready` returns when that is done.

        Raises HandoffFailed or RuntimeError.
        """
        self._nccl = _library()
        self._device = device
        self._communicator = ctypes.c_void_p()
        self._peer = 1 - rank
        self.sends = rank == SOURCE_RANK
        self._graphs: list[LaunchGraph] = []
        self.stream = take_stream(device)
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_MAGIC,
            version=_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=_UNDEFINED,
            max_ctas=_UNDEFINED,
            net_name=None,
            split_share=_UNDEFINED,
            traffic_class=_UNDEFINED,
        )
        with torch.cuda.device(device):
            status = self._nccl.ncclCommInitRankConfig(
                ctypes.byref(self._communicator),
                ctypes.c_int(2),
                _UniqueId.from_buffer_copy(unique_id),
                ctypes.c_int(rank),
                ctypes.byref(config),
            )
        if status != _IN_PROGRESS:
            _check(status, "no communicator")

    def wait_ready(self, deadline: Deadline) -> None:
        """Wait until NCCL's work on the host is done. Raises HandoffFailed."""
        num_looks = 0
        while self._state() == _IN_PROGRESS:
            deadline.remaining_s()
            num_looks += 1
            if num_looks > _QUICK_LOOKS:
                time.sleep(_LOOK_S)

    def wait(self, event: torch.cuda.Event, deadline: Deadline) -> None:
        """Wait for `event`. Raises HandoffFailed at the deadline, or if the peer is gone."""
        while not event.query():  # type: ignore[no-untyped-call]
            self._state()
            deadline.remaining_s()
            time.sleep(_LOOK_S)

    def abort(self) -> None:
        """End it, and all that was launched on its stream, with or without the peer."""
        if not self._communicator:
            return
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        # An abort stops what runs, then waits until the graphs are freed, which must have ended.
        aborting = threading.Thread(target=self._abort, args=(communicator,), daemon=True)
        aborting.start()
        with contextlib.suppress(RuntimeError):  # a dead device: nothing runs there
            self.stream.synchronize()
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
        aborting.join(_ABORT_S)
        if not aborting.is_alive():
            give_back_stream(self.stream)

    def _abort(self, communicator: ctypes.c_void_p) -> None:
        with torch.cuda.device(self._device):
            self._nccl.ncclCommAbort(communicator)

    def transfer(self, buffer: Tensor, deadline: Deadline) -> None:
        """Transfer all bytes of `buffer`, from the source's to the puller's, on the pair's stream.

        Raises HandoffFailed.
        """
        status = (self._nccl.ncclSend if self.sends else self._nccl.ncclRecv)(
            ctypes.c_void_p(buffer.data_ptr()),
            ctypes.c_size_t(buffer.nbytes),
            ctypes.c_int(_UINT8),
            ctypes.c_int(self._peer),
            self._communicator,
            ctypes.c_void_p(self.stream.cuda_stream),
        )
        if status == _IN_PROGRESS:
            self.wait_ready(deadline)
        else:
            _check(status, "a transfer was refused")

    def record_transfer(self, buffer: Tensor) -> LaunchGraph:
        """The same as a graph, usable until the pair is aborted; not for the pair's first transfer.

        Raises HandoffFailed or RuntimeError.
        """
        # Even if the peer hangs up: NCCL's thread must have left the recording before it ends.
        graph = LaunchGraph(self.stream, partial(self.transfer, buffer, Deadline(_RECORD_S)))
        self._graphs.append(graph)
        return graph

    def _state(self) -> int:
        """NCCL's state on the host: in progress or done. Raises HandoffFailed for any other."""
        if not self._communicator:
            raise HandoffFailed("NCCL: the pair was aborted")
        state = ctypes.c_int()
        status = self._nccl.ncclCommGetAsyncError(self._communicator, ctypes.byref(state))
        _check(status, "no state")
        if state.value != _IN_PROGRESS:
            _check(state.value, "the pair failed")
        return state.value


def _check(status: int, what: str) -> None:
    if status != _SUCCESS:
        text = _library().ncclGetErrorString(ctypes.c_int(status)).decode()
        raise HandoffFailed(f"NCCL: {what}: {text}")
