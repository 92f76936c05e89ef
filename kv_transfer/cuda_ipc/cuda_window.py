"""One source's GPU pool, mapped into this process: check generations, copy, check again.

    start_pull, caller's thread    generations as announced? ─► copy on a side stream ─► event
    the window's thread            event ─► generations again? ─► on_done, once

The copy is launched in parts: one is copied while the next is prepared, or launched if `prepare`
was called before. The generations lie in host memory. The source changes them before it launches
what overwrites the block, and the second check follows the completed copy, so a copy that
overlapped a rewrite is stale.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ...core.errors import HandoffFailed
from ...engine.kv.block_pool import CANARY_BLOCK
from ...engine.kv.generations import GenerationsReader
from ...engine.kv.kv_memory import CudaKvMemory
from ..export.pool_address import CudaMemory, PoolDescription
from ..window.block_pairs import BlockPairs, Generations, Ids
from ..window.block_pieces import BlockCut, BlockPiece
from ..window.threaded_window import Pull, PullThread
from ..window.transport import PullOutcome, Starter, failure
from .cuda_ipc_copy import MAX_BLOCKS, CopyMethod, choose

_log = logging.getLogger(__name__)
_MEASURED_BYTES = 64 << 20
_MEASURED_COPIES, _MEASURED_TIMES = 6, 3
_FIRST_PART, _PART = 128, MAX_BLOCKS  # blocks per launch

# Maps a peer's memory of so many bytes until the stack closes, and returns the methods to copy that
# piece of its blocks. Raises HandoffFailed.
Reach = Callable[[contextlib.ExitStack, CudaMemory, int, BlockPiece | None], Sequence[CopyMethod]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some blocks of the source and their announced generations; `start` copies them."""

    source_ids: Ids
    announced: Generations
    start: Callable[[], None]


class _Copy(Pull):
    """A pull of which `parts` were launched; `outcome`: what is known so far."""

    def __init__(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> None:
        super().__init__(pairs, on_done)
        self.is_launched = False
        self.outcome = PullOutcome.OK
        self.parts: list[_Part] = []
        self.is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]


