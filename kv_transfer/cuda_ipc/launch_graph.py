"""A few launches on one stream that one call repeats: a CUDA graph, through the C interface.

Torch's own graphs take its random number generator while they are recorded, in all threads; these
graphs are recorded while an engine serves. A recording still fails if another thread synchronises
the whole device, or launches on the same stream, which must not be one of torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Callable

import torch

from ...engine.kv.cuda_memory import require, runtime

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: other threads may allocate
_NON_BLOCKING = 1  # cudaStreamNonBlocking: beside the default stream
_PRIORITY = -1  # before the steps of an engine

_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


def take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of the caller's own until it is given back; torch's pool of 32 is shared.

    Raises RuntimeError.
    """
    with contextlib.suppress(IndexError):
        return _idle_streams[device].pop()
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        create = runtime().cudaStreamCreateWithPriority
        require(create(ctypes.byref(handle), _NON_BLOCKING, _PRIORITY))
    return torch.cuda.ExternalStream(handle.value, device=device)  # type: ignore[no-untyped-call]


def give_back_stream(stream: torch.cuda.Stream) -> None:
    """Return a stream on which nothing runs. It is never destroyed: torch crashes when it frees
    pinned memory that was copied on a destroyed stream."""
    _idle_streams[stream.device].append(stream)


class LaunchGraph:
    """The launches of `record` on `stream`, with the same addresses each time.

    All that `record` calls must have run before: it may neither compile nor allocate.
    """

    def __init__(self, stream: torch.cuda.Stream, record: Callable[[], None]) -> None:
        """Record, without running it. Raises RuntimeError, or what `record` raises."""
        self._stream = ctypes.c_void_p(stream.cuda_stream)
        self._executable = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        with torch.cuda.stream(stream):
            require(runtime().cudaStreamBeginCapture(self._stream, _THREAD_LOCAL))
            try:
                record()
            except BaseException:
                runtime().cudaStreamEndCapture(self._stream, ctypes.byref(graph))
                runtime().cudaGraphDestroy(graph)
                runtime().cudaGetLastError()  # or torch would report it at its next call
                raise
            require(runtime().cudaStreamEndCapture(self._stream, ctypes.byref(graph)))
        instantiate, flags = runtime().cudaGraphInstantiate, ctypes.c_ulonglong(0)
        status = instantiate(ctypes.byref(self._executable), graph, flags)
        runtime().cudaGraphDestroy(graph)
        require(status)

    def launch(self) -> None:
        """Launch all of it on its stream. Raises RuntimeError."""
        require(runtime().cudaGraphLaunch(self._executable, self._stream))

    def close(self) -> None:
        """Free it. It must not be running."""
        runtime().cudaGraphExecDestroy(self._executable)
        self._executable = ctypes.c_void_p()
