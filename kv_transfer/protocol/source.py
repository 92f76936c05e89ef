"""The source's side of the hand-off: which blocks are kept for which puller, and until when.

Owns the leases and what was announced to pullers; decides when blocks return to the engine. Knows
no memory, stream or thread: `handle` maps events to effects, which `node.peers` executes.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from ...core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    HandoffFailed,
    LeaseExpired,
    UnknownTransfer,
)
from ...core.ports import Clock
from ...core.request.request import Ticket
from ..window.network_address import PoolAccess
from .events import ChunkReady, Offered, OfferEvent, PinPrefix, ReleaseBlocks, Withdrawn
from .handoff_side import HandoffSide
from .messages import Attach, Hello, Manifest, Message, Release, Renew, Revoked
from .pairing import Pair

_RELEASED = UnknownTransfer("the transfer is over: its blocks were released")
_UNWANTED = Cancelled("the puller cancelled the transfer")
# The same text whether or not another puller has the transfer: a puller learns nothing of others.
_NOT_YOURS = UnknownTransfer("no such transfer here")


class SourceState(enum.Enum):
    """The state of one transfer. Manifests are sent once it is both attached and offered: for each
    chunk when it is computed, or when it is launched if the puller sees the source's steps.

      Attach              Offered
    ─────────► AWAITED ──────┐
                  │          ▼      last chunk
    ─────────── Offered ─► COMPUTING ─────────────► HELD
                  │          │                       │
                  └──────────┴───────────────────────┴──► over: `_end` leaves a tombstone

    Withdrawn, Release and PeerLost end every state; an expired lease ends HELD; AWAITED ends after
    one lease without an offer.
    """

    AWAITED = "awaited"  # the puller has attached; the prompt was not dispatched here yet
    COMPUTING = "computing"  # the running request owns the blocks; no lease runs
    HELD = "held"  # computed; the lease runs, and only the puller renews it


@dataclass(slots=True)
class SourceTransfer:
    """One transfer. `expires_s` is on the monotonic clock, as all times here."""

    transfer_id: str
    puller: str
    state: SourceState = SourceState.AWAITED
    offer: Offered | None = None  # None: AWAITED
    is_attached: bool = False  # manifests may be sent
    sees_steps: bool = False  # ... also of chunks whose step was only launched
    expires_s: float = math.inf  # inf: COMPUTING
    unsent: deque[ChunkReady] = field(default_factory=deque)
    num_sent: int = 0  # manifests
    num_blocks: int = 0  # that the engine has announced so far
    num_tokens: int = 0  # computed so far

    def expiry(self, now_s: float) -> BatonError:
        """Why it ends at `expires_s`."""
        if self.offer is None:
            return UnknownTransfer("no prompt was received for the ticket within one lease")
        if now_s >= self.offer.deadline_s:
            return DeadlineExceeded("the deadline passed before the KV was pulled")
        if not self.is_attached:
            return LeaseExpired("no puller requested the KV within one lease")
        return LeaseExpired("the puller did not renew its lease")


class Source(HandoffSide[SourceTransfer, OfferEvent, ReleaseBlocks | PinPrefix]):
    """All transfers out of one engine."""

    _peer = "puller"

    def __init__(
        self, hello: Hello, clock: Clock, lease_s: float, access: PoolAccess | None = None
    ) -> None:
        """`access`: how the engine's pools are reached; pullers' keys are derived from its key."""
        super().__init__(hello, clock)
        self._access = access
        self._lease_s = lease_s

    def _on_event(self, event: OfferEvent) -> None:
        match event:
            case Offered():
                self._on_offered(event)
            case ChunkReady():
                self._on_chunk(event)
            case Withdrawn(transfer_id, error):
                if (transfer := self.transfers.get(transfer_id)) is not None:
                    self._end(transfer, error)
                else:
                    self.tombstones.add(transfer_id, error)
            case _:
                assert_never(event)

    # ---- the engine's side

    def _on_offered(self, offer: Offered) -> None:
        transfer_id, puller = offer.ticket.transfer_id, offer.ticket.puller_incarnation
        refusal = self._refusal(offer)
        if refusal is not None:
            self._effects.append(ReleaseBlocks(transfer_id, offer.key, refusal))
            return
        transfer = self.transfers.get(transfer_id)
        if transfer is not None and transfer.puller != puller:
            self._send(transfer.puller, Revoked(transfer_id, _NOT_YOURS))
            transfer = None
        transfer = transfer or SourceTransfer(transfer_id, puller)
        transfer.offer, transfer.state = offer, SourceState.COMPUTING
        transfer.expires_s = math.inf
        self.transfers[transfer_id] = transfer

    def _refusal(self, offer: Offered) -> BatonError | None:
        if offer.ticket.source_incarnation != self._hello.incarnation:
            return UnknownTransfer("the ticket names another incarnation of this source")
        transfer = self.transfers.get(offer.ticket.transfer_id)
        if transfer is not None and transfer.offer is not None:
            return HandoffFailed("the ticket is in use by another request")
        return self.tombstones.get(offer.ticket.transfer_id)

    def _on_chunk(self, chunk: ChunkReady) -> None:
        transfer = self.transfers.get(chunk.transfer_id)
        if transfer is None or transfer.offer is None:
            return  # the transfer ended while the chunk was computed
        if chunk.blocks or chunk.state is not None:
            assert transfer.state is SourceState.COMPUTING, "a chunk after the last one"
            transfer.num_blocks += len(chunk.blocks)
            transfer.unsent.append(chunk)
        if not chunk.step:
            transfer.num_tokens = chunk.num_tokens
        if chunk.state is not None:
            transfer.state = SourceState.HELD
            self._renew(transfer)
        self._flush(transfer)

    # ---- the puller's side

    def _on_message(self, puller: str, message: Message) -> None:
        match message:
            case Attach():
                self._on_attach(puller, message)
            case Renew(transfer_ids):
                for transfer_id in transfer_ids:
                    if (transfer := self._owned_or_denied(puller, transfer_id)) is not None:
                        self._renew(transfer)
            case Release(transfer_id):
                self._on_release(puller, transfer_id)
            case _:
                raise HandoffFailed("a puller sent what only sources send")

    def _on_matched(self, puller: str, pair: Pair) -> None:
        """Send Hello, with the address of the pools, only to a peer whose own Hello fits."""
        access = self._access and self._access.of_puller(puller)
        self._send(puller, replace(self._hello, access=access))

    def _on_lost(self, puller: str, pair: Pair | None, error: BatonError) -> None:
        for transfer in [t for t in self.transfers.values() if t.puller == puller]:
            self._end(transfer, error, notify=False)

    def _on_attach(self, puller: str, attach: Attach) -> None:
        """It may come before the prompt is offered; a prefix is offered now or never."""
        transfer_id = attach.transfer_id
        is_new = transfer_id not in self.transfers and self.tombstones.get(transfer_id) is None
        if is_new:
            until_s = self._clock.monotonic_s() + self._lease_s
            self.transfers[transfer_id] = SourceTransfer(transfer_id, puller, expires_s=until_s)
        if (transfer := self._owned_or_denied(puller, transfer_id)) is None:
            return
        transfer.is_attached, transfer.sees_steps = True, attach.sees_steps
        if is_new and attach.block_hashes:
            ticket = Ticket(transfer_id, self._hello.incarnation, puller)
            self._effects.append(PinPrefix(ticket, attach.block_hashes))
        self._renew(transfer)
        self._flush(transfer)

    def _on_release(self, puller: str, transfer_id: str) -> None:
        if (transfer := self._owned(puller, transfer_id)) is not None:
            is_whole = transfer.state is SourceState.HELD and not transfer.unsent
            self._end(transfer, None if is_whole else _UNWANTED, notify=False)
        elif transfer_id not in self.transfers:
            self.tombstones.add(transfer_id, _UNWANTED)

    def _owned(self, puller: str, transfer_id: str) -> SourceTransfer | None:
        """The transfer, if it belongs to this puller."""
        transfer = self.transfers.get(transfer_id)
        return transfer if transfer is not None and transfer.puller == puller else None

    def _owned_or_denied(self, puller: str, transfer_id: str) -> SourceTransfer | None:
        """The same; otherwise the puller is sent Revoked."""
        if (transfer := self._owned(puller, transfer_id)) is None:
            epitaph = self.tombstones.get(transfer_id) or _NOT_YOURS
            self._send(puller, Revoked(transfer_id, epitaph))
        return transfer

    # ---- leases

    def _renew(self, transfer: SourceTransfer) -> None:
        """Start a full lease now, which never exceeds the request's deadline."""
        if transfer.state is SourceState.HELD and transfer.offer is not None:
            until_s = self._clock.monotonic_s() + self._lease_s
            transfer.expires_s = min(until_s, transfer.offer.deadline_s)

    # ---- effects

    def _flush(self, transfer: SourceTransfer) -> None:
        """Send the manifests of all chunks that the puller may pull now."""
        left_s = min(self._lease_s, max(0.0, transfer.expires_s - self._clock.monotonic_s()))
        while transfer.is_attached and transfer.unsent:
            chunk = transfer.unsent[0]
            is_computed = chunk.num_tokens <= transfer.num_tokens
            if not is_computed and not transfer.sees_steps:
                return
            step = 0 if is_computed else chunk.step
            manifest = Manifest(
                chunk.transfer_id, transfer.num_sent, chunk.blocks, left_s, chunk.state, step
            )
            transfer.unsent.popleft()
            transfer.num_sent += 1
            self._send(transfer.puller, manifest)

    def _end(
        self, transfer: SourceTransfer, error: BatonError | None, *, notify: bool = True
    ) -> None:
        """The only end of a transfer: release its blocks, if it has any, and leave a tombstone.

        `error` is None if the puller has pulled everything.
        """
        transfer_id, epitaph = transfer.transfer_id, error or _RELEASED
        del self.transfers[transfer_id]
        self.tombstones.add(transfer_id, epitaph)
        if transfer.offer is not None:
            self._effects.append(ReleaseBlocks(transfer_id, transfer.offer.key, error))
        if notify and transfer.is_attached:
            self._send(transfer.puller, Revoked(transfer_id, epitaph))
