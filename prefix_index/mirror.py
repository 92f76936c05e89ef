"""A gateway's copy of the prefix caches of all linked engines, kept up to date by index messages.

The pages of an engine are read when it is new, and when a message was lost (engine_copy.py). The
copy is a hint: a wrong one makes a prefill longer and changes no token. `PrefixMirror` is pure
state; follower.py feeds it from Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from ..core.ports import Clock
from ..core.request.token_ids import BlockHash
from .engine_copy import EngineCopy
from .messages import BadMessage, decode

STALE_S = 60.0  # without a message for so long, an engine counts as empty

_STRIDE = 64


class PrefixMirror:
    """The engines are those between `add` and `remove`: messages of others are dropped, like any
    that cannot be decoded.

    `copies`: by incarnation. `added` is set when there are engines whose pages were never read.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.copies: dict[str, EngineCopy] = {}
        self._new: list[str] = []
        self.added = asyncio.Event()

    def add(self, incarnation: str, num_blocks: int) -> None:
        """Start to mirror an engine that can cache at most `num_blocks` blocks, over all tiers."""
        self.copies[incarnation] = EngineCopy(num_blocks, self.clock.monotonic_s())
        self._new.append(incarnation)
        self.added.set()

    def remove(self, incarnation: str) -> None:
        self.copies.pop(incarnation, None)

    def take_new(self) -> list[str]:
        """Engines that were added since the last call and not removed."""
        new, self._new = self._new, []
        self.added.clear()
        return [incarnation for incarnation in new if incarnation in self.copies]

    # -- messages in ---------------------------------------------------------------------------

    def take(self, raw: bytes) -> str | None:
        """Apply a raw message; returns the engine whose pages must be read, if any."""
        try:
            message = decode(raw)
        except BadMessage:
            return None
        copy = self.copies.get(message.incarnation)
        if copy is None:
            return None
        is_to_read = copy.take(message, self.clock.monotonic_s())
        return message.incarnation if is_to_read else None

    # -- lookups -------------------------------------------------------------------------------

    def holds_any(self, incarnations: Iterable[str], hashes: Sequence[BlockHash]) -> bool:
        """Whether one of these engines has cached anything, including all of `hashes`."""
        return any(cached.issuperset(hashes) for _, cached in self._fresh(incarnations))

    def cached_blocks(
        self, incarnations: Iterable[str], hashes: Sequence[BlockHash]
    ) -> Mapping[str, int]:
        """How many first blocks of the chain `hashes` each of these engines has."""
        fresh = self._fresh(incarnations)
        return {incarnation: _length_in(cached, hashes) for incarnation, cached in fresh}

    def counts(self, incarnation: str) -> tuple[int, int] | None:
        """Blocks on the engine's device, and in its host memory only; None: unknown engine."""
        copy = self.copies.get(incarnation)
        if copy is None:
            return None
        return len(copy.hashes) - len(copy.in_host), len(copy.in_host)

    def num_on_device(self, incarnation: str, hashes: Sequence[BlockHash]) -> int:
        """How many of `hashes`, all cached by this engine, come before the first one that is in its
        host memory only: from there on they must be copied to the device, and no other engine can
        fetch them."""
        copy = self.copies.get(incarnation)
        if copy is None or copy.in_host.isdisjoint(hashes):
            return len(hashes)
        return next(i for i, each in enumerate(hashes) if each in copy.in_host)

    def _fresh(self, incarnations: Iterable[str]) -> Iterable[tuple[str, set[BlockHash]]]:
        """Of these engines, the copies that are neither empty nor stale."""
        oldest_s = self.clock.monotonic_s() - STALE_S
        for incarnation in incarnations:
            copy = self.copies.get(incarnation)
            if copy is not None and copy.hashes and copy.received_s >= oldest_s:
                yield incarnation, copy.hashes


def _length_in(cached: set[BlockHash], hashes: Sequence[BlockHash]) -> int:
    """The position of the first hash that is not in `cached`.

    Chains are evicted from their end, so that between two cached blocks nearly always all are
    cached: in a long chain, only the last block of each stride is looked up first.
    """
    if not hashes or hashes[0] not in cached:
        return 0
    ends = hashes[_STRIDE - 1 :: _STRIDE]
    start = _STRIDE * next((i for i, each in enumerate(ends) if each not in cached), len(ends))
    rest = (i for i in range(start, len(hashes)) if hashes[i] not in cached)
    return next(rest, len(hashes))
