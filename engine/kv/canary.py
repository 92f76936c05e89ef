"""The pattern that proves a pool was opened rightly.

The canary block is written once at start; a puller copies it and compares before it trusts the
window. Knows no pool and no transport: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib


def canary_bytes(incarnation: str, block_bytes: int) -> bytes:
    """What the canary block of `incarnation` holds: a stream in which every position differs.

    A wrong offset, stride, length, byte order or process therefore shows as a difference.
    """
    return hashlib.shake_128(f"baton canary {incarnation}".encode()).digest(block_bytes)