class CudaWindow(PullThread):
    """A mapped pool, and the thread that waits for copies from it. `method`: how it copies."""

    def __init__(
        self,
        transport: str,
        description: PoolDescription,
        fds: Sequence[int],
        kv: CudaKvMemory,
        piece: BlockPiece | None,
        reach: Reach,
    ) -> None:
        """Map the memory, check the canary, choose a method; raises HandoffFailed."""
        if description.cuda is None:
            raise HandoffFailed("its pool lies in host memory")
        self.transport = transport
        self._incarnation = description.incarnation
        self._num_source_blocks = description.num_blocks
        self._cut = BlockCut.of(piece, kv.block_bytes)
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
        super().__init__(self._incarnation)

    # -- opening ----------------------------------------------------------------------------------

    def _choose(self, methods: Sequence[CopyMethod]) -> tuple[CopyMethod, float]:
        """Check and measure all methods. Returns the one to use and its GB/s."""
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
        """GB/s of copying into scratch memory. Raises HandoffFailed if the canary is wrong."""
        block, cut = self._pool[0], self._cut
        num_blocks = min(self._num_source_blocks, max(2, _MEASURED_BYTES // cut.piece_bytes))
        # Backwards, so that no two blocks are contiguous: the worst case of a pull.
        ids = np.tile(np.arange(num_blocks)[::-1], (2, 1))
        try:
            with torch.cuda.stream(self._stream):
                scratch = block.new_empty(num_blocks, *block.shape)
                times_s = [self._time_s(method, ids, scratch) for _ in range(_MEASURED_TIMES)]
                canary = scratch[CANARY_BLOCK].cpu()
        except RuntimeError as error:
            raise HandoffFailed(f"the peer's memory cannot be read: {error}") from error
        found = cut.here(canary.view(torch.uint8).numpy().tobytes())
        cut.require_canary(found.tobytes(), self._incarnation)
        num_bytes = _MEASURED_COPIES * num_blocks * cut.piece_bytes
        return num_bytes / statistics.median(times_s) / 1e9

    def _time_s(self, method: CopyMethod, ids: Ids, scratch: Tensor) -> float:
        """Copies in a row: the launch of one overlaps the previous copy, as in a long pull."""
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
    def num_steps(self) -> int | None:
        """See `transport.PoolWindow`. Must not be called after `close`."""
        return self._generations.num_steps()

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> Pull:
        """Launches on the caller's thread if that is fast, to save a wake-up of the other."""
        copy = _Copy(pairs, on_done)
        if not self._copy.launches_at_once:
            return self._put(copy)
        return self._start(copy, self._parts_of(pairs))

    def prepare(self, pairs: BlockPairs) -> Starter:
        """See `transport.PoolWindow`."""
        if not self._copy.launches_at_once:
            return partial(self.start_pull, pairs)
        with torch.cuda.device(self._device):
            parts = list(self._parts_of(pairs))
        return lambda on_done: self._start(_Copy(pairs, on_done), parts)

    def _start(self, copy: _Copy, parts: Iterable[_Part]) -> Pull:
        assert not self._is_closed, "a pull through a closed window"
        self._launch(copy, parts)
        return self._put(copy)

    def _parts_of(self, pairs: BlockPairs) -> Iterator[_Part]:
        """The first part is small, so that the link has work at once."""
        begin, size = 0, _FIRST_PART
        while begin < len(pairs):
            yield self._part(pairs[begin : begin + size])
            begin, size = begin + size, _PART

    def _part(self, pairs: BlockPairs) -> _Part:
        """Raises HandoffFailed for a block id that the source does not have."""
        source_ids = pairs.ids[0]
        if source_ids.min() < 0 or source_ids.max() >= self._num_source_blocks:
            raise HandoffFailed("a manifest names a block outside the source's pool")
        start = self._copy.prepare(pairs.ids, self._pool, self._stream)
        return _Part(source_ids, pairs.generations, start)

    def _launch(self, copy: _Copy, parts: Iterable[_Part]) -> None:
        """Start the copy, part by part. If it stops early, started parts are waited for."""
        copy.is_launched = True
        with torch.cuda.device(self._device):
            try:
                for part in parts:
                    if not self._launch_part(copy, part):
                        break
            except Exception as error:
                copy.outcome = failure(self._incarnation, error)
            with contextlib.suppress(RuntimeError):  # a dead device: the wait raises it again
                copy.is_done.record(self._stream)

    def _launch_part(self, copy: _Copy, part: _Part) -> bool:
        """Start one part. Returns False if the pull must end here."""
        if copy.is_cancelled:
            return False
        copy.outcome = self._judge(part)
        if copy.outcome is not PullOutcome.OK:
            return False
        part.start()
        copy.parts.append(part)
        return True

    def _run(self) -> None:
        with torch.cuda.device(self._device):
            super()._run()

    def copy_blocks(self, pull: Pull) -> PullOutcome:
        """Wait for a copy; launch it first if `start_pull` did not."""
        assert isinstance(pull, _Copy)
        if not pull.is_launched:
            self._launch(pull, self._parts_of(pull.pairs))
        outcome = pull.outcome
        pull.is_done.synchronize()  # without the GIL
        for part in pull.parts:
            if outcome is PullOutcome.OK:
                outcome = self._judge(part)
        return PullOutcome.CANCELLED if pull.is_cancelled else outcome

    def release(self) -> None:
        """Unmap the memory, after all copies have ended."""
        self._opened.close()

    def _judge(self, part: _Part) -> PullOutcome:
        """Whether the source's blocks still have the announced generations."""
        is_current = self._generations.match(part.source_ids, part.announced)
        return PullOutcome.OK if is_current else PullOutcome.STALE
