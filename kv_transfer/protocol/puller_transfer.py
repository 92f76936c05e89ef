"""One transfer as the puller keeps it: how far it is, and which manifests of it have come.

Plain bookkeeping: what an event changes is decided in puller.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import BatonError, DeadlineExceeded, HandoffFailed, NodeLost
from ...core.request.token_ids import BlockHash
from .events import Intended, Reserved
from .messages import HandoffState, Manifest


class ManifestSequence:
    """The manifests of one transfer: in order, gap-free, of the prompt that the puller knows.

    `block_hashes` are those of the full blocks; `num_blocks` counts the partial last one too.
    """

    def __init__(self, block_hashes: Sequence[BlockHash], num_blocks: int) -> None:
        self._block_hashes = block_hashes
        self._num_blocks = num_blocks
        self._next_seq = 0
        self._next_index = 0
        self.state: HandoffState | None = None  # set by the last manifest

    @property
    def is_complete(self) -> bool:
        return self.state is not None

    def accept(self, manifest: Manifest) -> bool:
        """Take in the next manifest; False for a double of an earlier one, which changes nothing.

        Raises HandoffFailed on a gap, on another prompt's blocks, or if the end does not fit.
        """
        if manifest.seq < self._next_seq:
            return False
        if self.is_complete:
            raise HandoffFailed(f"manifest {manifest.seq} came after the last one")
        if manifest.seq > self._next_seq:
            raise HandoffFailed(f"manifest {manifest.seq} came where {self._next_seq} was due")
        for index, ref in enumerate(manifest.blocks, start=self._next_index):
            if ref.index != index or index >= self._num_blocks:
                raise HandoffFailed(f"block {ref.index} was announced where {index} was due")
            if ref.hash != self._expected_hash(index):
                raise HandoffFailed(f"block {index} holds another prompt's KV")
        self._check_end(manifest)
        self._next_seq += 1
        self._next_index += len(manifest.blocks)
        self.state = manifest.state
        return True

    def _expected_hash(self, index: int) -> BlockHash | None:
        return self._block_hashes[index] if index < len(self._block_hashes) else None

    def _check_end(self, manifest: Manifest) -> None:
        state = manifest.state
        if state is None:
            return
        announced = self._next_index + len(manifest.blocks)
        if not announced == state.num_blocks == self._num_blocks:
            raise HandoffFailed(
                f"{announced} blocks were announced and {state.num_blocks} promised, "
                f"but the prompt has {self._num_blocks}"
            )


class PullerState(enum.Enum):
    """Of one transfer. Memory is taken late: only when there is something to pull.

    Intended     pair ready     first manifest    Reserved     all is pulled
    ───────► WAITING ────► ATTACHED ────► QUEUED ────► PULLING ────► Complete
                │              │             │            │
                └──────────────┴─────────────┴────────────┤ given up: Failed at once,
                                                          │ or silence if it was cancelled
                         copies in flight ┌───────────────┤
                                          ▼               │ none in flight
                                       ENDING ────────────┴───► DropReservation, if reserved
                                              last one ended
    """

    WAITING = "waiting"  # the pair is not ready; no Attach was sent
    ATTACHED = "attached"  # the source computes; no manifest yet
    QUEUED = "queued"  # there is something to pull and nowhere to put it
    PULLING = "pulling"  # reserved; chunks are copied as they are announced
    ENDING = "ending"  # given up, but copies in flight still write to the reservation


@dataclass(slots=True)
class PullerTransfer:
    """`expires_s` is on the monotonic clock, as all times here."""

    intent: Intended
    manifests: ManifestSequence
    state: PullerState
    expires_s: float | None  # None when ending: the fence lasts as long as the copies
    unpulled: list[Manifest] = field(default_factory=list)  # announced before there was memory
    reservation: Reserved | None = None
    in_flight: set[int] = field(default_factory=set)  # manifests whose pulls have not ended
    num_pulled_blocks: int = 0
    is_orphaned: bool = False  # the source is lost, but all that is needed was under way

    @property
    def source(self) -> str:
        return self.intent.ticket.source_incarnation

    def ledger(self, now_s: float) -> dict[str, object]:
        """JSON-able."""
        return {
            "state": self.state.value,
            "key": self.intent.key,
            "source": self.source,
            "is_reserved": self.reservation is not None,
            "num_pulls_in_flight": len(self.in_flight),
            "expires_in_s": None if self.expires_s is None else self.expires_s - now_s,
        }

    def expiry(self, now_s: float) -> BatonError:
        """What it fails with when `expires_s` has come."""
        if now_s >= self.intent.deadline_s:
            return DeadlineExceeded("the deadline passed before the KV was here")
        return NodeLost("no link to the source came up in time")
