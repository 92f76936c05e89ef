"""Blocks in a file, in slots of one size, each with a header to check that it is what was written:

    slot n   | header: one page | block | up to a whole page |
             header   magic, format, length of the block, fingerprint of model and layout, hash of
                      the block (which begins with the tenant's tag), checksum over all of these
                      and the block

The file has no name: no other process finds it, and its room is freed however its engine ends.
Failures are returned as texts, never raised. Knows no thread, and not which slot holds what.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ....core.errors import StartupFailed
from ....core.request.token_ids import BlockHash

_log = logging.getLogger(__name__)

PAGE = 4096  # of a disk too: whole pages can be read and written without the page cache
_MAGIC = b"BatonKV\0"
_FORMAT = 1
_HEADER = struct.Struct("<8sIQ16s16s")
_CHECKSUM = struct.Struct("<I")
_SPARED = 20  # one part in so many of the free space stays free

Buffer: TypeAlias = bytes | bytearray | memoryview


class SlotFile:
    """`num_slots` slots for blocks of `block_bytes`."""

    def __init__(self, file: OsFile, num_slots: int, block_bytes: int, fingerprint: str) -> None:
        """`fingerprint`: of the model and the layout of its blocks."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._file = file
        self._fingerprint = hashlib.sha256(fingerprint.encode()).digest()[:16]
        self._page = bytearray(PAGE)

    def write(self, slot: int, block_hash: BlockHash, block: memoryview) -> str | None:
        """Returns why the write may have failed, if so."""
        offset = slot * slot_bytes_of(self.block_bytes)
        try:
            num_bytes = self._file.write([self._header(block_hash, block), block], offset)
        except OSError as error:
            return f"it cannot be written: {error.strerror or error}"
        if num_bytes < PAGE + self.block_bytes:
            return f"only {num_bytes} bytes of it were written"
        return None

    def read(self, slot: int, block_hash: BlockHash, block: memoryview) -> str | None:
        """Read into `block`; returns why it failed, if so: the memory is then undefined."""
        offset = slot * slot_bytes_of(self.block_bytes)
        try:
            num_bytes = self._file.read([self._page, block], offset)
        except OSError as error:
            return f"it cannot be read: {error.strerror or error}"
        if num_bytes < PAGE + self.block_bytes:
            return f"only {num_bytes} bytes of it were read"
        if self._page != self._header(block_hash, block):
            return "it is not what was written: header or checksum differ"
        return None

    def settle(self) -> str | None:
        """Flush; returns why what was written may not be on the disk, if so."""
        try:
            self._file.settle()
        except OSError as error:
            return f"it cannot be written: {error.strerror or error}"
        return None

    def close(self) -> None:
        self._file.close()

    def _header(self, block_hash: BlockHash, block: memoryview) -> bytes:
        fields = (_MAGIC, _FORMAT, self.block_bytes, self._fingerprint, block_hash)
        header = _HEADER.pack(*fields)
        return (header + _CHECKSUM.pack(checksum_of(header, block))).ljust(PAGE, b"\0")


class OsFile:
    """A file without a name, in a directory. Its methods raise OSError; `read` and `write` return
    the number of bytes."""

    def __init__(self, directory: str) -> None:
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 (with): `close` closes it
            prefix="baton-kv-", dir=directory, buffering=0
        )
        self._fd = self._file.fileno()
        self._has_written = False

    @property
    def free_bytes(self) -> int:
        """Free space of its file system, for this user."""
        free = os.fstatvfs(self._fd)
        return free.f_bavail * free.f_frsize

    def allocate(self, num_bytes: int) -> None:
        """Allocate the space."""
        os.posix_fallocate(self._fd, 0, num_bytes)

    def read(self, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return os.preadv(self._fd, buffers, offset)

    def write(self, buffers: Sequence[Buffer], offset: int) -> int:
        self._has_written = True
        return os.pwritev(self._fd, buffers, offset)

    def settle(self) -> None:
        """Flush what was written to the disk, and drop the file from the page cache."""
        if self._has_written:
            self._has_written = False
            os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._file.close()


def checksum_of(header: bytes, block: memoryview) -> int:
    """A CRC-32 over the header, the part of the block that is no whole page, and sums of its words:
    those at each offset of all pages, which detect any change within one page, and those of each
    page, which detect another order of pages. Three times as fast as a CRC over the block."""
    num_bytes = len(block) // PAGE * PAGE
    words = np.frombuffer(block[:num_bytes], np.uint64).reshape(-1, PAGE // 8)
    checksum = zlib.crc32(block[num_bytes:], zlib.crc32(header))
    for sums in (words.sum(axis=0, dtype=np.uint64), words.sum(axis=1, dtype=np.uint64)):
        checksum = zlib.crc32(sums, checksum)
    return checksum


def slot_bytes_of(block_bytes: int) -> int:
    return PAGE + -(-block_bytes // PAGE) * PAGE


def open_slots(directory: str, num_bytes: int, block_bytes: int, fingerprint: str) -> SlotFile:
    """Slots of `num_bytes` in all, or as many as there is room for; raises StartupFailed."""
    slot_bytes = slot_bytes_of(block_bytes)
    num_wanted = num_bytes // slot_bytes
    try:
        file = OsFile(directory)
    except OSError as error:
        raise StartupFailed(f"--kv-disk-path {directory}: {error.strerror or error}") from error
    num_slots = _allocate(file, num_wanted, slot_bytes)
    if num_slots == 0:
        file.close()
        raise StartupFailed(
            f"--kv-disk-path {directory} has no room for a KV block of {block_bytes / 1e6:.1f} MB",
            hint="another directory, or more --kv-disk-space",
        )
    if num_slots < num_wanted:
        have, wanted = (n * slot_bytes / 2**30 for n in (num_slots, num_wanted))
        _log.warning("--kv-disk-space: %.1f of %.1f GiB: %s is full", have, wanted, directory)
    return SlotFile(file, num_slots, block_bytes, fingerprint)


def _allocate(file: OsFile, num_wanted: int, slot_bytes: int) -> int:
    """Allocate space for `num_wanted` slots, or for fewer; returns how many."""
    free_bytes = file.free_bytes
    num_slots = min(num_wanted, (free_bytes - free_bytes // _SPARED) // slot_bytes)
    while num_slots:
        try:
            file.allocate(num_slots * slot_bytes)
        except OSError:
            num_slots //= 2  # a quota, or another process was faster
        else:
            break
    return num_slots
