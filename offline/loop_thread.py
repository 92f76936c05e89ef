"""An event loop in a thread of its own, for callers who have none, or one of theirs (notebooks).

A Ctrl-C reaches the caller's thread alone: what runs here is cancelled between two steps of the
event loop, in the middle of one only where it says that it may be (`long_step`).
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..core.errors import BatonError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._guard = threading.Lock()
        self._is_in_long_step = False
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What it returns or raises; if the caller is interrupted meanwhile, it is cancelled.

        Raises BatonError in a process that was forked off: threads stay behind.
        """
        if not self._thread.is_alive():
            work.close()
            raise BatonError("a fork cannot use its parent's LLM: make one in this process")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            self._end_long_step()
            raise

    @contextmanager
    def long_step(self) -> Iterator[None]:
        """For work to have around what holds up the event loop: if its caller is interrupted, that
        ends by CancelledError, between any two of its instructions."""
        with self._guard:
            self._is_in_long_step = True
        try:
            yield
        finally:
            with self._guard:
                self._is_in_long_step = False

    def _end_long_step(self) -> None:
        with self._guard:
            if self._is_in_long_step and self._thread.ident is not None:
                thread_id = ctypes.c_ulong(self._thread.ident)
                error = ctypes.py_object(asyncio.CancelledError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, error)

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Cancel what runs, call `last` once it has ended, and wait for the thread's end; in the
        thread itself, where the garbage collector may call this, nobody waits. A process that was
        forked off has nothing to end."""
        if not self._thread.is_alive():
            return
        if threading.current_thread() is self._thread:
            ending = self._loop.create_task(_end_others(last))
            ending.add_done_callback(lambda _: self._loop.stop())
            return
        try:
            asyncio.run_coroutine_threadsafe(_end_others(last), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


async def _end_others(last: Callable[[], None] | None) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if last is not None:
        last()
