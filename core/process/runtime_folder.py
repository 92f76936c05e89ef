"""Private folders for sockets, none of which is left behind for good.

The process that makes a folder holds a lock on it, which the kernel releases when the process ends,
however it ends: a folder of this user that can be locked has no owner, and is removed when the next
one is made. Locks need no pid, so reused pids and containers that share /tmp cause no mistakes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ROOT_BYTES = 64  # a unix socket's path has at most 107 in all


class RuntimeFolder:
    """`with RuntimeFolder.make("baton-x-") as folder: ... folder.path`, of mode 0700."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, prefix: str) -> RuntimeFolder:
        """Make a folder, after removing those with that prefix whose owners have ended."""
        root = _root()
        _sweep(root, prefix)
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            with contextlib.suppress(FileNotFoundError):  # swept before it was locked
                return cls(path, _locked(path))

    def restore(self) -> None:
        """Make the folder again if it was removed, at the end of a session or by a cleaner of /tmp.
        Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.lstat(), os.fstat(self._lock)):
                return
        self.path.mkdir(mode=0o700, parents=True)  # raises if another user's is there
        try:
            lock = _locked(self.path)
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)  # the next call makes it
            raise
        os.dup2(lock, self._lock, inheritable=False)
        os.close(lock)

    def remove(self) -> None:
        """Remove the folder with its contents; no effect if it is gone already."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> RuntimeFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def _locked(path: Path) -> int:
    """The folder's lock, a descriptor. Raises FileNotFoundError if it was swept before."""
    lock = os.open(path, _OPEN)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fstat(lock).st_nlink > 0:
        return lock
    os.close(lock)
    raise FileNotFoundError(path)


def _sweep(root: Path, prefix: str) -> None:
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # no folder, another user's, locked, or gone
            lock = os.open(path, _OPEN)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(lock)


def _root() -> Path:
    """XDG's folder for sockets if the session has one, else the temporary folder, unless a socket's
    path would be too long there."""
    for folder in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if len(os.fsencode(folder)) <= _MAX_ROOT_BYTES and os.access(folder, os.W_OK | os.X_OK):
            return Path(folder)
    return Path("/tmp")
