"""Open windows onto sources' pools and copies in flight: what the puller's effects do outside.

    open ──────── thread: connect, canary, GB/s ──────────► post ──► WindowOpened, WindowFailed
    start_pull ── the window's thread: copy ──────────────► post ──► PullEnded
         └─────── prepared; poll until its step has written the blocks ─┘

What other threads find out comes back through `post`, on the engine loop's thread, where all else
here happens. Knows no request and no reservation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ...core.errors import HandoffFailed
from ...kv_transfer.protocol.events import (
    OpenWindow,
    PullEnded,
    PullerEvent,
    StartPull,
    WindowFailed,
    WindowOpened,
)
from ...kv_transfer.window.transport import PoolWindow, PullHandle, PullOutcome, Starter
from ...proto.v1 import node_pb2

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]


def on_a_thread(run: Callable[[], None]) -> None:
    """Run something that may block for a while."""
    threading.Thread(target=run, name="connect-window", daemon=True).start()


@dataclass(frozen=True, slots=True, eq=False)
class _PreparedPull:
    """A pull of what a step of the source is still writing, prepared."""

    pull: StartPull
    window: PoolWindow
    start: Starter

    @property
    def is_due(self) -> bool:
        """Whether the step has completed."""
        return self.pull.step <= (self.window.num_steps or 0)


@dataclass(eq=False)
class Windows:
    """All windows of one engine, at most one for a source. `_connect` may block and raises
    HandoffFailed; `_feed` gets what comes of it all."""

    _connect: Callable[[OpenWindow], PoolWindow]
    _post: Post
    _feed: Callable[[PullerEvent], None]
    _run_aside: Callable[[Callable[[], None]], None] = on_a_thread
    _opening: dict[str, OpenWindow] = field(default_factory=dict)  # by incarnation: may answer
    _windows: dict[str, PoolWindow] = field(default_factory=dict)
    _pulls: dict[tuple[str, int], PullHandle] = field(default_factory=dict)
    _prepared: list[_PreparedPull] = field(default_factory=list)

    def open(self, opening: OpenWindow) -> None:
        """Connect aside of the loop; answered once, unless it is closed before."""
        self._opening[opening.incarnation] = opening

        def connect() -> None:
            try:
                found: PoolWindow | HandoffFailed = self._connect(opening)
            except HandoffFailed as error:
                found = error
            except Exception as error:
                # The puller would wait for ever for an answer that does not come.
                log.exception("source %s: no window", opening.incarnation)
                found = HandoffFailed(f"{type(error).__name__}: {error}")
            self._post(partial(self._opened, opening, found))

        self._run_aside(connect)

    def _opened(self, opening: OpenWindow, found: PoolWindow | HandoffFailed) -> None:
        incarnation, link = opening.incarnation, opening.link
        if self._opening.get(incarnation) is not opening:
            if not isinstance(found, HandoffFailed):
                found.close()  # nobody waits for it any more
            return
        del self._opening[incarnation]
        if isinstance(found, HandoffFailed):
            self._feed(WindowFailed(incarnation, link, found))
            return
        self._windows[incarnation] = found
        log.info(
            "reads from source %s over %s at %.1f GB/s",
            incarnation,
            found.transport,
            found.gbytes_per_s,
        )
        self._feed(WindowOpened(incarnation, link, found.num_steps is not None))

    def close(self, incarnation: str) -> None:
        """Start no more pulls; those in flight end by themselves and report."""
        self.poll()  # what is finished is still worth having
        self._end_prepared(lambda pull: pull.incarnation == incarnation, PullOutcome.FAILED)
        self._opening.pop(incarnation, None)
        if window := self._windows.pop(incarnation, None):
            window.close()

    def start_pull(self, pull: StartPull) -> None:
        """Copy; reported exactly once, when nothing writes to the destination."""
        window = self._windows.get(pull.incarnation)
        if window is None:
            self._report(pull, PullOutcome.FAILED)
        elif pull.step > (window.num_steps or 0):
            self._prepare(window, pull)
        else:
            self._begin(pull, partial(window.start_pull, pull.pairs))

    def poll(self) -> bool:
        """Begin the pulls whose steps have completed; returns whether others wait for theirs."""
        for each in [each for each in self._prepared if each.is_due]:
            self._prepared.remove(each)
            self._begin(each.pull, each.start)
        return bool(self._prepared)

    def _prepare(self, window: PoolWindow, pull: StartPull) -> None:
        try:
            start = window.prepare(pull.pairs)
        except Exception as error:
            # A pull that never reports would fence its memory for ever.
            is_ours = not isinstance(error, HandoffFailed)
            log.error("no pull from source %s: %s", pull.incarnation, error, exc_info=is_ours)
            self._report(pull, PullOutcome.FAILED)
        else:
            self._prepared.append(_PreparedPull(pull, window, start))

    def _begin(self, pull: StartPull, start: Starter) -> None:
        name = (pull.transfer_id, pull.seq)

        def ended(outcome: PullOutcome) -> None:
            self._pulls.pop(name, None)
            self._feed(PullEnded(*name, outcome))

        self._pulls[name] = start(lambda outcome: self._post(partial(ended, outcome)))

    def cancel_pulls(self, transfer_id: str) -> None:
        """Hurry a transfer's copies to their end."""
        self._end_prepared(lambda pull: pull.transfer_id == transfer_id, PullOutcome.CANCELLED)
        for (of_transfer, _), handle in self._pulls.items():
            if of_transfer == transfer_id:
                handle.cancel()

    def _end_prepared(self, is_over: Callable[[StartPull], bool], outcome: PullOutcome) -> None:
        """Report those that have not begun as ended."""
        for each in [each for each in self._prepared if is_over(each.pull)]:
            self._prepared.remove(each)
            self._report(each.pull, outcome)

    def _report(self, pull: StartPull, outcome: PullOutcome) -> None:
        self._post(partial(self._feed, PullEnded(pull.transfer_id, pull.seq, outcome)))

    def transport_of(self, incarnation: str) -> str:
        """The name of the open window's transport, or nothing."""
        window = self._windows.get(incarnation)
        return "" if window is None else window.transport

    @property
    def num_pulls(self) -> int:
        """Copies in flight, or prepared."""
        return len(self._pulls) + len(self._prepared)

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
