"""The puller's role: waits for KV, pulls it into reserved blocks, decodes.

    Dispatch ─► Intended ─► PullerSide            step ─► tokens to the gateway
    PullerSide ─► reserve ─► complete ─► engine.start

Glue alone: the engine decides about blocks, `kv_transfer.protocol.puller` about transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..core.errors import BatonError, Cancelled, HandoffFailed, InvalidRequest
from ..core.ports import Clock
from ..core.request.request import Request, Ticket
from ..core.request.timeline import Event
from ..core.request.token_ids import BlockHash, block_hashes, root_hash
from ..engine.execution.batch import SampledToken
from ..engine.scheduling.outputs import Reservation, StepOutput, TokenOutput
from ..kv_transfer.protocol.events import (
    Complete,
    Failed,
    Intended,
    IntentCancelled,
    MemoryFreed,
    Reserved,
    ReserveRefused,
)
from ..kv_transfer.protocol.messages import HandoffState
from ..node.requests.request_io import Entry
from ..node.requests.request_role import EngineParts, EngineRole, Vitals
from ..proto.v1 import node_pb2


@dataclass(frozen=True, slots=True)
class _Intent:
    """KV that is waited for. The samples that share it: the dispatch's own, then its forks."""

    ticket: Ticket
    samples: tuple[Request, ...]
    block_hashes: Sequence[BlockHash]  # of the known tokens' full blocks


