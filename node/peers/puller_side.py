"""What this engine pulls from others: hand-offs, for which a role waits, and prefixes.

    Puller ─┬─► StartPull, OpenWindow ─► windows ─► copies
            └─► Reserve, Complete, Failed, DropReservation ─► a receiver: `handoffs`, of the role,
                                                              or `fetches`, of prefixes

Glue: `kv_transfer.protocol.puller` decides about transfers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, assert_never

from ...core.request.request import Request
from ...kv_transfer.protocol.events import (
    CancelPull,
    ClosePeer,
    CloseWindow,
    Complete,
    DropReservation,
    Failed,
    IntentCancelled,
    OpenWindow,
    PullerEffect,
    PullerEvent,
    Reserve,
    Send,
    StartPull,
)
from ...kv_transfer.protocol.puller import Puller
from ..channels.mailboxes import Kind, Outbox
from .prefix_fetches import PrefixFetches
from .windows import Windows

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who takes up what is pulled: a hand-off to this engine, or a prefix."""

    def reserve(self, transfer_id: str, key: str) -> None: ...

    def complete(self, complete: Complete) -> None: ...

    def failed(self, failed: Failed) -> None: ...

    def dropped(self, transfer_id: str) -> None: ...


class PullerSide:
    """`machine` decides; `handoffs` is set where there are any."""

    def __init__(
        self,
        machine: Puller,
        make_windows: Callable[[Callable[[PullerEvent], None]], Windows],
        outbox: Outbox,
        fetches: PrefixFetches,
    ) -> None:
        """`make_windows` is told whom to feed."""
        self.machine = machine
        self.windows = make_windows(self.feed)
        self._outbox = outbox
        self.fetches = fetches
        self.handoffs: Receiver | None = None

    @property
    def is_idle(self) -> bool:
        return not (self.fetches.by_transfer or self.windows.num_pulls)

    # -- prefixes ------------------------------------------------------------------------------

    def fetch(self, request: Request, on_over: Callable[[], None]) -> bool:
        """Pull the prefix that the request names; False: it is to be computed at once.

        `on_over` is called once, when the prefix is here or will not come, unless `forget` is.
        """
        if request.prefix_source is None:
            return False
        if not self.machine.is_linked(request.prefix_source.incarnation):
            self.fetches.not_linked()
            return False
        intended = self.fetches.plan(request, on_over)
        if intended is not None:
            self.feed(intended)
        return intended is not None

    def forget(self, key: str, is_open: Callable[[str], bool]) -> None:
        """The request is over. If a prefix is awaited for it, and for no other sample of its prompt
        that `is_open`, it is not any more."""
        if (transfer_id := self.fetches.abandoned_by(key, is_open)) is not None:
            self.feed(IntentCancelled(transfer_id))

    # -- effects -------------------------------------------------------------------------------

    def feed(self, event: PullerEvent) -> None:
        """A `Reserve` comes last: its answer may be fed."""
        for effect in self.machine.handle(event):
            self._apply(effect)

    def _apply(self, effect: PullerEffect) -> None:
        match effect:
            case Send(incarnation, message):
                self._outbox.to_peer(Kind.SOURCE, incarnation, message)
            case StartPull():
                self.windows.start_pull(effect)
            case CancelPull(transfer_id):
                self.windows.cancel_pulls(transfer_id)
            case OpenWindow():
                self.windows.open(effect)
            case CloseWindow(incarnation):
                self.windows.close(incarnation)
            case ClosePeer(incarnation, error):
                log.warning("refused source %s: %s", incarnation, error.message)
                self._outbox.close_peer(Kind.SOURCE, incarnation, error)
            case Reserve(transfer_id, key):
                self._receiver(transfer_id).reserve(transfer_id, key)
            case Complete(transfer_id):
                self._receiver(transfer_id).complete(effect)
            case Failed(transfer_id):
                self._receiver(transfer_id).failed(effect)
            case DropReservation(transfer_id):
                self._receiver(transfer_id).dropped(transfer_id)
            case _:
                assert_never(effect)

    def _receiver(self, transfer_id: str) -> Receiver:
        if transfer_id in self.fetches.by_transfer:
            return self.fetches
        assert self.handoffs is not None, "nothing is handed off to this engine"
        return self.handoffs
