"""`cuda_ipc`: blocks between GPUs of one host. The source's pool is mapped and read over the link.

    start_pull ─► generations as announced? ─► copy on a side stream ─► event ─► generations again?
                                                                             └─► on_done, once
One thread a window launches copies and waits for their events, at most two copies at a time, so
that the link has work while a finished one is judged. The generations lie in host memory: the
source moves them before it launches what overwrites the block, and the second look comes when the
copy has completed, so a copy that overlapped a rewrite is stale.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.errors import HandoffFailed
from ..engine.block_pool import CANARY_BLOCK
from ..engine.canary import canary_bytes
from ..engine.cuda_kv_memory import CudaKvMemory
from ..engine.generations import GenerationsReader
from .cuda_ipc_copy import CopyMethod, EngineCopy, KernelCopy, choose
from .cuda_ipc_memory import PeerMapping
from .pool_address import PoolDescription, receive
from .runs import Ids, block_ids, generations
from .transport import BlockPair, PullOutcome

_log = logging.getLogger(__name__)
_MEASURED_BYTES = 64 << 20
_MEASURED_COPIES, _MEASURED_TIMES = 6, 3
_MAX_COPIES = 2  # one on the link, one behind it


class CudaIpcTransport:
    """Opens windows onto the pools of engines on GPUs of this host."""

    name = "cuda_ipc"

    def __init__(self, kv: CudaKvMemory, method: str | None = None) -> None:
        """`kv` is where blocks are copied to. `method`: "kernel" or "copy engine"; None measures
        and chooses, for each window."""
        self._kv = kv
        self._method = method

    def connect(self, incarnation: str) -> CudaIpcWindow:
        """Raises HandoffFailed: nobody exports it, it lies elsewhere, or this GPU cannot read it.

        Takes up to a second, or as long as the first copy has to be compiled.
        """
        description, fds = receive(incarnation)
        try:
            description.require(incarnation, self._kv.block_bytes)
            return CudaIpcWindow(description, fds, self._kv, self._method)
        finally:
            for fd in fds:
                os.close(fd)


class _Pull:
    """One `start_pull`; the handle that its caller gets."""

    def __init__(self, pairs: Sequence[BlockPair], on_done: Callable[[PullOutcome], None]) -> None:
        self.pairs = pairs
        self.on_done = on_done
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True  # a copy that was launched ends all the same


@dataclass(frozen=True, slots=True)
class _Copy:
    """A pull whose copy was launched; `kept_alive` is what it reads beside the blocks."""

    pull: _Pull
    source_ids: npt.NDArray[np.int64]
    announced: npt.NDArray[np.uint64]
    is_done: torch.cuda.Event
    kept_alive: object


class CudaIpcWindow:
    """A mapped pool, and the thread that copies from it. `method` is how."""

    transport = "cuda_ipc"

    def __init__(
        self,
        description: PoolDescription,
        fds: Sequence[int],
        kv: CudaKvMemory,
        method: str | None,
    ) -> None:
        """Map the memory, check the canary, choose a method; raises HandoffFailed."""
        self._incarnation = description.incarnation
        self._num_source_blocks = description.num_blocks
        self._pool = kv.tensor
        self._device = kv.tensor.device
        if description.cuda is None:
            raise HandoffFailed("its pool lies in host memory")
        with contextlib.ExitStack() as opened:
            self._generations = GenerationsReader(
                fds[0], description.num_blocks, description.incarnation
            )
            opened.callback(self._generations.close)
            self._mapping = PeerMapping(description.cuda, self._device)
            opened.callback(self._mapping.close)
            with torch.cuda.device(self._device):
                self._stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
                self._copy, self.gbytes_per_s = self._choose(method)
            self._opened = opened.pop_all()
        self.method = self._copy.name
        self._is_closed = False
        self._pulls: queue.SimpleQueue[_Pull | None] = queue.SimpleQueue()
        name = f"kv-pull-{self._incarnation[:8]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- opening ----------------------------------------------------------------------------------

    def _choose(self, wanted: str | None) -> tuple[CopyMethod, float]:
        """Check and measure every way, or the wanted one; the one to take and its GB/s."""
        methods: list[CopyMethod] = [KernelCopy(self._mapping.address)]
        if EngineCopy.is_available():
            methods.append(EngineCopy(self._mapping.address))
        methods = [method for method in methods if wanted in (None, method.name)]
        if not methods:
            raise HandoffFailed(f"this CUDA runtime has no {wanted} for block copies")
        rates = [self._measure(method) for method in methods]
        chosen = choose([method.name for method in methods], rates)
        _log.info(
            "source %s: blocks by %s (%s)",
            self._incarnation,
            methods[chosen].name,
            ", ".join(f"{m.name} {r:.0f} GB/s" for m, r in zip(methods, rates, strict=True)),
        )
        return methods[chosen], rates[chosen]

    def _measure(self, method: CopyMethod) -> float:
        """GB/s of copying into memory of no use; raises HandoffFailed if the canary is wrong."""
        block = self._pool[0]
        num_blocks = min(self._num_source_blocks, max(2, _MEASURED_BYTES // block.nbytes))
        # Backwards, so that no two blocks are one piece: the worst that a pull can be.
        ids = np.tile(np.arange(num_blocks)[::-1], (2, 1))
        try:
            with torch.cuda.stream(self._stream):
                scratch = block.new_empty(num_blocks, *block.shape)
                times_s = [self._time_s(method, ids, scratch) for _ in range(_MEASURED_TIMES)]
                canary = scratch[CANARY_BLOCK].cpu()
        except RuntimeError as error:
            raise HandoffFailed(f"the peer's memory cannot be read: {error}") from error
        if canary.view(torch.uint8).numpy().tobytes() != canary_bytes(
            self._incarnation, block.nbytes
        ):
            raise HandoffFailed("the canary block is wrong: another layout or another memory")
        return _MEASURED_COPIES * scratch.nbytes / statistics.median(times_s) / 1e9

    def _time_s(self, method: CopyMethod, ids: Ids, scratch: Tensor) -> float:
        """Copies in a row, so that launching one hides behind the one before, as in a long pull."""
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        kept_alive = [method.launch(ids, scratch) for _ in range(_MEASURED_COPIES)]
        end.record()
        end.synchronize()
        del kept_alive
        return float(begin.elapsed_time(end)) / 1e3

    # -- pulling ----------------------------------------------------------------------------------

    def start_pull(
        self, pairs: Sequence[BlockPair], on_done: Callable[[PullOutcome], None]
    ) -> _Pull:
        assert not self._is_closed, "a pull through a closed window"
        pull = _Pull(pairs, on_done)
        self._pulls.put(pull)
        return pull

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pulls.put(None)

    def join(self) -> None:
        """Wait until a closed window has reported all its pulls and unmapped the memory."""
        self._thread.join()

    def _run(self) -> None:
        """The window's thread. Only when all copies have ended is the memory unmapped."""
        copies: deque[_Copy] = deque()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            while (pull := self._next(copies)) is not None:
                if (copy := self._launch(pull)) is not None:
                    copies.append(copy)
            while copies:
                self._finish(copies.popleft())
        self._opened.close()

    def _next(self, copies: deque[_Copy]) -> _Pull | None:
        """The next pull, None behind the last; what has been launched is finished meanwhile."""
        while copies:
            if len(copies) < _MAX_COPIES:
                with contextlib.suppress(queue.Empty):
                    return self._pulls.get_nowait()
            self._finish(copies.popleft())
        return self._pulls.get()

    def _launch(self, pull: _Pull) -> _Copy | None:
        """Start its copy, or report at once why not."""
        outcome = PullOutcome.CANCELLED if pull.is_cancelled else PullOutcome.OK
        if outcome is PullOutcome.OK and pull.pairs:
            try:
                ids, announced = block_ids(pull.pairs), generations(pull.pairs)
                outcome = self._judge(ids[0], announced)
                if outcome is PullOutcome.OK:
                    kept_alive = self._copy.launch(ids, self._pool)
                    is_done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                    is_done.record()
                    return _Copy(pull, ids[0], announced, is_done, kept_alive)
            except Exception:
                # A pull that never reports would fence its memory for ever.
                _log.exception("a pull from %s could not be started", self._incarnation)
                outcome = PullOutcome.FAILED
                self._drain()
        pull.on_done(outcome)
        return None

    def _finish(self, copy: _Copy) -> None:
        """Wait for a copy and report it."""
        try:
            copy.is_done.synchronize()  # sleeps, and without the GIL
            outcome = self._judge(copy.source_ids, copy.announced)
        except RuntimeError:
            _log.exception("a pull from %s broke", self._incarnation)
            outcome = PullOutcome.FAILED
        copy.pull.on_done(PullOutcome.CANCELLED if copy.pull.is_cancelled else outcome)

    def _drain(self) -> None:
        """Nothing of a copy that half started may write once it is reported."""
        with contextlib.suppress(RuntimeError):  # a dead device writes nothing
            self._stream.synchronize()

    def _judge(
        self, source_ids: npt.NDArray[np.int64], announced: npt.NDArray[np.uint64]
    ) -> PullOutcome:
        """Whether the source's blocks are still what was announced."""
        if source_ids.min() < 0 or source_ids.max() >= self._num_source_blocks:
            _log.warning("a manifest names a block outside the source's pool")
            return PullOutcome.FAILED
        is_current = np.array_equal(self._generations.read_many(source_ids), announced)
        return PullOutcome.OK if is_current else PullOutcome.STALE
