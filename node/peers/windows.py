"""Open windows onto sources' pools and copies in flight: what the puller's effects do outside.

    open(incarnation) ── thread: connect, canary, GB/s ──► post ──► on_opened(error | None)
    start_pull(pull)  ── the window's thread: copy ──────► post ──► on_ended(outcome)
                  └───── prepared; poll until its step has written the blocks ─┘

What other threads find out comes back through `post`, on the engine loop's thread, where all else
here happens. Knows no request and no reservation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...core.errors import BatonError, HandoffFailed
from ...kv_transfer.protocol.events import StartPull
from ...kv_transfer.window.transport import (
    PoolWindow,
    PullHandle,
    PullOutcome,
    Starter,
    Transport,
    open_window,
)
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
    on_ended: Callable[[PullOutcome], None]

    @property
    def is_due(self) -> bool:
        """Whether the step has completed."""
        return self.pull.step <= (self.window.num_steps or 0)


@dataclass(eq=False)
class Windows:
    """All windows of one engine, at most one for a source."""

    _transports: Sequence[Transport]
    _post: Post
    _run_aside: Callable[[Callable[[], None]], None] = on_a_thread
    _attempts: dict[str, object] = field(default_factory=dict)  # by incarnation: may still answer
    _windows: dict[str, PoolWindow] = field(default_factory=dict)
    _pulls: dict[tuple[str, int], PullHandle] = field(default_factory=dict)
    _prepared: list[_PreparedPull] = field(default_factory=list)

    def open(self, incarnation: str, on_opened: Callable[[BatonError | None], None]) -> None:
        """Connect aside of the loop; answered once, unless it is closed before."""
        attempt = self._attempts[incarnation] = object()

        def answer(window: PoolWindow | None, error: BatonError | None) -> None:
            if self._attempts.get(incarnation) is not attempt:
                if window is not None:
                    window.close()  # nobody waits for it any more
                return
            del self._attempts[incarnation]
            if window is not None:
                self._windows[incarnation] = window
                log.info(
                    "reads from source %s over %s at %.1f GB/s",
                    incarnation,
                    window.transport,
                    window.gbytes_per_s,
                )
            on_opened(error)

        def connect() -> None:
            try:
                window = open_window(self._transports, incarnation)
            except HandoffFailed as failure:
                error = failure  # `failure` ends with this block
                self._post(lambda: answer(None, error))
            else:
                self._post(lambda: answer(window, None))

        self._run_aside(connect)

    def close(self, incarnation: str) -> None:
        """Start no more pulls; those in flight end by themselves and report."""
        self.poll()  # what is finished is still worth having
        self._end_prepared(lambda pull: pull.incarnation == incarnation, PullOutcome.FAILED)
        self._attempts.pop(incarnation, None)
        if window := self._windows.pop(incarnation, None):
            window.close()

    def start_pull(self, pull: StartPull, on_ended: Callable[[PullOutcome], None]) -> None:
        """Copy; `on_ended` is called exactly once, when nothing writes to the destination."""
        window = self._windows.get(pull.incarnation)
        if window is None:
            self._post(lambda: on_ended(PullOutcome.FAILED))
        elif pull.step > (window.num_steps or 0):
            self._prepare(window, pull, on_ended)
        else:
            self._begin(pull, partial(window.start_pull, pull.pairs), on_ended)

    def poll(self) -> bool:
        """Begin the pulls whose steps have completed; returns whether others wait for theirs."""
        for each in [each for each in self._prepared if each.is_due]:
            self._prepared.remove(each)
            self._begin(each.pull, each.start, each.on_ended)
        return bool(self._prepared)

    def _prepare(
        self, window: PoolWindow, pull: StartPull, on_ended: Callable[[PullOutcome], None]
    ) -> None:
        try:
            start = window.prepare(pull.pairs)
        except Exception as error:
            # A pull that never reports would fence its memory for ever.
            is_ours = not isinstance(error, HandoffFailed)
            log.error("no pull from source %s: %s", pull.incarnation, error, exc_info=is_ours)
            self._post(lambda: on_ended(PullOutcome.FAILED))
        else:
            self._prepared.append(_PreparedPull(pull, window, start, on_ended))

    def _begin(
        self, pull: StartPull, start: Starter, on_ended: Callable[[PullOutcome], None]
    ) -> None:
        name = (pull.transfer_id, pull.seq)

        def ended(outcome: PullOutcome) -> None:
            self._pulls.pop(name, None)
            on_ended(outcome)

        self._pulls[name] = start(lambda outcome: self._post(lambda: ended(outcome)))

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
            self._post(partial(each.on_ended, outcome))

    def sees_steps(self, incarnation: str) -> bool:
        """Whether the open window shows when the source's steps complete."""
        return self._windows[incarnation].num_steps is not None

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
