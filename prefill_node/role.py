"""The source's role: computes prompts, emits first tokens, keeps the KV until it is fetched.

    Dispatch ─► engine.add(hold) + Offered      Attach, Renew, Release ─► SourceSide
    step ─► first token to the gateway          SourceSide ─► manifests, release or abort
         └► ChunkAnnounced, ChunkReady with the blocks

Glue alone: the engine decides about blocks, `kv_transfer.protocol.source` about leases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import BatonError, Cancelled, LeaseExpired
from ..core.request.request import Request, Ticket
from ..core.request.timeline import Event
from ..engine.kv.block_pool import BlockRef
from ..engine.scheduling.outputs import ChunkDone, ChunkLaunched, StepOutput, TokenOutput
from ..kv_transfer.protocol.events import ChunkAnnounced, ChunkReady, Offered, Withdrawn
from ..kv_transfer.protocol.messages import HandoffState
from ..node.requests.request_io import Entry
from ..node.requests.request_role import EngineParts, EngineRole, Vitals
from ..proto.v1 import node_pb2


@dataclass(slots=True)
class _Offer:
    """A prompt that is computed for a puller. Lives from Offered to ReleaseBlocks.

    `keys` are those of the requests that share it: the dispatch's own, then its forks'.
    """

    ticket: Ticket
    keys: tuple[str, ...]
    num_offered_blocks: int = 0
    is_first_token_out: bool = False


class PrefillRole(EngineRole):
    """Of a prefill node's engine."""

    ticket_work = node_pb2.WORK_PREFILL

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        parts.source.on_release = self._release
        self._outbox = parts.outbox
        self._offers: dict[str, _Offer] = {}  # by each of its keys
        self._num_expired_leases = 0

    # -- gateways ------------------------------------------------------------------------------

    def _take_up(self, entry: Entry, ticket: Ticket, samples: Sequence[Request]) -> None:
        self._engine.add(entry.request, hold=True)
        offer = _Offer(ticket, tuple(sample.key for sample in samples))
        self._offers.update(dict.fromkeys(offer.keys, offer))
        self._source.feed(Offered(ticket, entry.key, entry.deadline_s))

    def _end(self, key: str, error: BatonError | None) -> None:
        self._request_io.end(key, error)
        offer = self._offers.get(key)
        if offer is None:
            self._engine.abort(key)
        elif not self._is_wanted(offer):
            reason = error or Cancelled("the request was cancelled")
            self._source.feed(Withdrawn(offer.ticket.transfer_id, reason))
            self._engine.abort(offer.keys[0])

    def _is_wanted(self, offer: _Offer) -> bool:
        """Whether a request that shares the prompt goes on."""
        return any(self._request_io.book.get(key) for key in offer.keys)

    # -- the engine's results ------------------------------------------------------------------

    def after_step(self, output: StepOutput) -> None:
        self._report_step(output)
        self._outbox.flush_gateways()  # users need not wait for what is sent to pullers
        first_tokens = {token.key: token.token_id for token in output.tokens}
        for chunk in output.chunks:
            self._on_chunk(chunk, first_tokens)
        for key, error in output.failed:
            self.fail(key, error)
        for launched in output.launched:
            self._on_launched(launched)

    def _start_of(self, entry: Entry) -> Event:
        return Event.PREFILL_STARTED

    def _on_token(self, token: TokenOutput) -> None:
        entry = self._request_io.book.get(token.key)
        if entry is None:
            return
        if token.index == len(entry.request.output_token_ids):
            self._request_io.stamp(entry, Event.FIRST_TOKEN)
        self._request_io.emit(entry, token)
        offer = self._offers.get(token.key)
        if offer is not None:
            offer.is_first_token_out = True
        if token.finish_reason is not None:
            self._request_io.end(token.key, None)
            if offer is not None and not self._is_wanted(offer):
                ended = Cancelled("the request ended with its first token")
                self._source.feed(Withdrawn(offer.ticket.transfer_id, ended))

    def _on_chunk(self, chunk: ChunkDone, first_tokens: Mapping[str, int]) -> None:
        """Offer the blocks that the chunk completed, unless they were when it was launched."""
        offer = self._offers.get(chunk.key)
        if offer is None:
            return
        num_tokens, state = chunk.num_computed_tokens, None
        blocks = self._next_blocks(chunk.key, offer, num_tokens, is_last=chunk.is_last)
        if chunk.first is not None:
            offer.is_first_token_out = True  # none will be: the puller outputs all
            state = HandoffState(offer.num_offered_blocks, first=chunk.first)
        elif chunk.is_last:
            first_token_id, *fork_token_ids = (first_tokens[key] for key in offer.keys)
            state = HandoffState(offer.num_offered_blocks, first_token_id, tuple(fork_token_ids))
        self._source.feed(ChunkReady(offer.ticket.transfer_id, blocks, num_tokens, state))

    def _on_launched(self, chunk: ChunkLaunched) -> None:
        offer = self._offers.get(chunk.key)
        if offer is None:
            return
        blocks = self._next_blocks(chunk.key, offer, chunk.num_tokens, is_last=chunk.is_last)
        if blocks:
            transfer_id = offer.ticket.transfer_id
            self._source.feed(ChunkAnnounced(transfer_id, blocks, chunk.num_tokens, chunk.step))

    def _next_blocks(
        self, key: str, offer: _Offer, num_tokens: int, *, is_last: bool
    ) -> tuple[BlockRef, ...]:
        """The blocks that so many tokens fill and that were not offered yet; with the last chunk
        also the partial one."""
        limits, first = self._engine.limits, offer.num_offered_blocks
        last = limits.blocks_for(num_tokens) if is_last else num_tokens // limits.block_size
        offer.num_offered_blocks = max(first, last)
        return tuple(self._engine.block_refs(key, first, last))

    # -- pullers -------------------------------------------------------------------------------

    def _release(self, key: str, error: BatonError | None) -> None:
        """The hand-off is over. Behind the first token its outcome is the puller's to report."""
        self._num_expired_leases += isinstance(error, LeaseExpired)
        for each in self._offers[key].keys:
            offer = self._offers.pop(each)
            self._request_io.end(each, None if offer.is_first_token_out else error)
        self._engine.abort(key)

    # -- looking in ----------------------------------------------------------------------------

    def vitals(self) -> Vitals:
        counters = node_pb2.Counters(num_expired_leases=self._num_expired_leases)
        return self._vitals(counters)

    def is_idle(self) -> bool:
        return super().is_idle() and not self._offers
