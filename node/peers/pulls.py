"""Copies out of sources' pools: what the puller's StartPull and CancelPull do outside.

    start ── the window's thread: copy ─────────────────► post ──► PullEnded
      └───── prepared; poll until its step has written the blocks ─┘

Belongs to the engine loop's thread; what windows' threads find out comes back through `post`. Knows
no request and no reservation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from ...core.errors import HandoffFailed
from ...kv_transfer.protocol.events import PullEnded, StartPull
from ...kv_transfer.window.transport import PoolWindow, PullHandle, PullOutcome, Starter

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]


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
class Pulls:
    """All of one engine, through its open windows, by incarnation of their sources. Each is
    reported to `_feed` exactly once, when nothing writes to its destination."""

    _windows: Mapping[str, PoolWindow]
    _post: Post
    _feed: Callable[[PullEnded], None]
    _begun: dict[tuple[str, int], PullHandle] = field(default_factory=dict)
    _prepared: list[_PreparedPull] = field(default_factory=list)

    def __len__(self) -> int:
        """Copies in flight, or prepared."""
        return len(self._begun) + len(self._prepared)

    def start(self, pull: StartPull) -> None:
        window = self._windows.get(pull.incarnation)
        if window is None:
            self._report(pull, PullOutcome.FAILED)
        elif pull.step > (window.num_steps or 0):
            self._prepare(window, pull)
        else:
            self._begin(pull, partial(window.start_pull, pull.pairs))

    @property
    def are_waiting(self) -> bool:
        """Whether some wait for steps of their sources, of which no message comes: `poll`, often,
        also while a step is on the device."""
        return bool(self._prepared)

    def poll(self) -> None:
        """Begin the pulls whose steps have completed."""
        for each in [each for each in self._prepared if each.is_due]:
            self._prepared.remove(each)
            self._begin(each.pull, each.start)

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
            self._begun.pop(name, None)
            self._feed(PullEnded(*name, outcome))

        self._begun[name] = start(lambda outcome: self._post(partial(ended, outcome)))

    def cancel(self, transfer_id: str) -> None:
        """Hurry a transfer's copies to their end."""
        self._end_prepared(lambda pull: pull.transfer_id == transfer_id, PullOutcome.CANCELLED)
        for (of_transfer, _), handle in self._begun.items():
            if of_transfer == transfer_id:
                handle.cancel()

    def close_source(self, incarnation: str) -> None:
        """Its window closes: begin no more, but what is finished is still worth having."""
        self.poll()
        self._end_prepared(lambda pull: pull.incarnation == incarnation, PullOutcome.FAILED)

    def _end_prepared(self, is_over: Callable[[StartPull], bool], outcome: PullOutcome) -> None:
        """Report those that have not begun as ended."""
        for each in [each for each in self._prepared if is_over(each.pull)]:
            self._prepared.remove(each)
            self._report(each.pull, outcome)

    def _report(self, pull: StartPull, outcome: PullOutcome) -> None:
        self._post(partial(self._feed, PullEnded(pull.transfer_id, pull.seq, outcome)))

    def transport_of(self, incarnation: str) -> str:
        """The name of the transport by which it is copied from this source now, or nothing."""
        window = self._windows.get(incarnation)
        return "" if window is None else window.transport
