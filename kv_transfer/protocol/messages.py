"""What source and puller of a hand-off send each other: MessagePack, by these names.

Decoding trusts nothing: what a peer sent is bounded and checked field by field, so that source and
puller only meet well-formed messages. Knows no stream and no framing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from ...core.errors import BatonError, HandoffFailed, from_code
from ...core.request.token_ids import BlockHash
from ...engine.execution.batch import SampledToken
from ...engine.kv.block_pool import BlockRefs
from ..window.network_address import PoolAccess

PROTOCOL = 7
MAX_TEXT_CHARS = 1024  # of a fingerprint's names and values, and of an error
MAX_RENEWALS = 16_384
MAX_BLOCKS = 1 << 20  # of a prompt, in one manifest too: 28 MiB
MAX_CANDIDATES = 1024  # of a search of beams: its width, and all ids that may end a hypothesis

_Id: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Hash: TypeAlias = Annotated[BlockHash, Meta(min_length=16, max_length=16)]
_LeaseS: TypeAlias = Annotated[float, Meta(ge=0.0, le=3600.0)]


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Its kind goes with it."""


class Hello(_Message, frozen=True):
    """Both ways, first: the sender, and everything that must be equal on both sides."""

    incarnation: _Id
    # Field -> value, compared field by field.
    fingerprint: Annotated[Mapping[_Text, _Text], Meta(max_length=64)]
    protocol: int = PROTOCOL
    access: PoolAccess | None = None  # of a source


class Attach(_Message, frozen=True):
    """Puller to source: send me this transfer's manifests, I hold the ticket.

    `sees_steps`: also of chunks whose step you have launched, I see when it has completed.
    `block_hashes`: where given, there is no ticket: all blocks of these hashes are wanted, out of
    your prefix cache.
    """

    transfer_id: _Id
    sees_steps: bool = False
    block_hashes: Annotated[tuple[_Hash, ...], Meta(max_length=MAX_BLOCKS)] = ()


class Renew(_Message, frozen=True):
    """Puller to source: all my leases at you begin anew."""

    transfer_ids: Annotated[tuple[_Id, ...], Meta(max_length=MAX_RENEWALS)]


class Release(_Message, frozen=True):
    """Puller to source: I need no more of it, be it that I have everything. The blocks are yours
    again, and what is not computed yet need not be for me."""

    transfer_id: _Id


class HandoffState(msgspec.Struct, frozen=True):
    """What the puller needs to go on as if it had computed the prompt itself."""

    first_token_id: _Number = 0  # of a prompt; a prefix has none
    # The first tokens of the dispatch's further samples.
    fork_token_ids: Annotated[tuple[_Number, ...], Meta(max_length=64)] = ()
    first: SampledToken | None = None  # of a search of beams, which has no first token yet
    first_undrafted: _Number | None = None  # of the blocks: it lacks the draft model's KV


class Manifest(_Message, frozen=True):
    """Source to puller: one chunk. `seq` counts from 0 without gaps.

    `blocks` continue the sequence where the manifest before ended. They are finished once the
    source counts `step` steps, 0: already. `state` is set on the last one, behind the last step.
    """

    transfer_id: _Id
    seq: _Number
    blocks: BlockRefs
    lease_remaining_s: _LeaseS
    state: HandoffState | None = None
    step: Annotated[int, Meta(ge=0)] = 0


class Revoked(_Message, frozen=True):
    """Source to puller: this is over on my side; its blocks may be rewritten any moment."""

    transfer_id: _Id
    error: BatonError


class Refused(_Message, frozen=True):
    """Both ways, the last one: why the sender ends the stream."""

    error: BatonError


Message: TypeAlias = Hello | Attach | Renew | Release | Manifest | Revoked


def encode(message: Message | Refused) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message | Refused:
    """Raises HandoffFailed if it is not one that a sane peer sends."""
    try:
        message: Message | Refused = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoffFailed(f"a peer sent no message: {error}"[:MAX_TEXT_CHARS]) from error
    if isinstance(message, Manifest):
        if len(message.blocks) > MAX_BLOCKS:
            raise HandoffFailed(f"a peer sent {len(message.blocks)} blocks")
        if message.state is not None:
            _check_candidates(message.state.first)
    return message


def _check_candidates(first: SampledToken | None) -> None:
    if first is None:
        return
    if not 1 <= len(first.candidates) <= MAX_CANDIDATES or len(first.top) > MAX_CANDIDATES:
        raise HandoffFailed(f"a peer sent {len(first.candidates)} candidates")
    if any(math.isnan(each) for one in first.candidates for each in (one.score, one.logprob)):
        raise HandoffFailed("a peer sent candidates whose scores are not numbers")


def _pack_error(error: Any) -> tuple[str, str, str | None]:
    if not isinstance(error, BatonError):
        raise NotImplementedError(f"a message has a {type(error).__name__} in it")
    return error.code, error.message[:MAX_TEXT_CHARS], error.param


def _unpack_error(_: type, packed: Any) -> BatonError:
    return from_code(*msgspec.convert(packed, tuple[_Text, _Text, _Text | None]))


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_error)
# Made once, here: two threads that meet a type for the first time crash msgspec.
_decoder = msgspec.msgpack.Decoder(Message | Refused, dec_hook=_unpack_error)
