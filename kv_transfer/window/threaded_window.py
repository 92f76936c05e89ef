"""Pulls that the window's own thread copies, one after another; each is reported exactly once.

start_pull ─► queue ─► the window's thread: copy_blocks ─► on_done      close ─► release
"""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from .block_pairs import BlockPairs
from .transport import PoolWindow, PullOutcome, failure


@dataclass(eq=False)
class Pull:
    """One pull; the handle that `start_pull` returns."""

    pairs: BlockPairs
    on_done: Callable[[PullOutcome], None]
    is_cancelled: bool = False
    started_s: float = field(default_factory=time.monotonic)

    def cancel(self) -> None:
        self.is_cancelled = True  # checked before the next piece


class PullThread(PoolWindow):
    """A window with a thread that copies, or waits for copies."""

    _is_closed = False

    def __init__(self, incarnation: str) -> None:
        """Start the thread. What `copy_blocks` uses must be initialised before."""
        self._incarnation = incarnation
        self._pulls: queue.SimpleQueue[Pull | None] = queue.SimpleQueue()
        name = f"kv-pull-{incarnation[:8]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def copy_blocks(self, pull: Pull) -> PullOutcome:
        """On the thread: copy until done or cancelled. If it raises, the pull has failed."""

    @abstractmethod
    def release(self) -> None:
        """On the thread, at its end: free what it used. All pulls are reported."""

    def start_pull(self, pairs: BlockPairs, on_done: Callable[[PullOutcome], None]) -> Pull:
        return self._put(Pull(pairs, on_done))

    def _put(self, pull: Pull) -> Pull:
        assert not self._is_closed, "a pull through a closed window"
        self._pulls.put(pull)
        return pull

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._pulls.put(None)

    def join(self) -> None:
        """Wait until a closed window has reported all its pulls and freed its memory."""
        self._thread.join()

    def _run(self) -> None:
        while (pull := self._pulls.get()) is not None:
            try:
                outcome = self.copy_blocks(pull)
            except Exception as error:
                outcome = failure(self._incarnation, error)
            pull.on_done(outcome)
        self.release()
