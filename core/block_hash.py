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


def next_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of the full block that holds `token_ids` behind `parent`."""
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return BlockHash(hashlib.blake2b(parent + packed, digest_size=_SIZE_BYTES).digest())


def block_hashes(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`; a partial last block has none."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = next_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
