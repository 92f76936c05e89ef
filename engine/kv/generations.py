"""A generation (uint64) per block, drawn anew at each allocation, and a counter of steps.

    0       8         12        16            32           40          48        64
    | magic | version | padding | incarnation | num_blocks | num_steps | padding | generation[0], ..

The page is in shared memory. Its owner draws a generation at each allocation, before anything can
overwrite the block; pullers read it before and after a copy. It cannot be guessed: over a network
blocks are only sent to peers that know their generations. 0: the block was never allocated.
`num_steps` counts the steps whose KV is written, if the owner's device counts them there
(cuda_step_count.py): a puller that knows blocks before they are computed waits for it.
Does not know the state of blocks: see block_pool.py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ...core.errors import HandoffFailed
from . import memfd

_HEADER = struct.Struct("=8sI4x16sQ24x")
_NUM_STEPS_OFFSET = 40
_MAGIC = b"BATONGEN"
_VERSION = 2


class Generations:
    """The generations of an engine's own blocks; here no other process reads them."""

    def __init__(self, num_blocks: int) -> None:
        self._values: list[int] | memoryview[int] = [0] * num_blocks

    def bump(self, block_ids: Sequence[int]) -> None:
        """Called before `block_ids` may be overwritten: invalidates copies that began earlier."""
        for block_id in block_ids:
            self._values[block_id] += 1

    def read(self, block_id: int) -> int:
        return self._values[block_id]


class SharedGenerations(Generations):
    """The owner's page. `fd` is passed to pullers."""

    def __init__(self, num_blocks: int, incarnation: str) -> None:
        self.num_blocks = num_blocks
        self.fd, self._memory = memfd.create("baton-generations", page_bytes(num_blocks))
        header = _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(incarnation), num_blocks)
        self._memory[: _HEADER.size] = header
        # One aligned 8-byte store per bump: a reader sees the old value or the new one, not a mix.
        self._values: memoryview[int] = memoryview(self._memory)[_HEADER.size :].cast("Q")

    def bump(self, block_ids: Sequence[int]) -> None:
        values = self._values
        drawn = memoryview(os.urandom(8 * len(block_ids))).cast("Q")
        for block_id, generation in zip(block_ids, drawn, strict=True):
            values[block_id] = generation or 1

    def take_over(
        self, block_ids: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]
    ) -> None:
        """Copy generations that the owner, which is on another host, has drawn."""
        np.frombuffer(self._values, np.uint64)[block_ids] = generations

    @property
    def num_steps_address(self) -> int:
        """The address where a device of this process counts the steps whose KV is written."""
        return np.frombuffer(self._memory, np.uint8).ctypes.data + _NUM_STEPS_OFFSET

    def close(self) -> None:
        """Free the page; mappings of readers stay valid."""
        self._values.release()
        self._memory.close()
        os.close(self.fd)


class GenerationsReader:
    """A puller's read-only view of a peer's page."""

    def __init__(self, fd: int, num_blocks: int, incarnation: str) -> None:
        """Map `fd`, which stays the caller's. Raises HandoffFailed if it is another page."""
        self._memory = memfd.map_read_only(fd, page_bytes(num_blocks))
        expected = (_MAGIC, _VERSION, bytes.fromhex(incarnation), num_blocks)
        if _HEADER.unpack_from(self._memory) != expected:
            self._memory.close()
            raise HandoffFailed("the generation page is of another version or process")
        self._words = memoryview(self._memory).cast("Q")

    def match(self, block_ids: npt.NDArray[np.int64], known: npt.NDArray[np.uint64]) -> bool:
        """Whether these blocks have the generations `known`; the ids are within the page."""
        values = np.frombuffer(self._words, np.uint64, offset=_HEADER.size)
        return np.array_equal(values[block_ids], known)

    def num_steps(self) -> int:
        """How many of the owner's steps have written their KV; 0 if they are not counted."""
        return self._words[_NUM_STEPS_OFFSET // 8]

    def close(self) -> None:
        self._words.release()
        self._memory.close()


def page_bytes(num_blocks: int) -> int:
    """The size of the page for `num_blocks` blocks."""
    return _HEADER.size + 8 * num_blocks
