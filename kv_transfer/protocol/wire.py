"""Between the hand-off's messages and their protobuf form. Decoding trusts nothing.

What a peer sent is bounded and checked field by field here, so that source and puller only meet
well-formed messages. Knows no stream and no framing.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection
from itertools import chain, repeat
from typing import Any, TypeVar, assert_never

from ...core.channels.addresses import HOST_ID_BYTES
from ...core.errors import HandoffFailed
from ...core.request.token_ids import BlockHash
from ...engine.execution.batch import Candidate, SampledToken
from ...engine.kv.block_pool import BlockRef
from ...proto import codec
from ...proto.v1 import handoff_pb2 as pb
from ..window.network_address import KEY_BYTES, PoolAccess
from .messages import (
    Attach,
    CancelTransfer,
    HandoffState,
    Hello,
    Manifest,
    Message,
    Release,
    Renew,
    Revoked,
)

MAX_FINGERPRINT_FIELDS = 64
MAX_TEXT_CHARS = 1024  # of a fingerprint's names and values, and of an error
MAX_RENEWALS = 16_384
MAX_BLOCKS = 1 << 20  # of a prompt, in one manifest too: 28 MiB
MAX_FORKS = 64  # samples of one prompt
MAX_CANDIDATES = 1024  # of a search of beams: its width, and all ids that may end a hypothesis
MAX_LEASE_S = 3600.0

_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_HASH_BYTES = 16
_HASH = struct.Struct(f"{_HASH_BYTES}s")
_BLOCK_ID_BYTES, _GENERATION_BYTES = 4, 8

_T = TypeVar("_T", bound=Collection[Any])


def to_wire(message: Message) -> pb.PeerMessage:
    """Encode a message of our own."""
    match message:
        case Hello():
            return pb.PeerMessage(hello=_hello_to_wire(message))
        case Attach(transfer_id, sees_steps, block_hashes):
            wanted = b"".join(block_hashes)
            attach = pb.Attach(transfer_id=transfer_id, sees_steps=sees_steps, block_hashes=wanted)
            return pb.PeerMessage(attach=attach)
        case Renew(transfer_ids):
            return pb.PeerMessage(renew=pb.Renew(transfer_ids=transfer_ids))
        case Release(transfer_id):
            return pb.PeerMessage(release=pb.Release(transfer_id=transfer_id))
        case CancelTransfer(transfer_id):
            return pb.PeerMessage(cancel=pb.CancelTransfer(transfer_id=transfer_id))
        case Manifest():
            return pb.PeerMessage(manifest=_manifest_to_wire(message))
        case Revoked(transfer_id, error):
            wire_error = codec.error_to_wire(error)
            wire_error.message = wire_error.message[:MAX_TEXT_CHARS]
            return pb.PeerMessage(revoked=pb.Revoked(transfer_id=transfer_id, error=wire_error))
        case _:
            assert_never(message)


def from_wire(wire: pb.PeerMessage) -> Message:
    """Decode a peer's message. Raises HandoffFailed if it is not one that a sane peer sends."""
    kind = wire.WhichOneof("body")
    if kind is None:
        raise HandoffFailed("a peer sent a message of no known kind")
    return _DECODERS[kind](getattr(wire, kind))


def _hello_to_wire(hello: Hello) -> pb.Hello:
    access = hello.access
    return pb.Hello(
        incarnation=hello.incarnation,
        protocol=hello.protocol,
        fingerprint=dict(hello.fingerprint),
        access=None
        if access is None
        else pb.PoolAccess(host_id=access.host_id, port=access.port, key=access.key),
    )


def _manifest_to_wire(manifest: Manifest) -> pb.Manifest:
    state = manifest.state
    block_ids = [ref.block_id for ref in manifest.blocks]
    generations = [ref.generation for ref in manifest.blocks]
    hashes = [ref.hash for ref in manifest.blocks if ref.hash is not None]
    return pb.Manifest(
        transfer_id=manifest.transfer_id,
        seq=manifest.seq,
        first_index=manifest.blocks[0].index if manifest.blocks else 0,
        block_ids=struct.pack(f"<{len(block_ids)}I", *block_ids),
        generations=struct.pack(f"<{len(generations)}Q", *generations),
        hashes=b"".join(hashes),
        num_tokens=manifest.num_tokens,
        step=manifest.step,
        lease_remaining_us=int(manifest.lease_remaining_s * 1e6),
        state=None
        if state is None
        else pb.HandoffState(
            num_blocks=state.num_blocks,
            first_token_id=state.first_token_id,
            fork_token_ids=state.fork_token_ids,
            candidates=None if state.first is None else _candidates_to_wire(state.first),
        ),
    )


def _candidates_to_wire(first: SampledToken) -> pb.Candidates:
    return pb.Candidates(
        token_ids=[one.token_id for one in first.candidates],
        scores=[one.score for one in first.candidates],
        logprobs=[one.logprob for one in first.candidates],
        top_ids=[token_id for token_id, _ in first.top],
        top_logprobs=[logprob for _, logprob in first.top],
    )


