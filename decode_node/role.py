"""The decode role: reserves blocks, pulls KV into them, decodes.

    Dispatch ─► Intended ─► Peers            step ─► tokens to the gateway
    Peers ─► reserve ─► engine.next_reservation ─► Peers ─► complete ─► engine.start

The engine decides about blocks, `kv_transfer.protocol.puller` about transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.errors import BatonError, Cancelled, HandoffFailed, InvalidRequest
from ..core.ports import Clock
from ..core.request.request import Request, Ticket
from ..core.request.timeline import Event
from ..core.request.token_ids import BlockHash
from ..engine.engine import Engine
from ..engine.kv.block_pool import Reservation
from ..kv_transfer.protocol.events import (
    Complete,
    DropReservation,
    Failed,
    Intended,
    IntentCancelled,
    Reserved,
)
from ..kv_transfer.protocol.messages import HandoffState
from ..node.peers.peers import Peers
from ..node.requests.request_io import Entry, RequestIO
from ..node.requests.request_role import EngineRole, Handoff
from ..proto.v1 import node_pb2


@dataclass(slots=True)
class _Intent(Handoff):
    """A request that waits for its KV."""

    block_hashes: Sequence[BlockHash]  # of the known tokens' full blocks
    reserved_s: float | None = None  # when it got its blocks: the begin of a hand-off's time


class DecodeRole(EngineRole[_Intent]):
    """The role of a decode node's engine."""

    is_source = False

    def __init__(self, engine: Engine, requests: RequestIO, peers: Peers, clock: Clock) -> None:
        super().__init__(engine, requests, peers, clock)
        peers.handoffs = self

    # -- gateways ------------------------------------------------------------------------------

    @property
    def num_coming(self) -> int:
        return super().num_coming + len(self._handoffs)

    def _open_handoff(self, entry: Entry, ticket: Ticket, samples: Sequence[Request]) -> None:
        self._engine.limits.check(entry.request)
        if any(sample.key in self._handoffs for sample in samples):
            raise InvalidRequest(f"request {entry.key} already waits for its KV")
        request, limits = entry.request, self._engine.limits
        hashes = self._engine.block_hashes(request)
        intent = _Intent(ticket, samples, hashes)
        self._handoffs.update((sample.key, intent) for sample in samples)
        num_blocks = limits.blocks_for(request.num_known_tokens)
        intended = Intended(ticket, entry.key, hashes, num_blocks, entry.deadline_s)
        self._peers.feed_puller(intended)

    def _cancel_handoff(self, intent: _Intent, error: BatonError) -> None:
        self._drop_intent(intent)
        self._peers.feed_puller(IntentCancelled(intent.ticket.transfer_id))

    def _drop_intent(self, intent: _Intent) -> None:
        """Stop waiting for blocks. Reserved ones are kept until DropReservation: the last copy into
        them has ended."""
        self._remove_handoff(intent)
        if intent.reserved_s is None:
            for sample in intent.samples:
                self._engine.abort(sample.key)

    # -- hand-offs -----------------------------------------------------------------------------

    def failed(self, failed: Failed) -> None:
        """End the requests of a failed transfer. A cancelled one is not counted as failed."""
        if not isinstance(failed.error, Cancelled):
            self.counts.failed_transfers[failed.error.code] += 1
        if intent := self._handoffs.get(failed.key):
            self._drop_intent(intent)
            for sample in intent.samples:
                self._requests.end(sample.key, failed.error)

    def dropped(self, dropped: DropReservation) -> None:
        self._engine.drop(dropped.reservation)

    def reserve(self, key: str) -> None:
        intent = self._handoffs.get(key)
        assert intent is not None, "the puller reserves for a request that is over"
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
                if entry := self._requests.get(sample.key):
                    self._requests.stamp(entry, Event.HANDOFF_QUEUED, entry.accepted_ns)
                    self._requests.stamp(entry, Event.TRANSFER_STARTED)
            self._peers.feed_puller(Reserved(intent.ticket.transfer_id, reservation))

    def complete(self, complete: Complete) -> None:
        """All KV has been pulled: decode. The next output reports the hand-off."""
        intent, reservation = self._handoffs[complete.key], complete.reservation
        limits = self._engine.limits
        num_pulled = reservation.num_known_blocks - reservation.num_cached_blocks
        assert intent.reserved_s is not None
        self._remove_handoff(intent)
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
            if entry := self._requests.get(sample.key):  # it decodes
                entry.transfer = summary
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
            for sample in samples:
                if not self._is_open(sample):
                    self._engine.abort(sample.key)
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
        for key, intent in self._handoffs.items():
            first = intent.samples[0]
            if key == first.key and intent.reserved_s is None:
                yield first
        yield from super().pending()


def _token_ids_of(state: HandoffState) -> list[int]:
    """All token ids in a source's state."""
    found = [state.first_token_id, *state.fork_token_ids]
    if state.first is not None:
        found += [one.token_id for one in state.first.candidates]
        found += [token_id for token_id, _ in state.first.top]
    return found
