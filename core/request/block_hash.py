"""The chained hash of full KV blocks: what makes two blocks on two machines the same block.

    root    = blake2b(model fingerprint, cache salt)          the salt carries tenant and adapter
    hash[i] = blake2b(hash[i-1] or root, token ids of block i as little-endian uint32)

A hash covers everything its block's KV depends on. 128 bits, stable across processes and hosts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import NewType, cast

from .token_ids import NUM_BYTES, pack

BlockHash = NewType("BlockHash", bytes)

_SIZE_BYTES = 16


def root_hash(fingerprint: str, cache_salt: str = "") -> BlockHash:
    """The hash before the first block."""
    salted = f"{len(fingerprint)}:{fingerprint}{cache_salt}".encode()
    return BlockHash(hashlib.blake2b(salted, digest_size=_SIZE_BYTES).digest())


def block_hashes(root: BlockHash, token_ids: Iterable[int], block_size: int) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids` behind `root`, which may be a block's hash too.

    A partial last block has none.
    """
    packed, block_bytes = pack(token_ids), NUM_BYTES * block_size
    full = packed[: len(packed) // block_bytes * block_bytes]
    fresh = hashlib.blake2b(digest_size=_SIZE_BYTES).copy  # twice as fast as to make a new one
    hashes: list[bytes] = []
    parent: bytes = root
    for (block,) in struct.iter_unpack(f"{block_bytes}s", full):
        block_hash = fresh()
        block_hash.update(parent + block)
        parent = block_hash.digest()
        hashes.append(parent)
    return cast(list[BlockHash], hashes)
