"""Detects changes of files, when their content is about to be used: without polling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Inode, size, ctime: the time of the last change of content or permissions. Unlike mtime, it cannot
# be set back, which copying does.
_Signature = tuple[int, int, int]


class WatchedFiles:
    """A set of files that belong together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen: tuple[_Signature | None, ...] = ()

    def have_changed(self) -> bool:
        """Whether a file has changed since the last call; True the first time.

        Call it before reading: a write between the call and the read is then seen the next time.
        """
        now = tuple(map(_signature, self._paths))
        has_changed = now != self._seen
        self._seen = now
        return has_changed

    def forget(self) -> None:
        """Count the files as changed at the next call, after a failed read."""
        self._seen = ()


def _signature(path: Path) -> _Signature | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_ctime_ns
