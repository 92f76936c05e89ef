"""The decode role: reserves blocks, pulls KV into them, decodes.

    Dispatch ─► Intended ─► Peers            step ─► tokens to the gateway
    Peers ─► reserve ─► engine.next_reservation ─► Peers ─► complete ─► engine.start

The engine decides about blocks, `kv_transfer.protocol.puller` about transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.errors import BatonError, Cancelled, HandoffFailed, InvalidRequest
from ..core.ports import Clock
from ..core.request.request import Request, Ticket
from ..core.request.timeline import Event
from ..engine.engine import Engine
from ..engine.kv.block_pool import Reservation
from ..kv_transfer.protocol import events
from ..kv_transfer.protocol.messages import HandoffState
from ..node.peers.peers import Peers
from ..node.requests.request_io import Entry, RequestIO
from ..node.requests.request_role import EngineRole, Handoff
from ..proto.v1 import node_pb2


class DecodeRole(EngineRole):
    """The role of a decode node's engine."""

    is_source = False

    def __init__(self, engine: Engine, requests: RequestIO, peers: Peers, clock: Clock) -> None:
        super().__init__(engine, requests, peers, clock)
        peers.handoffs = self

    # -- gateways ------------------------------------------------------------------------------

    @property
    def num_coming(self) -> int:
        return super().num_coming + sum(len(each.samples) for each in self._handoffs.values())

    def _open_handoff(self, entry: Entry, ticket: Ticket) -> None:
        request, limits = entry.request, self._engine.limits
        limits.check(request)
        if entry.key in self._handoffs:
            raise InvalidRequest(f"request {entry.key} already waits for its KV")
        hashes = self._engine.block_hashes(request)
        self._handoffs[entry.key] = Handoff(ticket, entry.samples, block_hashes=hashes)
        num_blocks = limits.blocks_for(request.num_known_tokens)
        intended = events.Intended(ticket, entry.key, hashes, num_blocks, entry.deadline_s)
        self._peers.feed_puller(intended)

    def _cancel_handoff(self, intent: Handoff, error: BatonError) -> None:
        self._drop_intent(intent)
        self._peers.feed_puller(events.IntentCancelled(intent.ticket.transfer_id))

    def _drop_intent(self, intent: Handoff) -> None:
        """Stop waiting for blocks. Reserved ones are kept until DropReservation: the last copy into
        them has ended."""
        del self._handoffs[intent.samples[0].key]
        if intent.reserved_s is None:
            for sample in intent.samples:
                self._engine.abort(sample.key)

    # -- hand-offs -----------------------------------------------------------------------------

    def failed(self, failed: events.Failed) -> None:
        """End the requests of a failed transfer. A cancelled one is not counted as failed."""
        if not isinstance(failed.error, Cancelled):
            self.counts.failed_transfers[failed.error.code] += 1
        if intent := self._handoffs.get(failed.key):
            self._drop_intent(intent)
            for sample in intent.samples:
                self._requests.end(sample.key, failed.error)

    def dropped(self, dropped: events.DropReservation) -> None:
        self._engine.drop(dropped.reservation)

    def reserve(self, key: str) -> None:
        intent = self._handoffs[key]
        try:
            self._engine.reserve(intent.samples[0], intent.block_hashes)
        except BatonError as error:
            self._fail_all(intent.samples, error)
        self._grant()

    def _grant(self) -> None:
        """Start the pulls whose blocks are reserved now."""
        while (reservation := self._engine.next_reservation()) is not None:
            intent = self._handoffs[reservation.key]
            intent.reserved_s = self._clock.monotonic_s()
            for sample in intent.samples:
                if entry := self._requests.entries.get(sample.key):
                    self._requests.stamp(entry, Event.HANDOFF_QUEUED, entry.accepted_ns)
                    self._requests.stamp(entry, Event.TRANSFER_STARTED)
            self._peers.feed_puller(events.Reserved(intent.ticket.transfer_id, reservation))

    def complete(self, complete: events.Complete) -> None:
        """All KV has been pulled: decode. The next output reports the hand-off."""
        intent, reservation = self._handoffs.pop(complete.key), complete.reservation
        limits = self._engine.limits
        num_pulled = reservation.num_known_blocks - reservation.num_cached_blocks
        assert intent.reserved_s is not None
        summary = node_pb2.TransferInfo(
            bytes=num_pulled * limits.block_bytes,
            cached_tokens=reservation.num_cached_blocks * limits.block_size,
            transport=self._peers.pulls.transport_of(intent.ticket.source_incarnation),
        )
        self.counts.transfer_s += self._clock.monotonic_s() - intent.reserved_s
        self.counts.num_transfers += 1
        self.counts.transfer_bytes += summary.bytes
        try:
            self._start(intent.samples, reservation, complete.state)
        except HandoffFailed as error:
            self._fail_all(intent.samples, error)
        self._engine.drop(reservation)  # unless the first sample has taken it
        for sample in intent.samples:
            if entry := self._requests.entries.get(sample.key):  # it decodes
                entry.next_output.transfer.CopyFrom(summary)
                self._requests.stamp(entry, Event.TRANSFER_ENDED)
                if sample.sampling.use_beam_search:
                    self._requests.queue_output(entry)  # beams have no tokens before the end

    def _start(
        self, samples: Sequence[Request], reservation: Reservation, state: HandoffState
    ) -> None:
        """Raises HandoffFailed if the source's state is invalid."""
        first, *forks = samples
        if not self._requests.knows(_token_ids_of(state)):
            raise HandoffFailed("the source sampled a token outside the vocabulary")
        self._engine.lacks_drafts(reservation, state.first_undrafted)
        if first.sampling.use_beam_search:
            if state.first is None:
                raise HandoffFailed("the source sent no candidates")
            self._engine.beams.start(reservation, state.first)
            self._abort_ended(samples)
            return
        if len(state.fork_token_ids) != len(forks):
            raise HandoffFailed("the source sampled another number of forks")
        for sample, token_id in zip(forks, state.fork_token_ids, strict=True):
            self._start_sample(sample, reservation, token_id)
        self._start_sample(first, reservation, state.first_token_id)

    def _start_sample(self, sample: Request, reservation: Reservation, token_id: int) -> None:
        """Start decoding a sample, unless it was cancelled or has ended with its first token."""
        if not self._is_open(sample):
            return
        fork = None if sample.key == reservation.key else sample
        try:
            self._engine.start(reservation, token_id, fork)
        except HandoffFailed as error:
            # One of several samples may end with its first token: the source reports that.
            is_alone = not (fork or sample.fork_ids)
            self.end(sample.key, error if is_alone else Cancelled(error.message))

    # -- time and state ------------------------------------------------------------------------

    def tick(self) -> float:
        deadline_s = super().tick()  # before granting: expired requests free blocks
        self._grant()
        return deadline_s

    def pending(self) -> Iterable[Request]:
        waiting = (each for each in self._handoffs.values() if each.reserved_s is None)
        return [*(intent.samples[0] for intent in waiting), *super().pending()]


def _token_ids_of(state: HandoffState) -> list[int]:
    """All token ids in a source's state."""
    found = [state.first_token_id, *state.fork_token_ids]
    if state.first is not None:
        found += [one.token_id for one in state.first.candidates]
        found += [token_id for token_id, _ in state.first.top]
    return found
