"""Windows onto sources' pools: executes OpenWindow and CloseWindow.

    open ──── thread: connect, canary, GB/s ────► post ──► WindowOpened, WindowFailed
                                                      └──► `pulls` copies through it, until `close`

Runs on the engine loop's thread; other threads return results through `post`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from ...core.errors import HandoffFailed
from ...kv_transfer.protocol.events import OpenWindow, PullerEvent, WindowFailed, WindowOpened
from ...kv_transfer.window.transport import PoolWindow
from ...proto.v1 import node_pb2
from .pulls import Post, Pulls

log = logging.getLogger(__name__)


def on_a_thread(run: Callable[[], None]) -> None:
    """Run a function that may block for a while."""
    threading.Thread(target=run, name="connect-window", daemon=True).start()


class Windows:
    """All windows of one engine, at most one for a source."""

    def __init__(
        self,
        connect: Callable[[OpenWindow], PoolWindow],
        post: Post,
        feed: Callable[[PullerEvent], None],
        run_aside: Callable[[Callable[[], None]], None] = on_a_thread,
    ) -> None:
        """`connect` may block and raises HandoffFailed; `feed` gets the resulting events."""
        self._connect, self._post, self._feed = connect, post, feed
        self._run_aside = run_aside
        self._opening: dict[str, OpenWindow] = {}  # by incarnation: no result yet, not closed
        self._windows: dict[str, PoolWindow] = {}
        self.pulls = Pulls(self._windows, post, feed)

    def open(self, opening: OpenWindow) -> None:
        """Connect on another thread. One event follows, unless the window is closed before."""
        self._opening[opening.incarnation] = opening

        def connect() -> None:
            try:
                found: PoolWindow | HandoffFailed = self._connect(opening)
            except HandoffFailed as error:
                found = error
            except Exception as error:
                # Without a result the puller would wait for ever.
                log.exception("source %s: no window", opening.incarnation)
                found = HandoffFailed(f"{type(error).__name__}: {error}")
            self._post(partial(self._opened, opening, found))

        self._run_aside(connect)

    def _opened(self, opening: OpenWindow, found: PoolWindow | HandoffFailed) -> None:
        incarnation = opening.incarnation
        if self._opening.get(incarnation) is not opening:
            if not isinstance(found, HandoffFailed):
                found.close()  # it was closed, or replaced, while it was opened
            return
        del self._opening[incarnation]
        if isinstance(found, HandoffFailed):
            self._feed(WindowFailed(incarnation, found))
            return
        self._windows[incarnation] = found
        log.info(
            "reads from source %s over %s at %.1f GB/s",
            incarnation,
            found.transport,
            found.gbytes_per_s,
        )
        self._feed(WindowOpened(incarnation, found.num_steps is not None))

    def close(self, incarnation: str) -> None:
        """Start no more pulls; pulls in flight end by themselves and report."""
        self.pulls.close_source(incarnation)
        self._opening.pop(incarnation, None)
        if window := self._windows.pop(incarnation, None):
            window.close()

    def links(self) -> tuple[node_pb2.PeerLink, ...]:
        """For the heartbeat: the sources that this engine can pull from."""
        return tuple(
            node_pb2.PeerLink(
                incarnation=incarnation,
                transport=window.transport,
                gbytes_per_s=window.gbytes_per_s,
            )
            for incarnation, window in self._windows.items()
        )
