"""The prefill role: computes prompts, emits first tokens, holds the KV until it is pulled.

    Dispatch ─► engine.add(hold) + Offered      Attach, Renew, Release ─► Peers
    step ─► first token to the gateway          Peers ─► manifests, release or abort
         └► chunks with the blocks

The engine decides about blocks, `kv_transfer.protocol.source` about leases.
"""

from __future__ import annotations

from ..core.errors import BatonError, Cancelled, LeaseExpired
from ..core.ports import Clock
from ..core.request.request import Ticket
from ..engine.engine import Engine
from ..engine.scheduling.outputs import ChunkOutput, StepOutput, TokenOutput
from ..kv_transfer.protocol.events import ChunkReady, Offered, Withdrawn
from ..kv_transfer.protocol.messages import HandoffState
from ..node.peers.peers import Peers
from ..node.requests.request_io import Entry, RequestIO
from ..node.requests.request_role import EngineRole, Handoff


class PrefillRole(EngineRole):
    """The role of a prefill node's engine."""

    is_source = True

    def __init__(self, engine: Engine, requests: RequestIO, peers: Peers, clock: Clock) -> None:
        super().__init__(engine, requests, peers, clock)
        peers.on_release = self._release

    def _open_handoff(self, entry: Entry, ticket: Ticket) -> None:
        self._engine.add(entry.request, hold=True)
        self._handoffs[entry.key] = Handoff(ticket, entry.samples)
        self._peers.feed_source(Offered(ticket, entry.key, entry.deadline_s))

    def _cancel_handoff(self, offer: Handoff, error: BatonError) -> None:
        self._peers.feed_source(Withdrawn(offer.ticket.transfer_id, error))
        self._engine.abort(offer.samples[0].key)

    def after_step(self, output: StepOutput) -> None:
        super().after_step(output)
        self._requests.flush()  # send the first token before the manifest that follows it
        for chunk in output.chunks:
            self._on_chunk(chunk)

    def _on_token(self, entry: Entry, token: TokenOutput) -> None:
        super()._on_token(entry, token)
        if (offer := self._handoff_of(entry)) is not None:
            offer.is_first_token_out = True
            if not self._is_wanted(offer):
                ended = Cancelled("the request ended with its first token")
                self._peers.feed_source(Withdrawn(offer.ticket.transfer_id, ended))

    def _on_chunk(self, chunk: ChunkOutput) -> None:
        """Offer the blocks that the chunk has filled, and with the last chunk also the partial one,
        unless they have already been offered."""
        offer = self._handoffs.get(chunk.key)
        if offer is None:
            return
        limits, first, num_tokens = self._engine.limits, offer.num_offered_blocks, chunk.num_tokens
        last = limits.blocks_for(num_tokens) if chunk.is_last else num_tokens // limits.block_size
        offer.num_offered_blocks = num_blocks = max(first, last)
        blocks, state = self._engine.block_refs(chunk.key, first, num_blocks), None
        if (sampled := chunk.sampled) is not None:
            lacking = self._engine.first_undrafted(chunk.key)
            forks = tuple(fork.token_id for fork in sampled.forks)
            of_beams = sampled if sampled.candidates else None
            state = HandoffState(sampled.token_id, forks, of_beams, lacking)
            offer.is_first_token_out = True  # with beams the puller sends all tokens
        transfer_id = offer.ticket.transfer_id
        self._peers.feed_source(ChunkReady(transfer_id, blocks, num_tokens, state, chunk.step))

    def _release(self, key: str, error: BatonError | None) -> None:
        """The hand-off has ended. After the first token the puller reports its outcome."""
        self.counts.num_expired_leases += isinstance(error, LeaseExpired)
        offer = self._handoffs.pop(key)
        for sample in offer.samples:
            self._requests.end(sample.key, None if offer.is_first_token_out else error)
        self._engine.abort(key)
