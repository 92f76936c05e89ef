"""The number of tokens that clients have received, shared between processes.

It limits simulated engines to the speed of the gateway under test: a gateway reads engine outputs
as soon as they arrive, and ends streams that it cannot deliver as fast.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_NUMBER = struct.Struct("=q")


class TakenTokens:
    """One process adds, another reads. Starts at zero if the file does not exist."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_NUMBER.size)
            self._shared = mmap.mmap(file.fileno(), _NUMBER.size)

    @property
    def number(self) -> int:
        number: int = _NUMBER.unpack_from(self._shared)[0]
        return number

    def add(self, number: int) -> None:
        _NUMBER.pack_into(self._shared, 0, self.number + number)
