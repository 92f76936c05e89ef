"""What goes into the two state machines of the hand-off, and what comes out of them. Plain values.

        inbox                                      engine calls, frames, copies
    ── event ──►  source.handle / puller.handle  ── effects ──►  node.peers

They are carried out in their order, and the answers fed back as events. Times are seconds
of the injected clock's monotonic reading.
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
from .messages import HandoffState, Message

# ---- events of both sides


@dataclass(frozen=True, slots=True)
class PeerLinked:
    """The stream to this peer is open. On a peer that is linked already: the old stream is gone.

    Of a source: `host`, where it was dialled; `opens_late`: its window is opened for its first
    transfer, not at once.
    """

    incarnation: str
    host: str = ""
    opens_late: bool = False


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The stream to this peer ended, for whatever reason: so does every transfer with it."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """`message` came over the stream to `incarnation`."""

    incarnation: str
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Expire what is due. Send it when the inbox is drained, so that renewals in it count."""


# ---- events of the source


@dataclass(frozen=True, slots=True)
class Offered:
    """A prompt was admitted whose KV the ticket's puller will fetch.

    `key` names the request in the engine; nothing waits for the puller past `deadline_s`.
    """

    ticket: Ticket
    key: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """The KV of `num_tokens` is complete on the device once `step` steps are, 0: already, and then
    nobody writes to its blocks any more.

    `blocks` are those that no chunk has named. They continue where the last chunk ended; a block
    that the chunk left partial comes with the chunk that completes it, or with the last one. One
    with a step is followed, when that has completed, by one without of as many tokens, unless the
    request ends before. `state` makes it the last one.
    """

    transfer_id: str
    blocks: BlockRefs
    num_tokens: int
    state: HandoffState | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The request ended here: at its first token, by a cancel or by a failure."""

    transfer_id: str
    error: BatonError = field(compare=False)


# ---- events of the puller


@dataclass(frozen=True, slots=True)
class Intended:
    """A dispatch announced that this request's KV will come. Takes no memory.

    `block_hashes` are those of the known tokens' full blocks; `num_blocks` counts the partial last
    one too. A prefix out of the source's cache has its memory already, which is `reserved`: it
    never waits for any while the source holds blocks.
    """

    ticket: Ticket
    key: str
    block_hashes: Sequence[BlockHash]
    num_blocks: int
    deadline_s: float
    reserved: Reservation | None = None


@dataclass(frozen=True, slots=True)
class IntentCancelled:
    """The gateway gave the request up. Not answered."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Reserved:
    """Answer to `Reserve`. It comes back with `Complete` or `DropReservation`."""

    transfer_id: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class WindowOpened:
    """Answer to `OpenWindow`: the source's pool can be read, and perhaps its count of steps."""

    incarnation: str
    sees_steps: bool = False


@dataclass(frozen=True, slots=True)
class WindowFailed:
    """Answer to `OpenWindow`: no transport reaches this source's pool."""

    incarnation: str
    error: BatonError = field(compare=False)


@dataclass(frozen=True, slots=True)
class PullEnded:
    """One pull's only report: from now on nothing writes to its destination blocks."""

    transfer_id: str
    seq: int
    outcome: PullOutcome


# ---- effects of both sides


@dataclass(frozen=True, slots=True)
class Send:
    incarnation: str
    message: Message


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """Refuse this pair: end its stream, with the reason."""

    incarnation: str
    error: BatonError = field(compare=False)


# ---- effects of the source


@dataclass(frozen=True, slots=True)
class ReleaseBlocks:
    """The hand-off is done with this request: exactly one for every `Offered`.

    `error` is None if the puller has taken everything; otherwise it is why nobody will, and the
    request may still be computing: abort it.
    """

    transfer_id: str
    key: str
    error: BatonError | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class PinPrefix:
    """A puller wants these blocks out of the prefix cache. Hold all of them, offer them with this
    ticket and announce them as computed; or withdraw it. Never wait."""

    ticket: Ticket
    block_hashes: tuple[BlockHash, ...]


# ---- effects of the puller


@dataclass(frozen=True, slots=True)
class OpenWindow:
    """Connect a transport to this source, off this thread if it takes time. Answered once, unless
    `CloseWindow` comes first: then never. `host`, `access`: how its pools are reached, by its link
    and its Hello."""

    incarnation: str
    host: str = ""
    access: PoolAccess | None = None


@dataclass(frozen=True, slots=True)
class CloseWindow:
    """Start no more pulls; those in flight end by themselves and still report. A window that is
    still being opened is abandoned."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Let this request wait for memory in the engine's queue. Answered once it has it, unless the
    transfer ends before."""

    transfer_id: str
    key: str


@dataclass(frozen=True, slots=True)
class StartPull:
    """Copy `pairs` from the source's pool into ours; reported by one `PullEnded` with this seq.

    Not before the source counts `step` steps.
    """

    transfer_id: str
    seq: int
    incarnation: str
    pairs: BlockPairs
    step: int = 0


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Hurry this transfer's pulls in flight to their end. Each still reports."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Terminal: all KV of the known tokens is in the reservation; the engine may start on it."""

    transfer_id: str
    key: str
    state: HandoffState
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal: this transfer will not come. The reservation, if any, is dropped separately."""

    transfer_id: str
    key: str
    error: BatonError = field(compare=False)


@dataclass(frozen=True, slots=True)
class DropReservation:
    """Give the reserved memory back; nothing in flight writes to it any more."""

    transfer_id: str
    reservation: Reservation


PeerEvent: TypeAlias = PeerLinked | PeerLost | PeerMessage | Tick

OfferEvent: TypeAlias = Offered | Chunk | Withdrawn
SourceEvent: TypeAlias = PeerEvent | OfferEvent
SourceEffect: TypeAlias = Send | ClosePeer | ReleaseBlocks | PinPrefix

PullEvent: TypeAlias = (
    Intended | IntentCancelled | Reserved | WindowOpened | WindowFailed | PullEnded
)  # fmt: skip
PullEffect: TypeAlias = (
    OpenWindow | CloseWindow | Reserve | StartPull | CancelPull
    | Complete | Failed | DropReservation
)  # fmt: skip
PullerEvent: TypeAlias = PeerEvent | PullEvent
PullerEffect: TypeAlias = Send | ClosePeer | PullEffect
