"""Have these files changed? Looked at when their content is about to be used, so nothing polls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

# Inode, size, time of change: of the content or of who may read it. Nobody can set it back, as
# copying does with the time of the last writing.
_Signature = tuple[int, int, int]


class WatchedFiles:
    """One set of files that belong together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen: tuple[_Signature | None, ...] = ()

    def have_changed(self) -> bool:
        """Since the last call; True the first time.

        Call it before reading: what is written between the two is then seen the next time.
        """
        now = tuple(map(_signature, self._paths))
        has_changed = now != self._seen
        self._seen = now
        return has_changed

    def forget(self) -> None:
        """They could not be read this time: they count as changed at the next call."""
        self._seen = ()


def _signature(path: Path) -> _Signature | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_ctime_ns
