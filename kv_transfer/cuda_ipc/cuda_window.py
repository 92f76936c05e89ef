"""One source's GPU pool as this process reaches it, whatever the way: judge, copy, judge again.

    start_pull, caller's thread    generations as announced? ─► copy on a side stream ─► event
    the window's thread            event ─► generations again? ─► on_done, once

The copy is launched in parts: the first is on its way while the next is being prepared, or if they
were before, launched. The generations lie in host memory: the source moves them before it launches
what overwrites the block, and the second look comes when the copy has completed, so a copy that
overlapped a rewrite is stale.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...core.errors import HandoffFailed
from ...engine.kv.block_pool import CANARY_BLOCK, canary_bytes
from ...engine.kv.cuda_kv_memory import CudaKvMemory
from ...engine.kv.generations import GenerationsReader
from ..export.pool_address import CudaMemory, PoolDescription
from ..window.block_pairs import BlockPairs, Generations, Ids
from ..window.head_ranges import BlockCut, HeadPiece
from ..window.transport import PullOutcome
from .cuda_ipc_copy import MAX_BLOCKS, CopyMethod, choose

_log = logging.getLogger(__name__)
_MEASURED_BYTES = 64 << 20
_MEASURED_COPIES, _MEASURED_TIMES = 6, 3
_FIRST_PART, _PART = 128, MAX_BLOCKS  # blocks that are launched together

# Map a peer's memory of so many bytes until the stack closes; the ways to copy that piece of its
# blocks. Raises HandoffFailed.
Reach = Callable[[contextlib.ExitStack, CudaMemory, int, HeadPiece | None], Sequence[CopyMethod]]


def cut_of(piece: HeadPiece | None, kv: CudaKvMemory) -> BlockCut:
    """The piece of each of our blocks in bytes."""
    return BlockCut.of(piece, 2 * kv.layout.num_layers, kv.block_bytes)


class _Pull:
    """One `start_pull`; the handle that its caller gets."""

    def __init__(self, on_done: Callable[[PullOutcome], None]) -> None:
        self.on_done = on_done
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True  # a copy that was launched ends all the same


@dataclass(frozen=True, slots=True)
class _Part:
    """Some blocks of the source with the generations that it announced; `start` copies them."""

    source_ids: Ids
    announced: Generations
    start: Callable[[], None]


@dataclass(slots=True)
class _Copy:
    """A pull whose `parts` were launched; `outcome` is what is known already."""

    pull: _Pull
    outcome: PullOutcome = PullOutcome.OK
    parts: list[_Part] = field(default_factory=list)
    is_done: torch.cuda.Event = field(default_factory=torch.cuda.Event)


_Unlaunched: TypeAlias = tuple[_Pull, BlockPairs]


class CudaWindow:
    """A mapped pool, and the thread that waits for copies from it. `method` is how it copies."""

    def __init__(
        self,
        transport: str,
        description: PoolDescription,
        fds: Sequence[int],
        kv: CudaKvMemory,
        piece: HeadPiece | None,
        reach: Reach,
    ) -> None:
        """Map the memory, check the canary, choose a method; raises HandoffFailed."""
        if description.cuda is None:
            raise HandoffFailed("its pool lies in host memory")
        self.transport = transport
        self._incarnation = description.incarnation
        self._num_source_blocks = description.num_blocks
        self._cut = cut_of(piece, kv)
        self._pool = kv.tensor
        self._device = kv.tensor.device
        with contextlib.ExitStack() as opened:
            self._generations = GenerationsReader(
                fds[0], description.num_blocks, description.engine
            )
            opened.callback(self._generations.close)
            num_bytes = description.num_blocks * description.block_bytes
            methods = reach(opened, description.cuda, num_bytes, piece)
            with torch.cuda.device(self._device):
                self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
                self._copy, self.gbytes_per_s = self._choose(methods)
            self._opened = opened.pop_all()
        self.method = self._copy.name
        self._is_closed = False
        self._pulls: queue.SimpleQueue[_Copy | _Unlaunched | None] = queue.SimpleQueue()
        name = f"kv-pull-{self._incarnation[:8]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- opening ----------------------------------------------------------------------------------

    def _choose(self, methods: Sequence[CopyMethod]) -> tuple[CopyMethod, float]:
        """Check and measure every way; the one to take and its GB/s."""
        rates = [self._measure(method) for method in methods]
        chosen = choose([method.name for method in methods], rates)
        _log.info(
            "source %s: %s by %s (%s)",
            self._incarnation,
            self.transport,
            methods[chosen].name,
            ", ".join(f"{m.name} {r:.0f} GB/s" for m, r in zip(methods, rates, strict=True)),
        )
        return methods[chosen], rates[chosen]

    def _measure(self, method: CopyMethod) -> float:
        """GB/s of copying into memory of no use; raises HandoffFailed if the canary is wrong."""
        block, cut = self._pool[0], self._cut
        num_blocks = min(self._num_source_blocks, max(2, _MEASURED_BYTES // cut.piece_bytes))
        # Backwards, so that no two blocks are one piece: the worst that a pull can be.
        ids = np.tile(np.arange(num_blocks)[::-1], (2, 1))
        try:
            with torch.cuda.stream(self._stream):
                scratch = block.new_empty(num_blocks, *block.shape)
                times_s = [self._time_s(method, ids, scratch) for _ in range(_MEASURED_TIMES)]
                canary = scratch[CANARY_BLOCK].cpu()
        except RuntimeError as error:
            raise HandoffFailed(f"the peer's memory cannot be read: {error}") from error
        rows = canary.view(torch.uint8).view(cut.num_rows, cut.pitch)
        piece = rows[:, cut.offset : cut.offset + cut.width].contiguous()
        expected = canary_bytes(self._incarnation, cut.source_block_bytes)
        if piece.numpy().tobytes() != cut.of_source(expected):
            raise HandoffFailed("the canary block is wrong: another layout or another memory")
        num_bytes = _MEASURED_COPIES * num_blocks * cut.piece_bytes
        return num_bytes / statistics.median(times_s) / 1e9

    def _time_s(self, method: CopyMethod, ids: Ids, scratch: Tensor) -> float:
        """Copies in a row, so that launching one hides behind the one before, as in a long pull."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(_MEASURED_COPIES):
            method.prepare(ids, scratch, self._stream)()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    # -- pulling ----------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """See `transport.PoolWindow`; not behind `close`."""
        return self._generations.num_steps()

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> _Pull:
        """Launches on the caller's thread where that is short: another would have to be woken."""
        pull = _Pull(on_done)
        if self._copy.launches_at_once:
            parts = (self._part(pairs[begin:end]) for begin, end in _cut(len(pairs)))
            return self._start(pull, parts)
        assert not self._is_closed, "a pull through a closed window"
        self._pulls.put((pull, pairs))
        return pull

    def prepare(self, pairs: BlockPairs) -> Callable[[Callable[[PullOutcome], None]], _Pull]:
        """See `transport.PoolWindow`."""
        if not self._copy.launches_at_once:
            return partial(self.start_pull, pairs)
        with torch.cuda.device(self._device):
            parts = [self._part(pairs[begin:end]) for begin, end in _cut(len(pairs))]
        return lambda on_done: self._start(_Pull(on_done), parts)

    def _part(self, pairs: BlockPairs) -> _Part:
        """Raises HandoffFailed if there is no such block."""
        source_ids = pairs.ids[0]
        if source_ids.min() < 0 or source_ids.max() >= self._num_source_blocks:
            raise HandoffFailed("a manifest names a block outside the source's pool")
        start = self._copy.prepare(pairs.ids, self._pool, self._stream)
        return _Part(source_ids, pairs.generations, start)

    def _start(self, pull: _Pull, parts: Iterable[_Part]) -> _Pull:
        assert not self._is_closed, "a pull through a closed window"
        self._pulls.put(self._launch(pull, parts))
        return pull

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pulls.put(None)

    def join(self) -> None:
        """Wait until a closed window has reported all its pulls and unmapped the memory."""
        self._thread.join()

    def _launch(self, pull: _Pull, parts: Iterable[_Part]) -> _Copy:
        """Start the copy, part by part; whatever stops it, what was started is waited for."""
        copy = _Copy(pull)
        with torch.cuda.device(self._device):
            try:
                for part in parts:
                    if not self._launch_part(copy, part):
                        break
            except Exception as error:
                # A pull that never reports would fence its memory for ever.
                is_ours = not isinstance(error, HandoffFailed)
                _log.error("no pull from %s: %s", self._incarnation, error, exc_info=is_ours)
                copy.outcome = PullOutcome.FAILED
            with contextlib.suppress(RuntimeError):  # a dead device: found again by the wait
                copy.is_done.record(self._stream)
        return copy

    def _launch_part(self, copy: _Copy, part: _Part) -> bool:
        """Start one part; False if the pull is to end here."""
        if copy.pull.is_cancelled:
            return False
        copy.outcome = self._judge(part)
        if copy.outcome is not PullOutcome.OK:
            return False
        part.start()
        copy.parts.append(part)
        return True

    def _run(self) -> None:
        """The window's thread. Only when all copies have ended is the memory unmapped."""
        with torch.cuda.device(self._device):
            while (pull := self._pulls.get()) is not None:
                self._finish(pull if isinstance(pull, _Copy) else self._launch_late(*pull))
        self._opened.close()

    def _launch_late(self, pull: _Pull, pairs: BlockPairs) -> _Copy:
        return self._launch(pull, (self._part(pairs[begin:end]) for begin, end in _cut(len(pairs))))

    def _finish(self, copy: _Copy) -> None:
        """Wait for a copy and report it."""
        outcome = copy.outcome
        try:
            copy.is_done.synchronize()  # without the GIL
            for part in copy.parts:
                if outcome is PullOutcome.OK:
                    outcome = self._judge(part)
        except RuntimeError:
            _log.exception("a pull from %s broke", self._incarnation)
            outcome = PullOutcome.FAILED
        copy.pull.on_done(PullOutcome.CANCELLED if copy.pull.is_cancelled else outcome)

    def _judge(self, part: _Part) -> PullOutcome:
        """Whether the source's blocks are still what was announced."""
        found = self._generations.read_many(part.source_ids)
        return PullOutcome.OK if np.array_equal(found, part.announced) else PullOutcome.STALE


def _cut(num_pairs: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of each part: a small one first, so that the link has work at once."""
    begin, size = 0, _FIRST_PART
    while begin < num_pairs:
        yield begin, min(begin + size, num_pairs)
        begin, size = begin + size, _PART
