"""What source and puller of a hand-off send each other: named as in proto/v1/handoff.proto.

Plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ...core.errors import BatonError
from ...core.request.token_ids import BlockHash
from ...engine.execution.batch import SampledToken
from ...engine.kv.block_pool import BlockRef
from ..window.network_address import PoolAccess

PROTOCOL = 4


@dataclass(frozen=True, slots=True)
class Hello:
    """Both ways, first: the sender, and everything that must be equal on both sides."""

    incarnation: str
    fingerprint: Mapping[str, str]  # field -> value, compared field by field
    protocol: int = PROTOCOL
    access: PoolAccess | None = field(default=None, repr=False)  # of a source; holds a key


@dataclass(frozen=True, slots=True)
class Attach:
    """Puller to source: send me this transfer's manifests, I hold the ticket.

    `sees_steps`: also of chunks whose step you have launched, I see when it has completed.
    `block_hashes`: where given, there is no ticket: all blocks of these hashes are wanted, out of
    your prefix cache.
    """

    transfer_id: str
    sees_steps: bool = False
    block_hashes: tuple[BlockHash, ...] = ()


@dataclass(frozen=True, slots=True)
class Renew:
    """Puller to source: all my leases at you begin anew."""

    transfer_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Puller to source: I have everything, the blocks are yours again."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Puller to source: I will not take this, do not compute it for me."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class HandoffState:
    """What the puller needs to go on as if it had computed the prompt itself."""

    num_blocks: int  # of the whole sequence
    first_token_id: int = 0  # of a prompt; a prefix has none
    fork_token_ids: tuple[int, ...] = ()  # the first tokens of the dispatch's further samples
    first: SampledToken | None = None  # of a search of beams, which has no first token yet


@dataclass(frozen=True, slots=True)
class Manifest:
    """Source to puller: one chunk. `seq` counts from 0 without gaps.

    `blocks` continue the sequence where the manifest before ended. They are finished once the
    source counts `step` steps, 0: already. `state` is set on the last one, behind the last step.
    """

    transfer_id: str
    seq: int
    blocks: tuple[BlockRef, ...]
    num_tokens: int  # whose KV is complete after this chunk
    lease_remaining_s: float
    state: HandoffState | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class Revoked:
    """Source to puller: this is over on my side; its blocks may be rewritten any moment."""

    transfer_id: str
    error: BatonError = field(compare=False)


Message: TypeAlias = Hello | Attach | Renew | Release | CancelTransfer | Manifest | Revoked
