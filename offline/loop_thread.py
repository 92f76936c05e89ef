"""An event loop in its own thread, for callers with none, or with their own (notebooks).

Ctrl-C only reaches the caller's thread: the coroutine is then cancelled between two steps of the
event loop, or within a step marked by `long_step`.
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
        """Returns or raises what `work` does; cancels it if the caller is interrupted.

        Raises BatonError in a forked process, which does not have the thread.
        """
        if not self._thread.is_alive():
            work.close()
            raise BatonError(
                "a forked process cannot use its parent's LLM: create one in this process"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            self._end_long_step()
            raise

    @contextmanager
    def long_step(self) -> Iterator[None]:
        """Put it around code that blocks the event loop: if the caller is interrupted, the code
        gets a CancelledError, between any two of its instructions."""
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
        """Cancel running work, call `last` once it has ended, and wait until the thread ends;
        without waiting if called in the thread itself (by the garbage collector). Does nothing in a
        forked process."""
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
