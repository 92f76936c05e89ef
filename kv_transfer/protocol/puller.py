"""The puller's side of the hand-off: which KV is being pulled, and when it may be used.

Owns intents, pulls in flight and lease renewal; decides when a request may start. Knows no memory,
stream or thread: `handle` maps events to effects, which `node.peers` executes.
"""

from __future__ import annotations

import math
from typing import assert_never

from ...core.errors import BatonError, Cancelled, HandoffFailed, UnknownTransfer
from ...core.ports import Clock
from ...engine.kv.block_pool import Reservation
from ..window.block_pairs import BlockPairs
from ..window.transport import PullOutcome
from . import events
from .handoff_side import HandoffSide
from .messages import Attach, Hello, Manifest, Message, Release, Renew, Revoked
from .pairing import Pair, PairState
from .puller_transfer import PullerState, PullerTransfer

_COMPLETED = UnknownTransfer("the transfer is over: it completed")
RELINK_WAIT_S = 0.3  # the dialler retries a link that ended after 0.1 s


class Puller(HandoffSide[PullerTransfer, events.PullEvent, events.PullEffect]):
    """All transfers into one engine.

    `link_wait_s` bounds how long an intent waits for a pair that is not ready. If the link ended
    less than that ago, it waits only `RELINK_WAIT_S`: the gateway did not know yet of the end.
    """

    _peer = "source"

    def __init__(self, hello: Hello, clock: Clock, link_wait_s: float) -> None:
        super().__init__(hello, clock)
        self._link_wait_s = link_wait_s
        self._ended_s: dict[str, float] = {}  # when recent links ended, by source

    def _on_event(self, event: events.PullEvent) -> None:
        match event:
            case events.PullEnded(transfer_id, seq, outcome):
                self._on_pull_ended(transfer_id, seq, outcome)
            case events.Intended():
                self._on_intended(event)
            case events.IntentCancelled(transfer_id):
                if (transfer := self.transfers.get(transfer_id)) is not None:
                    self._end(transfer, None)
            case events.Reserved(transfer_id, reservation):
                self._on_reserved(transfer_id, reservation)
            case events.WindowOpened(source, sees_steps):
                if (pair := self.pairs.get(source)) is not None:
                    pair.state, pair.sees_steps = PairState.READY, sees_steps
                    for transfer in self.transfers.values():
                        if transfer.source == source and transfer.state is PullerState.WAITING:
                            self._attach(transfer, pair)
            case events.WindowFailed(source, error):
                self.tombstones.add(source, error)
                self._refuse(source, error)
            case _:
                assert_never(event)

    def is_linked(self, incarnation: str) -> bool:
        """Whether a stream to this source is open, and its window has not failed recently."""
        self.tombstones.purge()
        return incarnation in self.pairs and self.tombstones.get(incarnation) is None

    def next_deadline_s(self) -> float:
        """When a transfer ends, or a lease must be renewed."""
        return min([super().next_deadline_s(), *(t.renewal_s for t in self.transfers.values())])

    # ---- the gateway's and the engine's side

    def _on_intended(self, intent: events.Intended) -> None:
        transfer_id = intent.ticket.transfer_id
        refusal = self._refusal(intent)
        if refusal is not None:
            self._effects.append(events.Failed(transfer_id, intent.key, refusal))
            if intent.reserved is not None:
                self._effects.append(events.DropReservation(transfer_id, intent.reserved))
            return
        now_s, source = self._clock.monotonic_s(), intent.ticket.source_incarnation
        has_just_ended = self._ended_s.get(source, -math.inf) > now_s - self._link_wait_s
        link_by_s = now_s + (RELINK_WAIT_S if has_just_ended else self._link_wait_s)
        until_s = min(link_by_s, intent.deadline_s)
        transfer = PullerTransfer(intent, until_s, reservation=intent.reserved)
        self.transfers[transfer_id] = transfer
        pair = self.pairs.get(source)
        if pair is not None and pair.state is PairState.READY:
            self._attach(transfer, pair)
        elif pair is not None and pair.state is PairState.MATCHED:
            self._on_matched(source, pair)

    def _refusal(self, intent: events.Intended) -> BatonError | None:
        if intent.ticket.puller_incarnation != self._hello.incarnation:
            return UnknownTransfer("the ticket names another incarnation of this puller")
        if intent.ticket.transfer_id in self.transfers:
            return HandoffFailed("the ticket is in use by another request")
        return self.tombstones.get(intent.ticket.transfer_id)

    def _attach(self, transfer: PullerTransfer, pair: Pair) -> None:
        intent = transfer.intent
        transfer.state, transfer.expires_s = PullerState.ATTACHED, intent.deadline_s
        wanted = () if intent.reserved is None else tuple(intent.block_hashes)
        self._send(transfer.source, Attach(intent.ticket.transfer_id, pair.sees_steps, wanted))

    def _on_reserved(self, transfer_id: str, reservation: Reservation) -> None:
        transfer = self.transfers.get(transfer_id)
        if transfer is None:  # it ended before it had blocks
            self._effects.append(events.DropReservation(transfer_id, reservation))
            return
        assert transfer.state is PullerState.QUEUED
        assert len(reservation.block_ids) >= transfer.intent.num_blocks
        transfer.reservation = reservation
        self._pull(transfer, reservation)

    def _pull(self, transfer: PullerTransfer, reservation: Reservation) -> None:
        """Pull the blocks announced so far, except those that the local prefix cache holds."""
        transfer.state = PullerState.PULLING
        manifests, transfer.unpulled = transfer.unpulled, []
        for first, manifest in manifests:
            seq, sources = manifest.seq, manifest.blocks
            num_cached = max(0, reservation.num_cached_blocks - first)
            if num_cached >= len(sources):
                continue
            ours = reservation.block_ids[first : first + len(sources)]
            pairs = BlockPairs.join(sources, ours)[num_cached:]
            transfer.in_flight.add(seq)
            self._effects.append(
                events.StartPull(transfer.transfer_id, seq, transfer.source, pairs, manifest.step)
            )
        self._complete_if_done(transfer)

    def _on_pull_ended(self, transfer_id: str, seq: int, outcome: PullOutcome) -> None:
        transfer = self.transfers.get(transfer_id)
        if transfer is None or seq not in transfer.in_flight:
            return
        transfer.in_flight.remove(seq)
        if transfer.state is PullerState.ENDING:
            self._bury_if_still(transfer)
        elif outcome is PullOutcome.OK:
            self._complete_if_done(transfer)
        else:
            self._end(transfer, transfer.failure(outcome))

    # ---- the source's side

    def _on_message(self, source: str, message: Message) -> None:
        match message:
            case Manifest():
                self._on_manifest(source, message)
            case Revoked(transfer_id, error):
                if (transfer := self._attached(source, transfer_id)) is not None:
                    self._end(transfer, error, notify=False)
            case _:
                raise HandoffFailed("a source sent what only pullers send")

    def _on_linked(self, source: str) -> None:
        self._ended_s.pop(source, None)
        self._send(source, self._hello)

    def _on_matched(self, source: str, pair: Pair) -> None:
        """Open the window, now or for the first transfer."""
        transfers = self.transfers.values()
        if not pair.opens_late or any(t.source == source for t in transfers):
            pair.state = PairState.OPENING
            self._effects.append(events.OpenWindow(source, pair.host, pair.access))

    def _attached(self, source: str, transfer_id: str) -> PullerTransfer | None:
        """The transfer, if messages of this source about it count."""
        transfer = self.transfers.get(transfer_id)
        if transfer is None or transfer.source != source:
            return None
        return None if transfer.state in (PullerState.WAITING, PullerState.ENDING) else transfer

    def _on_manifest(self, source: str, manifest: Manifest) -> None:
        transfer = self._attached(source, manifest.transfer_id)
        if transfer is None:
            return
        try:
            if manifest.step and not self.pairs[source].sees_steps:
                raise HandoffFailed("a chunk was announced before its end, which is not seen here")
            if not transfer.accept(manifest):
                return
        except HandoffFailed as error:
            self._end(transfer, error)
            return
        transfer.start_lease(manifest.lease_remaining_s, self._clock.monotonic_s())
        if transfer.reservation is not None:
            self._pull(transfer, transfer.reservation)
        elif transfer.state is PullerState.ATTACHED:
            transfer.state = PullerState.QUEUED
            self._effects.append(events.Reserve(transfer.transfer_id, transfer.intent.key))

    def _on_lost(self, source: str, pair: Pair | None, error: BatonError) -> None:
        """A transfer whose last chunk is being copied may still complete: generations decide."""
        for transfer in [t for t in self.transfers.values() if t.source == source]:
            if transfer.state is PullerState.PULLING and transfer.handoff is not None:
                transfer.is_orphaned = True
                transfer.renewal_s = math.inf
            else:
                self._end(transfer, error, notify=False)
        if pair is not None and pair.state in (PairState.OPENING, PairState.READY):
            self._effects.append(events.CloseWindow(source))
            now_s = self._clock.monotonic_s()
            recent = {s: at for s, at in self._ended_s.items() if at > now_s - self._link_wait_s}
            self._ended_s = recent | {source: now_s}

    # ---- time

    def _on_tick(self, now_s: float) -> None:
        """Also renew all leases at one source in one message, when the first of them is due."""
        super()._on_tick(now_s)
        transfers = self.transfers.values()
        due = [t for t in transfers if t.renewal_s <= now_s]
        for source in dict.fromkeys(t.source for t in due):
            leased = [t for t in transfers if t.source == source and t.renewal_s < math.inf]
            for transfer in leased:
                transfer.renewal_s = now_s + transfer.renewal_interval_s
            self._send(source, Renew(tuple(t.transfer_id for t in leased)))

    # ---- the ends

    def _complete_if_done(self, transfer: PullerTransfer) -> None:
        state, reservation = transfer.handoff, transfer.reservation
        if state is None or transfer.in_flight or transfer.state is not PullerState.PULLING:
            return
        assert reservation is not None
        transfer_id = transfer.transfer_id
        self._effects.append(events.Complete(transfer_id, transfer.intent.key, state, reservation))
        if not transfer.is_orphaned:
            self._send(transfer.source, Release(transfer_id))
        self.tombstones.add(transfer_id, _COMPLETED)
        del self.transfers[transfer_id]

    def _end(
        self, transfer: PullerTransfer, error: BatonError | None, *, notify: bool = True
    ) -> None:
        """Give a transfer up: `Failed` with `error`; none if the gateway cancelled it.

        Its reservation is kept until the last copy in flight has ended.
        """
        if transfer.state is PullerState.ENDING:
            return
        transfer_id = transfer.transfer_id
        if error is not None:
            self._effects.append(events.Failed(transfer_id, transfer.intent.key, error))
        if notify and not transfer.is_orphaned and transfer.state is not PullerState.WAITING:
            self._send(transfer.source, Release(transfer_id))
        if transfer.in_flight:
            self._effects.append(events.CancelPull(transfer_id))
        self.tombstones.add(transfer_id, error or Cancelled("the request was cancelled"))
        transfer.state = PullerState.ENDING
        transfer.expires_s = transfer.renewal_s = math.inf
        self._bury_if_still(transfer)

    def _bury_if_still(self, transfer: PullerTransfer) -> None:
        """Free a failed transfer's blocks once no copy writes to them."""
        if transfer.in_flight:
            return
        if transfer.reservation is not None:
            self._effects.append(events.DropReservation(transfer.transfer_id, transfer.reservation))
        del self.transfers[transfer.transfer_id]
