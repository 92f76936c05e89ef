"""The messages between the source and the puller of a hand-off, encoded as MessagePack.

`decode` trusts nothing: it checks and bounds each field, so that source and puller only process
well-formed messages. Knows no stream and no framing.
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
MAX_BLOCKS = 1 << 20  # of a prompt, and of one manifest: 28 MiB
MAX_CANDIDATES = 1024  # of a beam search: its width plus all ids that may end a hypothesis

_Id: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
_Number: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Hash: TypeAlias = Annotated[BlockHash, Meta(min_length=16, max_length=16)]
_LeaseS: TypeAlias = Annotated[float, Meta(ge=0.0, le=3600.0)]


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Tagged with its kind."""


class Hello(_Message, frozen=True):
    """The first message in both directions: the sender, and what must be equal on both sides.

    `fingerprint` is compared field by field. Only a source sends `access`.
    """

    incarnation: _Id
    fingerprint: Annotated[Mapping[_Text, _Text], Meta(max_length=64)]
    protocol: int = PROTOCOL
    access: PoolAccess | None = None


class Attach(_Message, frozen=True):
    """Puller to source: requests the manifests of this transfer, for which it holds the ticket.

    `sees_steps`: the puller can read when a step has completed, so manifests may be sent of chunks
    whose step was only launched. `block_hashes`: if given, there is no ticket, and the puller
    requests all blocks with these hashes out of the source's prefix cache.
    """

    transfer_id: _Id
    sees_steps: bool = False
    block_hashes: Annotated[tuple[_Hash, ...], Meta(max_length=MAX_BLOCKS)] = ()


class Renew(_Message, frozen=True):
    """Puller to source: restarts the leases of these transfers."""

    transfer_ids: Annotated[tuple[_Id, ...], Meta(max_length=MAX_RENEWALS)]


class Release(_Message, frozen=True):
    """Puller to source: the puller has everything, or gave up. The source may reuse the blocks, and
    need not compute the rest of the prompt."""

    transfer_id: _Id


class HandoffState(msgspec.Struct, frozen=True):
    """What the puller needs to continue as if it had computed the prompt itself."""

    first_token_id: _Number = 0  # of a prompt; a prefix has none
    # The first tokens of the dispatch's further samples.
    fork_token_ids: Annotated[tuple[_Number, ...], Meta(max_length=64)] = ()
    first: SampledToken | None = None  # of a beam search, which has no first token yet
    first_undrafted: _Number | None = None  # the first block that lacks the draft model's KV


class Manifest(_Message, frozen=True):
    """Source to puller: one chunk of the prompt. `seq` counts from 0 without gaps.

    `blocks` continue the sequence where the previous manifest ended. They are complete once the
    source has completed `step` steps (0: already). `state` is set in the last manifest.
    """

    transfer_id: _Id
    seq: _Number
    blocks: BlockRefs
    lease_remaining_s: _LeaseS
    state: HandoffState | None = None
    step: Annotated[int, Meta(ge=0)] = 0


class Revoked(_Message, frozen=True):
    """Source to puller: the transfer is over at the source, which may rewrite its blocks."""

    transfer_id: _Id
    error: BatonError


class Refused(_Message, frozen=True):
    """The last message in either direction: why the sender ends the stream."""

    error: BatonError


Message: TypeAlias = Hello | Attach | Renew | Release | Manifest | Revoked


def encode(message: Message | Refused) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message | Refused:
    """Raises HandoffFailed if `payload` is not what a correct peer sends."""
    try:
        message: Message | Refused = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoffFailed(f"a peer sent an invalid message: {error}"[:MAX_TEXT_CHARS]) from error
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
# Created at import: msgspec crashes when two threads use a type for the first time.
_decoder = msgspec.msgpack.Decoder(Message | Refused, dec_hook=_unpack_error)
