"""The number of steps whose KV is written, counted by the GPU itself in a page that pullers read.

    stream   | model of step n | n ► page |  sampling ...      no event, no message, no thread

A write in stream order is visible some microseconds after the kernels before it; the host sees the
end of a step when it polls, and a message to a puller would be later still. Of several ranks the
first counts for all: its model ends with a sum of what every rank computed after its last KV store.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging

import torch

from .cuda_memory import require, runtime
from .generations import SharedGenerations

_log = logging.getLogger(__name__)
_MAPPED = 2  # cudaHostRegisterMapped
_FENCED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: behind a fence for what the stream wrote before
_WORD_BYTES = 8


class CudaStepCount:
    """Counts on one device; `num_launched` steps are counted, or will be once they complete."""

    def __init__(self, page: SharedGenerations, device: torch.device) -> None:
        """Raises RuntimeError if this driver cannot do it."""
        self.num_launched = 0
        self._page = page  # stays mapped while the device writes to it
        self._host_address = ctypes.c_void_p(page.num_steps_address)
        with torch.cuda.device(device):
            status = runtime().cudaHostRegister(
                self._host_address, ctypes.c_size_t(_WORD_BYTES), ctypes.c_uint(_MAPPED)
            )
            require(status)
            address = ctypes.c_void_p()
            status = runtime().cudaHostGetDevicePointer(
                ctypes.byref(address), self._host_address, ctypes.c_uint(0)
            )
            require(status)
        assert address.value is not None
        self._device_address = ctypes.c_uint64(address.value)
        self._write = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue64_v2

    def mark(self) -> int:
        """Count a step after everything submitted to the current stream; returns its number."""
        self.num_launched += 1
        status = self._write(
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            self._device_address,
            ctypes.c_uint64(self.num_launched),
            ctypes.c_uint(_FENCED),
        )
        if status != 0:
            raise RuntimeError(f"the GPU cannot count its steps (CUDA driver error {status})")
        return self.num_launched

    def close(self) -> None:
        """Unregister the page; no step may be in flight."""
        runtime().cudaHostUnregister(self._host_address)


def count_steps(page: SharedGenerations, device: torch.device) -> CudaStepCount | None:
    """A counter in `page`; None, with the reason logged, if the driver does not support it.

    One step is counted to find that out.
    """
    try:
        with contextlib.ExitStack() as opened:
            count = CudaStepCount(page, device)
            opened.callback(count.close)
            count.mark()
            torch.cuda.synchronize(device)
            opened.pop_all()
    except (RuntimeError, OSError, AttributeError) as error:
        _log.warning("pullers get blocks when they are computed, not before: %s", error)
        return None
    return count
