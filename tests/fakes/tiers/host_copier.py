"""Copies between the KV of a fake runner and host memory that take time, and are torn: half of each
block is read when the copy starts, the other half when its end is seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from baton.engine.kv.host_copies import Direction

from ..runner import FakeRunner


class FakeCopy:
    """`num_looks`: polls before its end is seen."""

    def __init__(
        self,
        copier: FakeCopier,
        direction: Direction,
        block_ids: Sequence[int],
        host_blocks: Sequence[int],
        num_looks: int,
    ) -> None:
        self._copier = copier
        self._direction = direction
        self._pairs = [*zip(block_ids, host_blocks, strict=True)]
        self.num_looks = num_looks
        self._firsts = [self._read(*pair) for pair in self._pairs]

    def seconds(self) -> float | None:
        queue = self._copier.queues[self._direction]
        if self in queue:
            if self is not queue[0] or self.num_looks > 0:
                self.num_looks -= 1
                return None
            queue.popleft()
            self._end()
        return 0.001 * len(self._pairs)

    def _read(self, block_id: int, host_block: int) -> bytes:
        is_out = self._direction is Direction.OUT
        source = self._copier.runner.read_block(block_id) if is_out else None
        return self._copier.memory[host_block] if source is None else source

    def _end(self) -> None:
        for (block_id, host_block), first in zip(self._pairs, self._firsts, strict=True):
            second, half = self._read(block_id, host_block), len(first) // 2
            content = first[:half] + second[half:]
            if self._direction is Direction.OUT:
                self._copier.memory[host_block] = content
            else:
                self._copier.runner.write_block(block_id, content)


class HostBytes:
    """The content of host blocks."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._all = memoryview(bytearray(num_blocks * block_bytes))

    def view(self, host_block: int) -> memoryview:
        first = host_block * self._block_bytes
        return self._all[first : first + self._block_bytes]

    def __getitem__(self, host_block: int) -> bytes:
        return bytes(self.view(host_block))

    def __setitem__(self, host_block: int, content: bytes) -> None:
        self.view(host_block)[:] = content


class FakeCopier:
    """A `HostCopier`. `draw_looks` gives the number of polls of each copy."""

    def __init__(
        self, runner: FakeRunner, num_blocks: int, draw_looks: Callable[[], int] = lambda: 2
    ) -> None:
        self.runner = runner
        self.block_bytes = len(runner.read_block(0))  # including the draft model's part
        self.num_blocks = num_blocks
        self.memory = HostBytes(num_blocks, self.block_bytes)
        self.queues: dict[Direction, deque[FakeCopy]] = {each: deque() for each in Direction}
        self.num_copied = dict.fromkeys(Direction, 0)
        self._draw_looks = draw_looks

    def start(
        self, direction: Direction, block_ids: Sequence[int], host_blocks: Sequence[int]
    ) -> FakeCopy:
        copy = FakeCopy(self, direction, block_ids, host_blocks, self._draw_looks())
        self.queues[direction].append(copy)
        self.num_copied[direction] += len(block_ids)
        return copy
