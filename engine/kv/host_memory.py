"""Host memory for KV blocks: [num_blocks, block_bytes]. As on the device, a block of all layers is
contiguous, so that copy engines move whole blocks, and consecutive blocks at once.

    mmap │ slice 0 │ slice 1 │ slice 2 │ ...        pinned by a thread, one slice after the other
         └ usable ────────────┘ num_blocks

Nothing waits for it: blocks are usable as soon as their slice is pinned. If memory is refused or
short, pinning ends with one message, and what is pinned is used. Pages are written before, which
takes longest: launches on the device may wait while pages are pinned. On a CPU nothing is pinned,
and the system allocates pages as they are used. Knows no block's content.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from .cuda_memory import forget_error, runtime

_log = logging.getLogger(__name__)

_SLICE_BYTES = 64 << 20
_SPARE_BYTES = 2 << 30  # of the host's memory, left for everything else
_PORTABLE = 1  # cudaHostRegisterPortable

Pin = Callable[[int, int], str | None]


class HostMemory:
    """`num_blocks` grows up to `num_wanted`, from `begin` on. No copy may cross from one slice of
    `blocks_per_slice` to the next."""

    def __init__(
        self,
        block_bytes: int,
        num_bytes: int,
        pin: Pin | None = None,
        unpin: Callable[[int], None] = lambda address: None,
    ) -> None:
        """`pin(address, bytes)` returns why it failed, if it did."""
        self.block_bytes = block_bytes
        self.num_wanted = num_bytes // block_bytes
        self.num_blocks = 0
        unit = math.lcm(block_bytes, mmap.PAGESIZE) // block_bytes
        self.blocks_per_slice = max(1, _SLICE_BYTES // (unit * block_bytes)) * unit
        self._pin, self._unpin = pin, unpin
        self._pinned: list[int] = []
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self.memory = mmap.mmap(-1, max(1, self.num_wanted * block_bytes))
        except OSError as error:
            self._degrade(str(error))
            self.num_wanted = 0
            self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)  # pinned in a hundredth of the time
        self.address: int = np.frombuffer(self.memory, np.uint8).ctypes.data

    def begin(self) -> None:
        """Begin to pin the memory, as far as there is enough; does not wait."""
        if self._pin is None:
            self._fill()
        else:
            self._thread = threading.Thread(target=self._fill, name="pin-host-kv", daemon=True)
            self._thread.start()

    def _fill(self) -> None:
        while self.num_blocks < self.num_wanted and not self._is_closed.is_set():
            num_more = min(self.blocks_per_slice, self.num_wanted - self.num_blocks)
            num_bytes = num_more * self.block_bytes
            first = self.address + self.num_blocks * self.block_bytes
            if free_host_bytes() - self._promised_bytes < num_bytes + _SPARE_BYTES:
                self._degrade("the host has no more memory to spare")
                return
            if self._pin is not None:
                ctypes.memset(first, 0, num_bytes)
                if (refusal := self._pin(first, num_bytes)) is not None:
                    self._degrade(refusal)
                    return
                self._pinned.append(first)
            self.num_blocks += num_more

    @property
    def _promised_bytes(self) -> int:
        """Memory that is in use here, but not allocated by the system yet."""
        return 0 if self._pin is not None else self.num_blocks * self.block_bytes

    def _degrade(self, why: str) -> None:
        have, wanted = (n * self.block_bytes / 2**30 for n in (self.num_blocks, self.num_wanted))
        _log.warning(
            "--swap-space: %.1f of %.1f GiB of host memory are used: %s", have, wanted, why
        )

    def wait(self) -> None:
        """Wait until pinning has ended."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Unpin the memory; no copy may be in flight."""
        self._is_closed.set()
        self.wait()
        for address in self._pinned:
            self._unpin(address)


def cuda_pin(device: torch.device) -> Pin:
    """A function that pins memory for all GPUs of this process, for the thread that fills it."""

    def pin(address: int, num_bytes: int) -> str | None:
        with torch.cuda.device(device):
            status = runtime().cudaHostRegister(
                ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(_PORTABLE)
            )
            return f"it cannot be pinned, {forget_error(status)}" if status else None

    return pin


def cuda_unpin(address: int) -> None:
    runtime().cudaHostUnregister(ctypes.c_void_p(address))


def free_host_bytes() -> int:
    """Memory that this process may still allocate, by the host and by its control group."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(fields["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((group / "memory.max").read_text())  # "max": none
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free_bytes = min(free_bytes, limit - used + int(stat["inactive_file"]))
    return free_bytes
