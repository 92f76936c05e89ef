"""The source's role: computes prompts, emits first tokens, keeps the KV until it is fetched.

    Dispatch ─► engine.add(hold) + Offered      Attach, Renew, Release ─► Peers
    step ─► first token to the gateway          Peers ─► manifests, release or abort
         └► chunks with the blocks

Glue alone: the engine decides about blocks, `kv_transfer.protocol.source` about leases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import BatonError, Cancelled, LeaseExpired
from ..core.request.request import Request, Ticket
from ..engine.kv.block_pool import BlockRefs
from ..engine.scheduling.outputs import ChunkDone, ChunkLaunched, StepOutput, TokenOutput
from ..kv_transfer.protocol.events import Chunk, Offered, Withdrawn
from ..kv_transfer.protocol.messages import HandoffState
from ..node.requests.request_io import Entry
from ..node.requests.request_role import EngineParts, EngineRole, Handoff
from ..proto.v1 import node_pb2


@dataclass(slots=True)
class _Offer(Handoff):
    """A prompt that is computed for a puller. Lives from Offered to ReleaseBlocks."""

    num_offered_blocks: int = 0
    is_first_token_out: bool = False


class PrefillRole(EngineRole[_Offer]):
    """Of a prefill node's engine."""

    ticket_work = node_pb2.WORK_PREFILL

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        parts.peers.on_release = self._release

    # -- gateways ------------------------------------------------------------------------------

    def _take_up(self, entry: Entry, ticket: Ticket, samples: Sequence[Request]) -> None:
        self._engine.add(entry.request, hold=True)
        offer = _Offer(ticket, samples)
        self._handoffs.update((sample.key, offer) for sample in samples)
        self._peers.feed_source(Offered(ticket, entry.key, entry.deadline_s))

    def _call_off(self, offer: _Offer, error: BatonError) -> None:
        self._peers.feed_source(Withdrawn(offer.ticket.transfer_id, error))
        self._engine.abort(offer.samples[0].key)

    @property
    def num_staying(self) -> int:
        return len(self._table) - self._table.num_with_ticket

    # -- the engine's results ------------------------------------------------------------------

    def _report_step(self, output: StepOutput) -> None:
        super()._report_step(output)
        self._request_io.flush()  # the first token is on its way before the manifest behind it
        first_tokens = {token.key: token.token_id for token in output.tokens}
        for chunk in output.chunks:
            self._on_chunk(chunk, first_tokens)

    def after_step(self, output: StepOutput) -> None:
        super().after_step(output)
        for launched in output.launched:
            self._on_launched(launched)

    def _on_token(self, token: TokenOutput) -> None:
        super()._on_token(token)
        if (offer := self._handoffs.get(token.key)) is not None:
            offer.is_first_token_out = True
            if not self._is_wanted(offer):
                ended = Cancelled("the request ended with its first token")
                self._peers.feed_source(Withdrawn(offer.ticket.transfer_id, ended))

    def _on_chunk(self, chunk: ChunkDone, first_tokens: Mapping[str, int]) -> None:
        """Offer the blocks that the chunk completed, unless they were when it was launched."""
        offer = self._handoffs.get(chunk.key)
        if offer is None:
            return
        num_tokens, state = chunk.num_computed_tokens, None
        blocks = self._next_blocks(chunk.key, offer, num_tokens, is_last=chunk.is_last)
        num_blocks, lacking = offer.num_offered_blocks, self._engine.first_undrafted(chunk.key)
        if chunk.first is not None:
            offer.is_first_token_out = True  # none will be: the puller outputs all
            state = HandoffState(num_blocks, first=chunk.first, first_undrafted=lacking)
        elif chunk.is_last:
            first_token_id, *others = (first_tokens[each.key] for each in offer.samples)
            state = HandoffState(num_blocks, first_token_id, tuple(others), first_undrafted=lacking)
        self._peers.feed_source(Chunk(offer.ticket.transfer_id, blocks, num_tokens, state))

    def _on_launched(self, chunk: ChunkLaunched) -> None:
        offer = self._handoffs.get(chunk.key)
        if offer is None:
            return
        blocks = self._next_blocks(chunk.key, offer, chunk.num_tokens, is_last=chunk.is_last)
        if blocks:
            transfer_id = offer.ticket.transfer_id
            self._peers.feed_source(Chunk(transfer_id, blocks, chunk.num_tokens, step=chunk.step))

    def _next_blocks(self, key: str, offer: _Offer, num_tokens: int, *, is_last: bool) -> BlockRefs:
        """The blocks that so many tokens fill and that were not offered yet; with the last chunk
        also the partial one."""
        limits, first = self._engine.limits, offer.num_offered_blocks
        last = limits.blocks_for(num_tokens) if is_last else num_tokens // limits.block_size
        offer.num_offered_blocks = max(first, last)
        return self._engine.block_refs(key, first, last)

    # -- pullers -------------------------------------------------------------------------------

    def _release(self, key: str, error: BatonError | None) -> None:
        """The hand-off is over. Behind the first token its outcome is the puller's to report."""
        self._counts.num_expired_leases += isinstance(error, LeaseExpired)
        offer = self._handoffs[key]
        self._forget(offer)
        for sample in offer.samples:
            self._request_io.end(sample.key, None if offer.is_first_token_out else error)
        self._engine.abort(key)
