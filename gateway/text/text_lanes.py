"""Where work on texts is done, so that long ones stop neither the event loop nor short ones.

    up to 2,000 characters   on the event loop: sooner done than a thread is woken
    up to 65,536             two threads
    longer                   one thread, one text after the other: memory for one at a time
What waits for a thread belongs to a call that was admitted, so its number is bounded; whoever gives
up while waiting is taken off. Only work that releases the interpreter belongs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_CHARS = 2000  # about a microsecond each
LONG_CHARS = 1 << 16

_T = TypeVar("_T")


class TextLanes:
    """Three lanes by length; use from one event loop."""

    def __init__(self) -> None:
        self._middle = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    async def run(self, length: int, work: Callable[[], _T]) -> _T:
        """What `work` of this length (characters, token ids) gives or raises."""
        if length <= INLINE_CHARS:
            return work()
        pool = self._middle if length <= LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Waits for what has begun."""
        self._middle.shutdown(cancel_futures=True)
        self._long.shutdown(cancel_futures=True)