def _hello(wire: pb.Hello) -> Hello:
    fields = _at_most(MAX_FINGERPRINT_FIELDS, wire.fingerprint)
    fingerprint = {_text(name): _text(value) for name, value in fields.items()}
    access = _access(wire.access) if wire.HasField("access") else None
    return Hello(_id(wire.incarnation), fingerprint, wire.protocol, access)


def _access(wire: pb.PoolAccess) -> PoolAccess:
    lengths = (len(wire.host_id), len(wire.key))
    if lengths != (HOST_ID_BYTES, KEY_BYTES) or wire.port >= 65_536:
        raise HandoffFailed("a peer sent an access that makes no sense")
    return PoolAccess(wire.host_id, wire.port, wire.key)


def _attach(wire: pb.Attach) -> Attach:
    return Attach(_id(wire.transfer_id), wire.sees_steps, tuple(_hashes(wire.block_hashes)))


def _hashes(packed: bytes) -> list[BlockHash]:
    if len(packed) % _HASH_BYTES or len(packed) > MAX_BLOCKS * _HASH_BYTES:
        raise HandoffFailed(f"a peer sent {len(packed)} bytes of hashes")
    return [each for (each,) in _HASH.iter_unpack(packed)]


def _renew(wire: pb.Renew) -> Renew:
    return Renew(tuple(_id(each) for each in _at_most(MAX_RENEWALS, wire.transfer_ids)))


def _manifest(wire: pb.Manifest) -> Manifest:
    lease_s = wire.lease_remaining_us / 1e6
    if lease_s > MAX_LEASE_S:
        raise HandoffFailed(f"a peer sent a lease of {lease_s:.0f} s")
    state = None
    if wire.HasField("state"):
        forks = tuple(_at_most(MAX_FORKS, wire.state.fork_token_ids))
        first = _candidates(wire.state.candidates) if wire.state.HasField("candidates") else None
        state = HandoffState(wire.state.num_blocks, wire.state.first_token_id, forks, first)
    return Manifest(
        _id(wire.transfer_id),
        wire.seq,
        _blocks(wire),
        wire.num_tokens,
        lease_s,
        state,
        wire.step,
    )


def _candidates(wire: pb.Candidates) -> SampledToken:
    ids = _at_most(MAX_CANDIDATES, wire.token_ids)
    top_ids = _at_most(MAX_CANDIDATES, wire.top_ids)
    is_whole = len(ids) == len(wire.scores) == len(wire.logprobs)
    if not ids or not is_whole or len(top_ids) != len(wire.top_logprobs):
        raise HandoffFailed("a peer sent candidates whose columns differ")
    if any(map(math.isnan, (*wire.scores, *wire.logprobs))):
        raise HandoffFailed("a peer sent candidates whose scores are not numbers")
    candidates = tuple(map(Candidate, ids, wire.scores, wire.logprobs))
    top = tuple(zip(top_ids, wire.top_logprobs, strict=True))
    return SampledToken(candidates[0].token_id, candidates[0].logprob, top, candidates=candidates)


def _blocks(wire: pb.Manifest) -> tuple[BlockRef, ...]:
    """The columns as rows; the last block alone may be without a hash."""
    count, rest = divmod(len(wire.block_ids), _BLOCK_ID_BYTES)
    num_hashes, hash_rest = divmod(len(wire.hashes), _HASH_BYTES)
    is_whole = not rest and not hash_rest and len(wire.generations) == count * _GENERATION_BYTES
    if not is_whole or not count - 1 <= num_hashes <= count:
        raise HandoffFailed("a peer sent a manifest whose columns do not fit each other")
    if count > MAX_BLOCKS or wire.first_index > MAX_BLOCKS:
        raise HandoffFailed(f"a peer sent {count} blocks from {wire.first_index} on")
    block_ids = struct.unpack(f"<{count}I", wire.block_ids)
    generations = struct.unpack(f"<{count}Q", wire.generations)
    hashes = [packed for (packed,) in _HASH.iter_unpack(wire.hashes)]
    indices = range(wire.first_index, wire.first_index + count)
    columns = (indices, block_ids, generations, chain(hashes, repeat(None)))
    return tuple(map(BlockRef._make, zip(*columns)))  # noqa: B905  # the last has no end


def _revoked(wire: pb.Revoked) -> Revoked:
    for text in (wire.error.code, wire.error.message, wire.error.param):
        _text(text)
    return Revoked(_id(wire.transfer_id), codec.error_from_wire(wire.error))


def _id(text: str) -> str:
    if not _ID.fullmatch(text):
        raise HandoffFailed("a peer sent an id that is not 32 hex digits")
    return text


def _text(text: str) -> str:
    _at_most(MAX_TEXT_CHARS, text)
    return text


def _at_most(limit: int, items: _T) -> _T:
    if len(items) > limit:
        raise HandoffFailed(f"a peer sent {len(items)} items where {limit} are allowed")
    return items


_DECODERS: dict[str, Callable[[Any], Message]] = {
    "hello": _hello,
    "attach": _attach,
    "renew": _renew,
    "release": lambda wire: Release(_id(wire.transfer_id)),
    "cancel": lambda wire: CancelTransfer(_id(wire.transfer_id)),
    "manifest": _manifest,
    "revoked": _revoked,
}
