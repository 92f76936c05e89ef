"""Open windows onto sources' pools and copies in flight: what the puller's effects do outside.

    open(incarnation) ── thread: connect, canary, GB/s ──► post ──► on_opened(error | None)
    start_pull(pull)  ── the window's thread: copy ──────► post ──► on_ended(outcome)

What other threads find out comes back through `post`, on the engine loop's thread, where all else
here happens. Knows no request and no reservation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ..core.errors import BatonError, HandoffFailed
from ..kv_transfer.events import StartPull
from ..kv_transfer.transport import (
    PoolWindow,
    PullHandle,
    PullOutcome,
    Transport,
    open_window,
)
from ..proto.v1 import node_pb2

log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]


def on_a_thread(run: Callable[[], None]) -> None:
    """Run something that may block for a while."""
    threading.Thread(target=run, name="connect-window", daemon=True).start()


class Windows:
    """All windows of one engine, at most one for a source."""

    def __init__(
        self,
        transports: Sequence[Transport],
        post: Post,
        run_aside: Callable[[Callable[[], None]], None] = on_a_thread,
    ) -> None:
        self._transports = transports
        self._post = post
        self._run_aside = run_aside
        self._attempts: dict[str, object] = {}  # incarnation -> the attempt that may still answer
        self._windows: dict[str, PoolWindow] = {}
        self._pulls: dict[tuple[str, int], PullHandle] = {}

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
        self._attempts.pop(incarnation, None)
        if window := self._windows.pop(incarnation, None):
            window.close()

    def start_pull(self, pull: StartPull, on_ended: Callable[[PullOutcome], None]) -> None:
        """Copy; `on_ended` is called exactly once, when nothing writes to the destination."""
        name = (pull.transfer_id, pull.seq)
        window = self._windows.get(pull.incarnation)
        if window is None:
            self._post(lambda: on_ended(PullOutcome.FAILED))
            return

        def ended(outcome: PullOutcome) -> None:
            self._pulls.pop(name, None)
            on_ended(outcome)

        self._pulls[name] = window.start_pull(
            pull.pairs, lambda outcome: self._post(lambda: ended(outcome))
        )

    def cancel_pulls(self, transfer_id: str) -> None:
        """Hurry a transfer's copies to their end."""
        for (of_transfer, _), handle in self._pulls.items():
            if of_transfer == transfer_id:
                handle.cancel()

    def transport_of(self, incarnation: str) -> str:
        """The name of the open window's transport, or nothing."""
        window = self._windows.get(incarnation)
        return "" if window is None else window.transport

    @property
    def num_pulls(self) -> int:
        """Copies in flight."""
        return len(self._pulls)

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
