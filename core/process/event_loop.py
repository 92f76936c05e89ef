"""Which event loop a process runs on: uvloop where it is installed, else asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Like asyncio.run, of what `start` gives; it is called before there is a loop."""
    main = start()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None: asyncio's default."""
    try:
        import uvloop  # optional: the extra `fast`
    except ImportError:
        return None
    return uvloop.new_event_loop
