"""Token ids as a column of uint32, `array("I")`: the form of a prompt from the wire to the device.

Python objects would cost milliseconds: 32k ids as a tuple take 0.4 ms to make and as long to read.
A column is copied in 10 us, and numpy reads it without a copy.

The chained hash of full KV blocks identifies equal blocks on different hosts:

    root    = blake2b(model fingerprint, cache salt, adapter)     the salt carries the tenant
    hash[i] = blake2b(hash[i-1] or root, token ids of block i as little-endian uint32)

A hash covers everything that its block's KV depends on. It has 128 bits and is the same in all
processes and hosts. Its first 32 bits are the tenant's tag, the same in all the tenant's blocks, so
that a list of hashes shows their owners; two tenants with the same tag still share no hash.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from array import array
from collections.abc import Iterable
from typing import NewType, cast

BlockHash = NewType("BlockHash", bytes)


class Tier(enum.IntEnum):
    """Where an engine has the KV of a block, best last."""

    NOWHERE = 0
    HOST = 1  # in host memory only
    DEVICE = 2


NUM_BYTES = 4  # of an id
HASH_BYTES = 16
TAG_BYTES = 4
TAG_DIGITS = 8  # the first ones of a salt, which are the tenant's
NO_TENANT = bytes(TAG_BYTES)


def column(token_ids: Iterable[int] = ()) -> array[int]:
    """A new column. Raises TypeError or OverflowError for an id that is no uint32."""
    if isinstance(token_ids, bytes | bytearray):
        token_ids = list(token_ids)  # as numbers: array() would copy raw memory
    return array("I", token_ids)


def pack(token_ids: Iterable[int]) -> bytes:
    """The ids as little-endian uint32. Raises as `column` does."""
    return column(token_ids).tobytes()  # Baton runs on little-endian machines only


def salted(cache_salt: str, adapter: str) -> str:
    """Salt and adapter in one text: KV depends on them, on the model and on the tokens."""
    return f"{cache_salt}\0{adapter}" if adapter else cache_salt  # no salt has a NUL


def tenant_tag(cache_salt: str) -> bytes:
    """The first bytes of all hashes under this salt."""
    if not cache_salt:
        return NO_TENANT
    return hashlib.blake2b(cache_salt[:TAG_DIGITS].encode(), digest_size=TAG_BYTES).digest()


def root_hash(fingerprint: str, cache_salt: str = "", adapter: str = "") -> BlockHash:
    """The hash before the first block. `adapter`: the digest of the request's adapter, or empty."""
    text = f"{len(fingerprint)}:{fingerprint}{salted(cache_salt, adapter)}"
    digest = hashlib.blake2b(text.encode(), digest_size=HASH_BYTES - TAG_BYTES).digest()
    return BlockHash(tenant_tag(cache_salt) + digest)


def block_hashes(root: BlockHash, token_ids: Iterable[int], block_size: int) -> list[BlockHash]:
    """The hashes of the full blocks of `token_ids` after `root`, which may be a block's hash."""
    packed, block_bytes = pack(token_ids), NUM_BYTES * block_size
    full = packed[: len(packed) // block_bytes * block_bytes]
    # Copying a hasher takes half the time of making one.
    fresh = hashlib.blake2b(digest_size=HASH_BYTES - TAG_BYTES).copy
    hashes: list[bytes] = []
    parent: bytes = root
    tag = root[:TAG_BYTES]
    for (block,) in struct.iter_unpack(f"{block_bytes}s", full):
        block_hash = fresh()
        block_hash.update(parent + block)
        parent = tag + block_hash.digest()
        hashes.append(parent)
    return cast(list[BlockHash], hashes)
