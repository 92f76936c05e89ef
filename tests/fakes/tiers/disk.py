"""A disk in memory that fails on demand; its thread's jobs are done by the test's thread."""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Callable, Sequence

from baton.engine.kv.disk.disk_file import Buffer, OsFile, SlotFile, slot_bytes_of
from baton.engine.kv.disk.disk_thread import DiskThread


class Fault(enum.Enum):
    NONE = "none"
    NO_ROOM = "no room"
    ERROR = "error"
    SHORT = "short"
    DAMAGE = "damage"


class MemoryFile(OsFile):
    """`draw()` returns the fault of each call."""

    def __init__(self, num_bytes: int, draw: Callable[[], Fault] = lambda: Fault.NONE) -> None:
        self.content = bytearray(num_bytes)
        self.draw = draw
        self.is_closed = False
        self.num_faults = 0

    def read(self, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        fault, num_bytes = self._fault(), 0
        for buffer in buffers:
            view = memoryview(buffer)
            piece = self.content[offset : offset + len(view)]
            view[: len(piece)] = piece
            num_bytes, offset = num_bytes + len(piece), offset + len(piece)
        if fault is Fault.DAMAGE:
            view[len(view) // 2] ^= 4
        return num_bytes // 2 if fault is Fault.SHORT else num_bytes

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        fault, content = self._fault(), bytearray(b"".join(buffers))
        if fault is Fault.DAMAGE:
            content[-1] ^= 1
        if fault is Fault.SHORT:
            del content[len(content) // 2 :]
        self.content[offset : offset + len(content)] = content
        return len(content)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    def _fault(self) -> Fault:
        fault = self.draw()
        self.num_faults += fault is not Fault.NONE
        if fault in (Fault.NO_ROOM, Fault.ERROR):
            number = errno.ENOSPC if fault is Fault.NO_ROOM else errno.EIO
            raise OSError(number, os.strerror(number))
        return fault


class PlayedDisk(DiskThread):
    """Without a thread: each poll first executes a random number of jobs. A read takes `block_s`
    per block."""

    def __init__(
        self,
        file: OsFile,
        num_slots: int,
        block_bytes: int,
        view: Callable[[int], memoryview],
        draw: Callable[[], int] = lambda: 1000,
        block_s: float = 1e-6,
    ) -> None:
        super().__init__(SlotFile(file, num_slots, block_bytes, "model"), view)
        self.draw = draw
        self.block_s = block_s

    def ended(self):  # type: ignore[no-untyped-def]
        for _ in range(self.draw()):
            if queue := self._reads or self._writes:
                self.do(queue.popleft())
        ended = super().ended()
        for job in ended:
            job.read_s = job.num_read_bytes / self.block_bytes * self.block_s
        return ended

    @property
    def num_waiting(self) -> int:
        return len(self._reads) + len(self._writes)


def memory_disk(num_slots: int, block_bytes: int) -> MemoryFile:
    return MemoryFile(num_slots * slot_bytes_of(block_bytes))
