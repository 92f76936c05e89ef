"""Copies of blocks between the device's pool and host memory, and their cost.

On a GPU the copy engines make them, with a stream for each direction, slice by slice: the next one
is submitted when one has ended, since the small copies of a step use the same engines, behind what
was submitted before. They wait for no event of a step:

    out   the host has seen that the blocks are computed; if one gets new content meanwhile, its
          generation changes, and the copy is discarded
    in    the blocks were free, so no step on the device uses them, and they are fenced; steps that
          read them are launched once the host has seen the copy complete

On a CPU a copy has ended when `start` returns.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...core.engine_config import EngineConfig
from ...core.errors import EngineFailed
from ...core.step_cost import StepCost
from ...core.step_shape import StepShape, pairs_of
from . import cuda_memory
from .cuda_memory import find_runs, forget_error
from .host_memory import HostMemory, cuda_pin, cuda_unpin
from .kv_memory import CpuKvMemory, CudaKvMemory

_NOTICE_S = 0.0005  # from the end of a copy to the launch of a step behind it
_NUM_MEASURED = 16
_SLICE_BYTES = 4 << 20  # 0.08 ms
_MOST_SUBMITTED = 2  # slices of a direction


class Direction(enum.IntEnum):
    """Out of the device's pool, or into it."""

    OUT = 0
    IN = 1


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Counters since the tier was created, except `num_blocks`: those entered now.

    `num_lost_blocks` had changed when their copy ended. `block_s`: the time per block of the last
    copies; 0: there were none.
    """

    num_blocks: int = 0
    block_s: float = 0.0
    bytes_out: int = 0
    bytes_in: int = 0
    num_lost_blocks: int = 0


class HostCopy(Protocol):
    """One copy."""

    def seconds(self) -> float | None:
        """How long it took; None: it has not ended. Raises EngineFailed if the device is lost."""
        ...


class HostCopier(Protocol):
    """Used by the engine's thread. Copies of one direction end in the order of their starts."""

    @property
    def block_bytes(self) -> int:
        """The size of a block, of all ranks."""
        ...

    @property
    def num_blocks(self) -> int:
        """Host blocks that are usable now: it grows while memory is pinned."""
        ...

    def begin(self) -> None:
        """Begin to make blocks usable; call once. Does not wait."""
        ...

    def start(
        self, direction: Direction, block_ids: Sequence[int], host_blocks: Sequence[int]
    ) -> HostCopy:
        """Copy blocks, pairwise. Raises EngineFailed."""
        ...


@dataclass(frozen=True, slots=True)
class DoneCopy:
    """A copy that has ended."""

    took_s: float

    def seconds(self) -> float:
        return self.took_s


class _BlocksInHostMemory:
    """The common part of copiers."""

    def __init__(self, block_bytes: int, memory: HostMemory) -> None:
        self.block_bytes = block_bytes
        self._memory = memory

    @property
    def num_blocks(self) -> int:
        return self._memory.num_blocks

    @property
    def most_blocks(self) -> int:
        """The most that `num_blocks` may become."""
        return self._memory.num_wanted

    def begin(self) -> None:
        """See `HostCopier`."""
        self._memory.begin()

    def wait(self) -> None:
        """After `begin`: wait until `num_blocks` grows no more."""
        self._memory.wait()

    def view(self, host_block: int) -> memoryview:
        """Its memory, for a thread of the host."""
        first = host_block * self.block_bytes
        return memoryview(self._memory.memory)[first : first + self.block_bytes]


class CpuCopier(_BlocksInHostMemory):
    """For a pool that is in host memory itself."""

    def __init__(self, kv: CpuKvMemory, memory: HostMemory) -> None:
        super().__init__(kv.block_bytes, memory)
        self._pool = kv.tensor.view(kv.num_blocks, -1).view(torch.uint8)
        flat = torch.frombuffer(memory.memory, dtype=torch.uint8)[
            : memory.num_wanted * self.block_bytes
        ]
        self._host = flat.view(memory.num_wanted, self.block_bytes)

    def start(
        self, direction: Direction, block_ids: Sequence[int], host_blocks: Sequence[int]
    ) -> DoneCopy:
        began_s = time.monotonic()
        runs = find_runs(np.array([block_ids, host_blocks]))
        for block, host, n in zip(*runs, strict=True):
            device, memory = self._pool[block : block + n], self._host[host : host + n]
            if direction is Direction.OUT:
                memory.copy_(device)
            else:
                device.copy_(memory)
        return DoneCopy(time.monotonic() - began_s)

    def close(self) -> None:
        """No copy any more."""
        del self._host, self._pool
        self._memory.close()


class CudaCopy:
    """A copy by the copy engines."""

    def __init__(self, lane: _Lane, num_slices: int, submit: Callable[[int], None]) -> None:
        """`submit(n)` submits slice `n` to the device."""
        self._lane, self._submit = lane, submit
        self._begin, self.end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self.num_waiting = self._num_slices = num_slices

    def submit_next(self) -> torch.cuda.Event:
        """Submit the next slice; returns the event at its end. A copy is timed from its first."""
        stream = self._lane.stream
        if self.num_waiting == self._num_slices:
            self._begin.record(stream)
        self._submit(self._num_slices - self.num_waiting)
        ended = self.end
        if self.num_waiting > 1:
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ended.record(stream)
        self.num_waiting -= 1  # last: another thread may read it
        return ended

    def seconds(self) -> float | None:
        try:
            self._lane.advance()
            if self.num_waiting or not self.end.query():  # type: ignore[no-untyped-call]
                return None
            return float(self._begin.elapsed_time(self.end)) / 1e3
        except RuntimeError as error:
            raise EngineFailed(f"a copy to or from host memory failed: {error}") from error


