"""Anonymous shared memory: one memfd, mapped writable once by its owner, then sealed.

    owner   create -> map read/write -> seal        a peer that was passed the fd can map it
    peer    check seals and size -> map read-only   read-only, and cannot resize it under us

Owns the file and its seals; the content is up to generations.py and kv_memory.py. There is no name
in the file system, so kill -9 leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from ...core.errors import HandoffFailed, StartupFailed

# Forbids new writable mappings and write(2), keeps the owner's; fcntl has it from Python 3.13 on.
_F_SEAL_FUTURE_WRITE = 0x0010
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


def create(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    """Zeroed memory: its file descriptor (the caller closes it) and the only writable mapping.

    `name` is shown in /proc. Raises StartupFailed if the system does not have the memory.
    """
    fd = None
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        memory = mmap.mmap(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        raise StartupFailed(f"cannot share {num_bytes} bytes of memory: {error}") from error
    return fd, memory


def map_read_only(fd: int, num_bytes: int) -> mmap.mmap:
    """Map a peer's memory. The caller keeps `fd`; the mapping outlives it.

    Raises HandoffFailed unless it is sealed and exactly `num_bytes` long: a peer could otherwise
    shrink it and kill this process with SIGBUS.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        actual_bytes = os.fstat(fd).st_size
        if seals & SEALS != SEALS:
            raise HandoffFailed("the peer's memory is not sealed")
        if actual_bytes != num_bytes:
            raise HandoffFailed(f"the peer's memory has {actual_bytes} bytes, not {num_bytes}")
        return mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise HandoffFailed(f"cannot map the peer's memory: {error}") from error