class DecodeRole(EngineRole):
    """Of a decode node's engine."""

    ticket_work = node_pb2.WORK_DECODE

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        parts.puller.handoffs = self
        self._fingerprint = parts.fingerprint
        self._block_bytes = parts.block_bytes
        self._intents: dict[str, _Intent] = {}  # by each sample's key, until their KV is here
        self._reservations: dict[str, Reservation] = {}  # by transfer
        self._is_short = False  # of blocks, or of slots: the puller waits
        self._counts = TransferCounts(parts.clock)

    # -- gateways ------------------------------------------------------------------------------

    @property
    def _num_coming(self) -> int:
        return super()._num_coming + len(self._intents)

    def _take_up(self, entry: Entry, ticket: Ticket, samples: Sequence[Request]) -> None:
        self._engine.limits.check(entry.request)
        if any(sample.key in self._intents for sample in samples):
            raise InvalidRequest(f"request {entry.key} waits for its KV already")
        request, limits = entry.request, self._engine.limits
        root = root_hash(self._fingerprint, request.cache_salt, request.adapter_digest)
        hashes = block_hashes(root, request.known_token_ids, limits.block_size)
        intent = _Intent(ticket, tuple(samples), hashes)
        self._intents.update((sample.key, intent) for sample in samples)
        num_blocks = limits.blocks_for(request.num_known_tokens)
        self._puller.feed(
            Intended(
                ticket,
                entry.key,
                hashes,
                num_blocks,
                entry.deadline_s,
                request.caller_id,
                needs_slot=request.adapter is not None,
            )
        )

    def _end(self, key: str, error: BatonError | None) -> None:
        self._request_io.end(key, error)
        intent = self._intents.get(key)
        if intent is None:
            self._engine.abort(key)
        elif not any(self._request_io.book.get(sample.key) for sample in intent.samples):
            self._forget(intent)
            # Its reservation stays until the last copy into it has ended: DropReservation.
            self._puller.feed(IntentCancelled(intent.ticket.transfer_id))

    def _forget(self, intent: _Intent) -> None:
        for sample in intent.samples:
            del self._intents[sample.key]

    # -- the engine's results ------------------------------------------------------------------

    def after_step(self, output: StepOutput) -> None:
        self._report_step(output)
        for key, error in output.failed:
            self.fail(key, error)

    def _start_of(self, entry: Entry) -> Event:
        return Event.DECODE_STARTED if entry.ticket else Event.PREFILL_STARTED

    def _on_token(self, token: TokenOutput) -> None:
        entry = self._request_io.book.get(token.key)
        if entry is None:
            return
        if entry.ticket is None and token.index == len(entry.request.output_token_ids):
            self._request_io.stamp(entry, Event.FIRST_TOKEN)
        elif entry.stamps and entry.stamps[-1].event is Event.DECODE_STARTED:
            self._request_io.stamp(entry, Event.FIRST_DECODE_ENDED)
        self._request_io.emit(entry, token)
        if token.finish_reason is not None:
            self._request_io.end(token.key, None)

    # -- hand-offs -----------------------------------------------------------------------------

    def failed(self, failed: Failed) -> None:
        self._counts.failed(failed.transfer_id, failed.error)
        if intent := self._intents.get(failed.key):
            self._forget(intent)
            for sample in intent.samples:
                self._request_io.end(sample.key, failed.error)

    def dropped(self, transfer_id: str) -> None:
        self._counts.dropped(transfer_id)
        self._engine.drop(self._reservations.pop(transfer_id))

    def reserve(self, transfer_id: str, key: str) -> None:
        intent = self._intents.get(key)
        assert intent is not None, "the puller reserves for a request that is over"
        request = intent.samples[0]
        if self._engine.lacks_slot(request):
            self._is_short = True
            self._puller.feed(ReserveRefused(transfer_id, lacks_slot=True))
            return
        try:
            reservation = self._engine.reserve(request, intent.block_hashes)
        except BatonError as error:
            self._puller.feed(ReserveRefused(transfer_id))
            self._fail_all(intent.samples, error)
            return
        if reservation is None:
            self._is_short = True
            self._puller.feed(ReserveRefused(transfer_id))
            return
        self._reservations[transfer_id] = reservation
        self._counts.began(transfer_id)
        for sample in intent.samples:
            if entry := self._request_io.book.get(sample.key):
                self._request_io.stamp_accepted(entry, Event.HANDOFF_QUEUED)
                self._request_io.stamp(entry, Event.TRANSFER_STARTED)
        self._puller.feed(
            Reserved(transfer_id, reservation.num_cached_blocks, reservation.block_ids)
        )

    def complete(self, complete: Complete) -> None:
        """All KV is in place: decode. The next output carries what the hand-off took."""
        reservation = self._reservations.pop(complete.transfer_id)
        intent, state = self._intents[complete.key], complete.state
        self._forget(intent)
        summary = node_pb2.TransferInfo(
            bytes=complete.num_pulled_blocks * self._block_bytes,
            cached_tokens=reservation.num_cached_blocks * self._engine.limits.block_size,
            transport=self._puller.windows.transport_of(intent.ticket.source_incarnation),
        )
        self._counts.completed(complete.transfer_id, summary.bytes)
        first, *forks = intent.samples
        if not self._request_io.knows(_token_ids_of(state)):
            self._engine.drop(reservation)
            error = HandoffFailed("the source sampled what is no token of the vocabulary")
            self._fail_all(intent.samples, error)
            return
        if first.sampling.use_beam_search:
            self._begin_beams(intent, reservation, state.first, summary)
            return
        if len(state.fork_token_ids) != len(forks):
            self._engine.drop(reservation)
            self._fail_all(
                intent.samples, HandoffFailed("the source sampled another number of forks")
            )
            return
        for sample, token_id in zip(forks, state.fork_token_ids, strict=True):
            self._begin(sample, reservation, token_id, summary)
        self._begin(first, reservation, state.first_token_id, summary)
        self._engine.drop(reservation)  # if the first sample is over, unlike its forks

    def _begin_beams(
        self,
        intent: _Intent,
        reservation: Reservation,
        first: SampledToken | None,
        summary: node_pb2.TransferInfo,
    ) -> None:
        """Let beams decode. The gateway is told that they do: their tokens come at the end."""
        if first is None:
            self._engine.drop(reservation)
            self._fail_all(intent.samples, HandoffFailed("the source sent no candidates"))
            return
        self._engine.start_beams(reservation, first)
        for sample in intent.samples:
            if entry := self._request_io.book.get(sample.key):
                entry.transfer = summary
                self._request_io.stamp(entry, Event.TRANSFER_ENDED)
                self._request_io.emit_progress(entry)
            else:
                self._engine.abort(sample.key)

    def _begin(
        self,
        sample: Request,
        reservation: Reservation,
        token_id: int,
        summary: node_pb2.TransferInfo,
    ) -> None:
        """Let a sample decode, unless it was cancelled or has ended with its first token."""
        entry = self._request_io.book.get(sample.key)
        if entry is None:
            return
        is_fork = sample.key != reservation.key
        try:
            if is_fork:
                self._engine.fork(reservation, sample, token_id)
            else:
                self._engine.start(reservation, token_id)
        except HandoffFailed as error:
            # Among several, one may end with its first token: the source reports it to the gateway.
            is_alone = not (is_fork or sample.fork_ids)
            self.fail(sample.key, error if is_alone else Cancelled(error.message))
            return
        entry.transfer = summary
        self._request_io.stamp(entry, Event.TRANSFER_ENDED)

    # -- time and looking in -------------------------------------------------------------------

    def tick(self) -> float | None:
        if self._is_short:
            self._is_short = False  # perhaps; the engine knows without asking its pool again
            self._puller.feed(MemoryFreed())
        return super().tick()

    def vitals(self) -> Vitals:
        pending = (
            intent.samples[0]
            for key, intent in self._intents.items()
            if key == intent.samples[0].key and intent.ticket.transfer_id not in self._reservations
        )
        counters = node_pb2.Counters()
        counters.CopyFrom(self._counts.wire)
        vitals = self._vitals(counters, tuple(pending))
        num_pending = len(self._intents) + len(self._puller.fetches.requests)
        return replace(vitals, num_pending=num_pending)

    def is_idle(self) -> bool:
        return super().is_idle() and not self._reservations


def _token_ids_of(state: HandoffState) -> list[int]:
    """All that a source names."""
    found = [state.first_token_id, *state.fork_token_ids]
    if state.first is not None:
        found += [one.token_id for one in state.first.candidates]
        found += [token_id for token_id, _ in state.first.top]
    return found


class TransferCounts:
    """How many hand-offs came, with how many bytes and in what time, and why others failed: since
    the engine's incarnation began. A hand-off's time begins when its memory is reserved; every one
    that began is completed, failed or dropped."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began_s: dict[str, float] = {}
        self.wire = node_pb2.Counters()

    def began(self, transfer_id: str) -> None:
        self._began_s[transfer_id] = self._clock.monotonic_s()

    def completed(self, transfer_id: str, num_bytes: int) -> None:
        self.wire.transfer_s += self._clock.monotonic_s() - self._began_s.pop(transfer_id)
        self.wire.num_transfers += 1
        self.wire.transfer_bytes += num_bytes

    def failed(self, transfer_id: str, error: BatonError) -> None:
        """Before or after it began, or its name was used again. One that was called off, by
        whomever, did not fail."""
        if not isinstance(error, Cancelled):
            self.wire.failed_transfers[error.code] += 1

    def dropped(self, transfer_id: str) -> None:
        """Its memory is given back; that it failed, if it did, was reported before."""
        self._began_s.pop(transfer_id, None)
