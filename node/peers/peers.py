"""Executes the effects of an engine's `Source` and `Puller`: messages, copies, and calls of a role.

    Attach, Renew, Release ─► Source ─┬─► manifests; blocks back ─► `on_release` of a role
                                      └─► PinPrefix ─► `prefixes`

    Manifest, Revoked ──────► Puller ─┬─► OpenWindow ─► windows; StartPull ─► pulls
                                      └─► Reserve, Complete, Failed, DropReservation ─► a receiver:
                                          `handoffs` (a role) or `prefixes`

Decides nothing: `kv_transfer.protocol` decides about leases and transfers, the engine about blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, assert_never

from ...core.errors import BatonError
from ...core.ports import Clock
from ...kv_transfer.protocol import events
from ...kv_transfer.protocol.ledger import ledger
from ...kv_transfer.protocol.messages import Message, Refused
from ...kv_transfer.protocol.puller import Puller
from ...kv_transfer.protocol.source import Source
from ..channels.engine_channels import EngineChannels
from ..channels.links import Kind
from .prefixes import LOAN_KEY, Prefixes
from .windows import Windows

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Processes the results of transfers into this engine: hand-offs, or prefixes."""

    def reserve(self, key: str) -> None: ...

    def complete(self, complete: events.Complete) -> None: ...

    def failed(self, failed: events.Failed) -> None: ...

    def dropped(self, dropped: events.DropReservation) -> None: ...


class Peers:
    """The peers of one engine.

    `on_release` is called with the key of each request whose hand-off to another engine is over,
    and with the error if it failed. `handoffs` is set if requests are handed off to this engine.
    """

    def __init__(
        self,
        source: Source,
        puller: Puller,
        make_windows: Callable[[Callable[[events.PullerEvent], None]], Windows],
        channels: EngineChannels,
        flush_gateways: Callable[[], None],
        make_prefixes: Callable[[Callable[[events.PullerEvent], None]], Prefixes],
        clock: Clock,
    ) -> None:
        """`make_windows` and `make_prefixes` get the function for their events; `flush_gateways`
        sends the outputs queued for gateways."""
        self._source, self._puller = source, puller
        self.windows = make_windows(self.feed_puller)
        self.pulls = self.windows.pulls
        self._channels, self._flush_gateways = channels, flush_gateways
        self.prefixes = make_prefixes(self.feed_puller)
        self._clock = clock
        self.on_release: Callable[[str, BatonError | None], None] = lambda key, error: None
        self.handoffs: Receiver | None = None
        # Where events of a peer's link go, by the peer's kind.
        self.feeds: Mapping[Kind, Callable[[events.PeerEvent], None]] = {
            Kind.PULLER: self.feed_source,
            Kind.SOURCE: self.feed_puller,
        }

    # -- transfers out of this engine ----------------------------------------------------------

    def feed_source(self, event: events.SourceEvent) -> None:
        for effect in self._source.handle(event):
            match effect:
                case events.Send(puller, message):
                    self._to_peer(Kind.PULLER, puller, message)
                case events.PinPrefix():
                    for answer in self.prefixes.lend(effect):
                        self.feed_source(answer)
                case events.ReleaseBlocks(transfer_id, key, error):
                    if key == LOAN_KEY:
                        self.prefixes.take_back(transfer_id)
                    else:
                        self.on_release(key, error)
                case _:
                    assert_never(effect)

    # -- transfers into this engine ------------------------------------------------------------

    def feed_puller(self, event: events.PullerEvent) -> None:
        for effect in self._puller.handle(event):
            match effect:
                case events.Send(source, message):
                    self._to_peer(Kind.SOURCE, source, message)
                case events.StartPull():
                    self.pulls.start(effect)
                case events.CancelPull(transfer_id):
                    self.pulls.cancel(transfer_id)
                case events.OpenWindow():
                    self.windows.open(effect)
                case events.CloseWindow(incarnation):
                    self.windows.close(incarnation)
                case events.Reserve(transfer_id, key):
                    self._receiver(transfer_id).reserve(key)
                case events.Complete(transfer_id):
                    self._receiver(transfer_id).complete(effect)
                case events.Failed(transfer_id):
                    self._receiver(transfer_id).failed(effect)
                case events.DropReservation(transfer_id):
                    self._receiver(transfer_id).dropped(effect)
                case _:
                    assert_never(effect)

    def _receiver(self, transfer_id: str) -> Receiver:
        if transfer_id in self.prefixes.by_transfer:
            return self.prefixes
        assert self.handoffs is not None, "nothing is handed off to this engine"
        return self.handoffs

    # -- both ----------------------------------------------------------------------------------

    def _to_peer(self, kind: Kind, peer: str, message: Message | Refused) -> None:
        """Send to gateways first: the error of a request must reach its gateway from the engine
        where it occurred, before the peer reports that the transfer was cancelled."""
        self._flush_gateways()
        if isinstance(message, Refused):
            log.warning("refused %s %s: %s", kind.value, peer, message.error.message)
        self._channels.to_peer(kind, peer, message)

    def tick(self) -> float:
        """Expire what is due. Returns the next deadline on the monotonic clock; inf: none."""
        now_s = self._clock.monotonic_s()
        if self._source.next_deadline_s() <= now_s:
            self.feed_source(events.Tick())
        if self._puller.next_deadline_s() <= now_s:
            self.feed_puller(events.Tick())
        return min(self._source.next_deadline_s(), self._puller.next_deadline_s())

    @property
    def is_idle(self) -> bool:
        """No prefix is lent, and no transfer into this engine is open."""
        return not (self.prefixes.loans or self._puller.transfers)

    def ledger(self) -> dict[str, object]:
        """The transfers of both sides and their peers, JSON-able."""
        return ledger(self._source, self._puller, self._clock.monotonic_s())
