"""Copies out of sources' pools: executes StartPull and CancelPull.

    start ── the window's thread: copy ─────────────────► post ──► PullEnded
      └───── prepared; poll until its step has written the blocks ─┘

Runs on the engine loop's thread; windows' threads return results through `post`. Knows no request
and no reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from ...kv_transfer.protocol.events import PullEnded, StartPull
from ...kv_transfer.window.transport import PoolWindow, PullHandle, PullOutcome, Starter, failure

Post = Callable[[Callable[[], None]], None]


@dataclass(eq=False)
class Pulls:
    """All pulls of one engine, through its open windows (by incarnation of their sources). Each is
    reported to `_feed` exactly once, when nothing writes to its destination any more.

    `_begun`, `_prepared`: by transfer and number; a step of the source still writes the blocks of
    prepared ones.
    """

    _windows: Mapping[str, PoolWindow]
    _post: Post
    _feed: Callable[[PullEnded], None]
    _begun: dict[tuple[str, int], PullHandle] = field(default_factory=dict)
    _prepared: dict[tuple[str, int], tuple[StartPull, Starter]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Pulls in flight or prepared."""
        return len(self._begun) + len(self._prepared)

    def start(self, pull: StartPull) -> None:
        window = self._windows.get(pull.incarnation)
        if window is None:
            self._report(pull, PullOutcome.FAILED)
        elif self._is_written(pull):
            self._begin(pull, partial(window.start_pull, pull.pairs))
        else:
            try:
                start = window.prepare(pull.pairs)
            except Exception as error:
                self._report(pull, failure(pull.incarnation, error))
            else:
                self._prepared[pull.transfer_id, pull.seq] = pull, start

    @property
    def are_waiting(self) -> bool:
        """Whether pulls wait for steps of their sources. No message reports those: call `poll`
        often, also while a step is on the device."""
        return bool(self._prepared)

    def poll(self) -> None:
        """Start the prepared pulls whose steps have completed."""
        for name, (pull, start) in [*self._prepared.items()]:
            if self._is_written(pull):
                del self._prepared[name]
                self._begin(pull, start)

    def _is_written(self, pull: StartPull) -> bool:
        """Whether the step that writes the blocks, if any, has completed."""
        return not pull.step or pull.step <= (self._windows[pull.incarnation].num_steps or 0)

    def _begin(self, pull: StartPull, start: Starter) -> None:
        self._begun[pull.transfer_id, pull.seq] = start(partial(self._report, pull))

    def cancel(self, transfer_id: str) -> None:
        """End a transfer's pulls as soon as possible."""
        self._end_prepared(lambda pull: pull.transfer_id == transfer_id, PullOutcome.CANCELLED)
        for (of_transfer, _), handle in self._begun.items():
            if of_transfer == transfer_id:
                handle.cancel()

    def close_source(self, incarnation: str) -> None:
        """The source's window closes: start only the pulls whose steps have completed by now."""
        self.poll()
        self._end_prepared(lambda pull: pull.incarnation == incarnation, PullOutcome.FAILED)

    def _end_prepared(self, is_over: Callable[[StartPull], bool], outcome: PullOutcome) -> None:
        """Report prepared pulls as ended."""
        for name, (pull, _) in [*self._prepared.items()]:
            if is_over(pull):
                del self._prepared[name]
                self._report(pull, outcome)

    def _report(self, pull: StartPull, outcome: PullOutcome) -> None:
        """Any thread may call it."""
        self._post(partial(self._ended, pull, outcome))

    def _ended(self, pull: StartPull, outcome: PullOutcome) -> None:
        self._begun.pop((pull.transfer_id, pull.seq), None)
        self._feed(PullEnded(pull.transfer_id, pull.seq, outcome))

    def transport_of(self, incarnation: str) -> str:
        """The name of the transport to this source; empty if no window is open."""
        window = self._windows.get(incarnation)
        return "" if window is None else window.transport
