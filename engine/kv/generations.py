"""One uint64 per block, drawn anew whenever it gets new content, and one that counts the steps.

    0       8         12        16            32           40          48        64
    | magic | version | padding | incarnation | num_blocks | num_steps | padding | generation[0], ..

The page lies in shared memory. Its owner draws a generation at reallocation, before anything can
overwrite the block; pullers read it before and after a copy. Nobody can guess one: over a network
blocks go to those alone who know their generations. 0: the block was never handed out. `num_steps`
is how many steps have written their KV, if the owner's device counts them there
(cuda_step_count.py): a puller that got blocks while they were computed sees that they are.
Knows no block's state: that is block_pool.py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...core.errors import HandoffFailed
from . import memfd

_HEADER = struct.Struct("=8sI4x16sQ24x")
_NUM_STEPS_OFFSET = 40
_MAGIC = b"BATONGEN"
_VERSION = 2


class Generations(Protocol):
    """The owner's side."""

    def bump(self, block_ids: Sequence[int]) -> None:
        """Before `block_ids` may be overwritten: no copy that began earlier is valid any more."""
        ...

    def read(self, block_id: int) -> int: ...


class LocalGenerations:
    """Generations that no other process reads."""

    def __init__(self, num_blocks: int) -> None:
        self._values = [0] * num_blocks

    def bump(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._values[block_id] += 1

    def read(self, block_id: int) -> int:
        return self._values[block_id]


class SharedGenerations:
    """The owner's page. `fd` is what a puller must be passed."""

    def __init__(self, num_blocks: int, incarnation: str) -> None:
        self.num_blocks = num_blocks
        self.fd, self._memory = memfd.create("baton-generations", page_bytes(num_blocks))
        header = _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(incarnation), num_blocks)
        self._memory[: _HEADER.size] = header
        # One aligned 8-byte store per bump: a reader sees the old value or the new, never a mix.
        self._values = memoryview(self._memory)[_HEADER.size :].cast("Q")

    def bump(self, block_ids: Sequence[int]) -> None:
        values = self._values
        drawn = memoryview(os.urandom(8 * len(block_ids))).cast("Q")
        for block_id, generation in zip(block_ids, drawn, strict=True):
            values[block_id] = generation or 1

    def take_over(
        self, block_ids: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]
    ) -> None:
        """What the owner on another host has drawn, of whose page this is a copy."""
        np.frombuffer(self._values, np.uint64)[block_ids] = generations

    def read(self, block_id: int) -> int:
        return self._values[block_id]

    @property
    def num_steps_address(self) -> int:
        """Where a device of this process counts the steps whose KV it has written."""
        return np.frombuffer(self._memory, np.uint8).ctypes.data + _NUM_STEPS_OFFSET

    def close(self) -> None:
        """Give the page back; a reader's mapping stays as it is."""
        self._values.release()
        self._memory.close()
        os.close(self.fd)


class GenerationsReader:
    """A puller's read-only view of a peer's page."""

    def __init__(self, fd: int, num_blocks: int, incarnation: str) -> None:
        """Map `fd`, which stays the caller's. Raises HandoffFailed if it is not that page."""
        self._memory = memfd.map_read_only(fd, page_bytes(num_blocks))
        expected = (_MAGIC, _VERSION, bytes.fromhex(incarnation), num_blocks)
        if _HEADER.unpack_from(self._memory) != expected:
            self._memory.close()
            raise HandoffFailed("the generation page is of another version or process")
        self._values = memoryview(self._memory)[_HEADER.size :].cast("Q")
        word = slice(_NUM_STEPS_OFFSET, _NUM_STEPS_OFFSET + 8)
        self._num_steps = memoryview(self._memory)[word].cast("Q")

    def read(self, block_id: int) -> int:
        return self._values[block_id]

    def read_many(self, block_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Those of many blocks, each read once; the ids are within the page."""
        return np.frombuffer(self._values, np.uint64)[block_ids]

    def num_steps(self) -> int:
        """How many of the owner's steps have written their KV; 0 if it does not count them."""
        return self._num_steps[0]

    def close(self) -> None:
        self._num_steps.release()
        self._values.release()
        self._memory.close()


def page_bytes(num_blocks: int) -> int:
    """The size of the page for `num_blocks` blocks."""
    return _HEADER.size + 8 * num_blocks
