"""What this engine pulls from others: hand-offs, for which a role waits, and prefixes.

    Puller ─┬─► StartPull, OpenWindow ─► windows ─► copies
            └─► Reserve, Complete, Failed, DropReservation ─► a receiver: `handoffs`, of the role,
                                                              or `fetches`, of prefixes

Glue: `kv_transfer.protocol.puller` decides about transfers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from ...core.errors import BatonError
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
    PeerLinked,
    PeerLost,
    PeerMessage,
    PullEnded,
    PullerEffect,
    PullerEvent,
    Reserve,
    Send,
    StartPull,
    WindowFailed,
    WindowOpened,
)
from ...kv_transfer.protocol.messages import Hello, Message
from ...kv_transfer.protocol.puller import Puller
from ...kv_transfer.window.network_address import Routes
from ...kv_transfer.window.transport import PullOutcome
from ..channels.engine_channels import Link
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


@dataclass(eq=False)
class PullerSide:
    """`machine` decides; `handoffs` is set where there are any."""

    machine: Puller
    windows: Windows
    _routes: Routes
    _outbox: Outbox
    fetches: PrefixFetches
    handoffs: Receiver | None = None

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

    # -- sources -------------------------------------------------------------------------------

    def linked(self, link: Link) -> None:
        self._routes.linked(link.name, link.host)
        self.feed(PeerLinked(link.name, link.opens_late))

    def message(self, incarnation: str, message: Message) -> None:
        if isinstance(message, Hello):
            self._routes.set_access(incarnation, message.access)
        self.feed(PeerMessage(incarnation, message))

    def lost(self, incarnation: str) -> None:
        self._routes.lost(incarnation)
        self.feed(PeerLost(incarnation))

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
                self._start_pull(effect)
            case CancelPull(transfer_id):
                self.windows.cancel_pulls(transfer_id)
            case OpenWindow(incarnation, link):
                self._open_window(incarnation, link)
            case CloseWindow(incarnation):
                self.windows.close(incarnation)
            case ClosePeer(incarnation, error):
                log.warning("refused source %s: %s", incarnation, error.message)
                self._outbox.close_peer(Kind.SOURCE, incarnation, error)
            case Reserve() | Complete() | Failed() | DropReservation():
                is_prefix = effect.transfer_id in self.fetches.by_transfer
                self._pass_on(effect, self.fetches if is_prefix else self.handoffs)
            case _:
                assert_never(effect)

    @staticmethod
    def _pass_on(
        effect: Reserve | Complete | Failed | DropReservation, receiver: Receiver | None
    ) -> None:
        assert receiver is not None, "nothing is handed off to this engine"
        match effect:
            case Reserve(transfer_id, key):
                receiver.reserve(transfer_id, key)
            case Complete():
                receiver.complete(effect)
            case Failed():
                receiver.failed(effect)
            case DropReservation(transfer_id):
                receiver.dropped(transfer_id)

    def _open_window(self, incarnation: str, link: int) -> None:
        def opened(error: BatonError | None) -> None:
            if error is None:
                sees_steps = self.windows.sees_steps(incarnation)
                self.feed(WindowOpened(incarnation, link, sees_steps))
            else:
                self.feed(WindowFailed(incarnation, link, error))

        self.windows.open(incarnation, opened)

    def _start_pull(self, pull: StartPull) -> None:
        def ended(outcome: PullOutcome) -> None:
            self.feed(PullEnded(pull.transfer_id, pull.seq, outcome))

        self.windows.start_pull(pull, ended)
