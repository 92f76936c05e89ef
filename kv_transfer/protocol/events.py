"""Inputs (events) and outputs (effects) of the two state machines of the hand-off: plain values.

        inbox                                      engine calls, frames, copies
    ── event ──►  source.handle / puller.handle  ── effects ──►  node.peers

The caller executes effects in their order and passes the results back as events. Times are in
seconds of the injected clock's monotonic reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ...core.errors import BatonError
from ...core.request.request import Ticket
from ...core.request.token_ids import BlockHash
from ...engine.kv.block_pool import BlockRefs, Reservation
from ..window.block_pairs import BlockPairs
from ..window.network_address import PoolAccess
from ..window.transport import PullOutcome
from .messages import HandoffState, Message, Refused

# ---- events of both sides


@dataclass(frozen=True, slots=True)
class PeerLinked:
    """The stream to this peer is open. If the peer was linked already, the old stream is gone.

    If the peer is a source: `host` is where it was dialled; with `opens_late` its window is opened
    for its first transfer, not at once.
    """

    incarnation: str
    host: str = ""
    opens_late: bool = False


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The stream to this peer ended, for whatever reason; this ends every transfer with it."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """`message` was received over the stream to `incarnation`."""

    incarnation: str
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Expire what is due. To be passed when the inbox is empty, so that renewals in it count."""


# ---- events of the source


@dataclass(frozen=True, slots=True)
class Offered:
    """The engine admitted a prompt whose KV the ticket's puller will fetch.

    `key` is the request's key in the engine. The source keeps nothing past `deadline_s`.
    """

    ticket: Ticket
    key: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """The KV of the first `num_tokens` tokens is complete on the device, and nothing writes to its
    blocks any more, once `step` steps have completed (0: already).

    `blocks` are the blocks that no earlier chunk named; they continue where the previous chunk
    ended. A block that a chunk fills partially is named by the chunk that fills it, or by the last
    one. After a chunk with a step has completed, a chunk of as many tokens without a step follows,
    unless the request ends before. `state` is set in the last chunk.
    """

    transfer_id: str
    blocks: BlockRefs
    num_tokens: int
    state: HandoffState | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The request ended at the source: at its first token, by a cancel or by a failure."""

    transfer_id: str
    error: BatonError = field(compare=False)


# ---- events of the puller


@dataclass(frozen=True, slots=True)
class Intended:
    """A dispatch announced that this request's KV will be pulled. Takes no memory yet.

    `block_hashes` are the hashes of the known tokens' full blocks; `num_blocks` includes a partial
    last block. For a prefix out of the source's cache the memory is already `reserved`, so that the
    pull never waits for memory while the source holds blocks.
    """

    ticket: Ticket
    key: str
    block_hashes: Sequence[BlockHash]
    num_blocks: int
    deadline_s: float
    reserved: Reservation | None = None


@dataclass(frozen=True, slots=True)
class IntentCancelled:
    """The gateway gave the request up. Its transfer ends without `Failed`."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """Result of `Reserve`. `Complete` or `DropReservation` returns the reservation."""

    transfer_id: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """Result of `OpenWindow`: the source's pool can be read, and with `sees_steps` also how many
    steps the source has completed."""

    incarnation: str
    sees_steps: bool = False


@dataclass(frozen=True, slots=True)
class WindowFailed:
    """Result of `OpenWindow`: no transport reaches this source's pool."""

    incarnation: str
    error: BatonError = field(compare=False)


@dataclass(frozen=True, slots=True)
class PullEnded:
    """A pull ended: nothing writes to its destination blocks any more. Once for each pull."""

    transfer_id: str
    seq: int
    outcome: PullOutcome


# ---- effects of both sides


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to this peer; `Refused` ends the stream behind it."""

    incarnation: str
    message: Message | Refused


# ---- effects of the source


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """The hand-off of this request is over: exactly one for every `Offered`.

    `error` is None if the puller has pulled everything. Otherwise nothing more will be pulled, and
    the request, which may still be computing, must be aborted.
    """

    transfer_id: str
    key: str
    error: BatonError | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class PinPrefix:
    """A puller requests these blocks out of the prefix cache. Either hold all of them, offer them
    with this ticket and announce them as computed, or withdraw the ticket. Never wait."""

    ticket: Ticket
    block_hashes: tuple[BlockHash, ...]


# ---- effects of the puller


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """Connect a transport to this source, on another thread if it takes time. One result follows,
    unless `CloseWindow` comes first. `host` (from the link) and `access` (from Hello) are how the
    source's pools are reached."""

    incarnation: str
    host: str = ""
    access: PoolAccess | None = None


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """Start no more pulls. Pulls in flight end by themselves and still report; a window that is
    still being opened is abandoned."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Queue this request for memory in the engine. `Reserved` follows once it has blocks, unless
    the transfer ends before."""

    transfer_id: str
    key: str


@dataclass(frozen=True, slots=True)
class StartPull:
    """Copy `pairs` from the source's pool into the local one, once the source has completed `step`
    steps. One `PullEnded` with this `seq` follows."""

    transfer_id: str
    seq: int
    incarnation: str
    pairs: BlockPairs
    step: int = 0


@dataclass(frozen=True, slots=True)
class CancelPull:
    """End this transfer's pulls in flight as soon as possible. Each still reports."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Terminal: the KV of all known tokens is in the reservation; the request may continue."""

    transfer_id: str
    key: str
    state: HandoffState
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: the transfer failed. Its reservation, if any, is dropped separately."""

    transfer_id: str
    key: str
    error: BatonError = field(compare=False)


@dataclass(frozen=True, slots=True)
class DropReservation:
    """Free the reserved blocks; no copy writes to them any more."""

    transfer_id: str
    reservation: Reservation


PeerEvent: TypeAlias = PeerLinked | PeerLost | PeerMessage | Tick

OfferEvent: TypeAlias = Offered | ChunkReady | Withdrawn
SourceEvent: TypeAlias = PeerEvent | OfferEvent
SourceEffect: TypeAlias = Send | ReleaseBlocks | PinPrefix

PullEvent: TypeAlias = (
    Intended | IntentCancelled | Reserved | WindowOpened | WindowFailed | PullEnded
)  # fmt: skip
PullEffect: TypeAlias = (
    OpenWindow | CloseWindow | Reserve | StartPull | CancelPull
    | Complete | Failed | DropReservation
)  # fmt: skip
PullerEvent: TypeAlias = PeerEvent | PullEvent
PullerEffect: TypeAlias = Send | PullEffect
