"""The reserved blocks, and the pattern that proves a pool was opened rightly.

    block 0   padding: where the KV of padding tokens goes; its content means nothing
    block 1   canary: written once at start; a puller copies it and compares before it trusts

Knows no pool and no transport: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib

PADDING_BLOCK = 0
CANARY_BLOCK = 1
NUM_RESERVED_BLOCKS = 2


def canary_bytes(incarnation: str, block_bytes: int) -> bytes:
    """What the canary block of `incarnation` holds: a stream in which every position differs.

    A wrong offset, stride, length, byte order or process therefore shows as a difference.
    """
    return hashlib.shake_128(f"baton canary {incarnation}".encode()).digest(block_bytes)
