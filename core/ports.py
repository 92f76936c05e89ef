"""Time and randomness, as values that tests and simulations replace.

Control-plane code (session, routing, leases, membership, tickets, schedulers) uses them only
through these, and Redis through `membership.Directory`, so the production code runs unmodified in a
simulation, which overrides the methods. Fakes are in tests/fakes.
"""

from __future__ import annotations

import secrets
import time


class Clock:
    """The process's two clocks. Leases and deadlines use the monotonic one; only display uses wall
    time, which is anchored once, so a process's stamps never go back."""

    monotonic_s = staticmethod(time.monotonic)  # called for each token

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def unix_ns(self) -> int:
        return time.monotonic_ns() + self._offset_ns


class Entropy:
    """The operating system's randomness: identifiers and sampling seeds."""

    def new_id(self) -> str:
        """128 random bits as 32 lowercase hex digits."""
        return secrets.token_hex(16)

    def new_seed(self) -> int:
        """A seed in [0, 2**63)."""
        return secrets.randbits(63)
