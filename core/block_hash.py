"""The chained hash of full KV blocks: what makes two blocks on two machines the same block.

    root    = blake2b(model fingerprint, cache salt)          the salt carries tenant and adapter
    hash[i] = blake2b(hash[i-1] or root, token ids of block i as little-endian int32)

A hash covers everything its block's KV depends on. 128 bits, stable across processes and hosts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

_SIZE_BYTES = 16


def root_hash(fingerprint: str, cache_salt: str = "") -> BlockHash:
    """The hash before the first block."""
    salted = f"{len(fingerprint)}:{fingerprint}{cache_salt}".encode()
    return BlockHash(hashlib.blake2b(salted, digest_size=_SIZE_BYTES).digest())


def block_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids` behind `root`, which may be a block's hash too.

    A partial last block has none.
    """
    hashes: list[BlockHash] = []
    parent, block_bytes = root, 4 * block_size
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    for start in range(0, len(packed) - block_bytes + 1, block_bytes):
        content = parent + packed[start : start + block_bytes]
        parent = BlockHash(hashlib.blake2b(content, digest_size=_SIZE_BYTES).digest())
        hashes.append(parent)
    return hashes
