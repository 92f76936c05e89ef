"""How many tokens clients have had: one number that processes share.

Engines that are to be as fast as what they are measured with must be held back by somebody: a
gateway reads what they send whenever it comes, and ends the streams that it cannot serve as fast.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_NUMBER = struct.Struct("=q")


class TakenTokens:
    """One process adds, another reads. Begins at zero where there is no such file."""

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