class _Lane:
    """The copies of one direction, slice by slice (see above). One thread may start copies while
    another polls them."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream
        self._lock = threading.Lock()
        self._waiting: deque[CudaCopy] = deque()
        self._submitted: deque[torch.cuda.Event] = deque()

    def add(self, num_slices: int, submit: Callable[[int], None]) -> CudaCopy:
        copy = CudaCopy(self, num_slices, submit)
        with self._lock:
            self._waiting.append(copy)
        self.advance()
        return copy

    def advance(self) -> None:
        """Submit the next slices if submitted ones have ended."""
        with self._lock:
            while self._submitted and self._submitted[0].query():  # type: ignore[no-untyped-call]
                self._submitted.popleft()
            while self._waiting and len(self._submitted) < _MOST_SUBMITTED:
                with torch.cuda.device(self.stream.device):  # the current device is per thread
                    self._submitted.append(self._waiting[0].submit_next())
                if not self._waiting[0].num_waiting:
                    self._waiting.popleft()

    def close(self) -> None:
        """Drop what is not submitted, and wait for what is."""
        with self._lock:
            self._waiting.clear()
            self.stream.synchronize()


class CudaCopier(_BlocksInHostMemory):
    """For a GPU's pool, with pinned host memory."""

    def __init__(self, kv: CudaKvMemory, memory: HostMemory, device: torch.device) -> None:
        super().__init__(kv.block_bytes, memory)
        self._address = kv.address
        self._device = device
        self._has_batches = cuda_memory.has_batches()
        streams = [torch.cuda.Stream(device) for _ in Direction]  # type: ignore[no-untyped-call]
        self._lanes = dict(zip(Direction, map(_Lane, streams), strict=True))

    def start(
        self, direction: Direction, block_ids: Sequence[int], host_blocks: Sequence[int]
    ) -> CudaCopy:
        n = max(1, _SLICE_BYTES // self.block_bytes)
        block_ids, host_blocks = tuple(block_ids), tuple(host_blocks)

        def submit(index: int) -> None:
            part = slice(index * n, (index + 1) * n)
            self._submit(direction, block_ids[part], host_blocks[part])

        with torch.cuda.device(self._device):
            return self._lanes[direction].add(-(-len(block_ids) // n), submit)

    def _submit(
        self, direction: Direction, block_ids: Sequence[int], host_blocks: Sequence[int]
    ) -> None:
        runs = find_runs(np.array([block_ids, host_blocks]), self._memory.blocks_per_slice)
        blocks, hosts, lengths = (column * self.block_bytes for column in runs)
        sources, targets = blocks + self._address, hosts + self._memory.address
        if direction is Direction.IN:
            sources, targets = targets, sources
        stream = self._lanes[direction].stream
        if self._has_batches:
            statuses = [cuda_memory.batch_copy(sources, targets, lengths, stream)()]
        else:
            pieces = np.stack([sources, targets, lengths], axis=1).tolist()
            statuses = [cuda_memory.copy_piece(a, b, n, stream) for a, b, n in pieces]
        if any(statuses):
            raise EngineFailed(f"a copy was refused: {forget_error(max(statuses))}")

    def close(self) -> None:
        """No copy any more."""
        for lane in self._lanes.values():
            lane.close()
        self._memory.close()


def make_host_copier(
    config: EngineConfig, kv: CpuKvMemory | CudaKvMemory, device: torch.device
) -> CpuCopier | CudaCopier | None:
    """The copier for `--swap-space`; None: no host memory for blocks."""
    num_bytes = config.swap_bytes(device.type)
    if num_bytes < kv.block_bytes:
        return None
    if isinstance(kv, CpuKvMemory):
        return CpuCopier(kv, HostMemory(kv.block_bytes, num_bytes))
    return CudaCopier(
        kv, HostMemory(kv.block_bytes, num_bytes, cuda_pin(device), cuda_unpin), device
    )


class CopyCost:
    """The time of copies to and from host memory, from the last ones: bytes at a rate, and a
    constant until the next step is launched."""

    def __init__(self) -> None:
        self._measured: deque[tuple[int, float]] = deque(maxlen=_NUM_MEASURED)

    def observe(self, num_bytes: int, seconds: float) -> None:
        self._measured.append((num_bytes, seconds))

    def forget_slowest(self) -> None:
        """Drop the slowest measured copy, unless it is the only one."""
        if len(self._measured) > 1:
            self._measured.remove(max(self._measured, key=lambda one: one[1] / one[0]))

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first copy."""
        seconds = sum(seconds for _, seconds in self._measured)
        return sum(num_bytes for num_bytes, _ in self._measured) / seconds if seconds else None

    def seconds(self, num_bytes: int) -> float:
        """The time of a copy that waits for no other."""
        rate = self.bytes_per_s
        return _NOTICE_S + (0.0 if rate is None else num_bytes / rate)

    def pays(
        self,
        num_bytes: int,
        num_tokens: int,
        context: int,
        step_cost: StepCost | None,
        read_s: float = 0.0,
    ) -> bool:
        """Whether copying `num_bytes`, after `read_s`, takes less than computing `num_tokens` of a
        prompt behind `context`. Used for hits in host memory and on disk, whose bytes are copied
        once, and for preempted requests, whose bytes are copied twice. While no step is measured:
        True, unless blocks have to be read."""
        if step_cost is None:
            return read_s == 0.0
        chunk = min(num_tokens, max(1, 2 * step_cost.max_rows))  # as far as steps were measured
        num_steps = num_tokens / chunk
        pairs = int(pairs_of(num_tokens, context) / num_steps)
        step_s = step_cost.seconds(StepShape(num_prompt_tokens=chunk, pairs=pairs))
        return read_s + self.seconds(num_bytes) < num_steps * step_s
