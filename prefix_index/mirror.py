"""A gateway's copy of what every linked engine has cached, kept up by the index's messages.

A new engine's pages are read at once, and those of one of which something was lost
(engine_copy.py). All of this is hints: a wrong one makes a prompt's prefill longer and changes no
token. `PrefixMirror` is pure state; follower.py feeds it from the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from ..core.ports import Clock
from ..core.request.token_ids import BlockHash
from .engine_copy import EngineCopy
from .messages import BadMessage, decode
from .pages import Contents

STALE_S = 60.0  # an engine of which no message came for so long counts as empty

_STRIDE = 64


class PrefixMirror:
    """Engines come and go by `add` and `remove`: messages of any other are dropped, as junk is.

    `added` is set when there are engines of which nothing was read yet.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._copies: dict[str, EngineCopy] = {}
        self._new: list[str] = []
        self.added = asyncio.Event()

    def add(self, incarnation: str, num_blocks: int) -> None:
        """Begin to mirror an engine that can cache at most `num_blocks` blocks, in all tiers."""
        self._copies[incarnation] = EngineCopy(num_blocks, self.clock.monotonic_s())
        self._new.append(incarnation)
        self.added.set()

    def remove(self, incarnation: str) -> None:
        self._copies.pop(incarnation, None)

    def take_new(self) -> list[str]:
        """Engines that were added since the last call, and are still there."""
        new, self._new = self._new, []
        self.added.clear()
        return [incarnation for incarnation in new if incarnation in self._copies]

    # -- messages in ---------------------------------------------------------------------------

    def take(self, raw: bytes) -> str | None:
        """Take a message as it came; returns the engine whose pages are to be read, if any."""
        try:
            message = decode(raw)
        except BadMessage:
            return None
        copy = self._copies.get(message.incarnation)
        if copy is None:
            return None
        is_to_read = copy.take(message, self.clock.monotonic_s())
        return message.incarnation if is_to_read else None

    def wants(self, contents: Contents) -> bool:
        """Whether these pages are worth reading: more than is known, and no more than can be."""
        copy = self._copies.get(contents.incarnation)
        return copy is not None and copy.wants(contents)

    def install(self, contents: Contents, hashes: set[BlockHash], in_host: set[BlockHash]) -> None:
        """Replace the copy by pages that were read whole; the sets are ours from now on. Those
        `in_host`, which are among `hashes`, are in host memory alone."""
        copy = self._copies.get(contents.incarnation)
        if copy is not None:
            copy.install(contents, hashes, in_host, self.clock.monotonic_s())

    # -- questions -----------------------------------------------------------------------------

    def holds_any(self, incarnations: Iterable[str], hashes: Sequence[BlockHash]) -> bool:
        """Whether one of these engines has anything, and all of `hashes` among it."""
        return any(cached.issuperset(hashes) for _, cached in self._fresh(incarnations))

    def cached_blocks(
        self, incarnations: Iterable[str], hashes: Sequence[BlockHash]
    ) -> Mapping[str, int]:
        """How many blocks of the chain `hashes` each of these engines has, from the first on."""
        fresh = self._fresh(incarnations)
        return {incarnation: _length_in(cached, hashes) for incarnation, cached in fresh}

    def counts(self, incarnation: str) -> tuple[int, int] | None:
        """Blocks on this engine's device, and in its host memory alone; None: it is not known."""
        copy = self._copies.get(incarnation)
        if copy is None:
            return None
        return len(copy.hashes) - len(copy.in_host), len(copy.in_host)

    def first_in_host(self, incarnation: str, hashes: Sequence[BlockHash]) -> int | None:
        """The first position of `hashes`, which this engine has, that is in its host memory alone:
        from there on they must be copied to its device, and others cannot fetch them."""
        copy = self._copies.get(incarnation)
        if copy is None or copy.in_host.isdisjoint(hashes):
            return None
        return next(i for i, each in enumerate(hashes) if each in copy.in_host)

    def _fresh(self, incarnations: Iterable[str]) -> Iterable[tuple[str, set[BlockHash]]]:
        """The copies of these engines that are worth a look: not empty, not stale."""
        oldest_s = self.clock.monotonic_s() - STALE_S
        for incarnation in incarnations:
            copy = self._copies.get(incarnation)
            if copy is not None and copy.hashes and copy.received_s >= oldest_s:
                yield incarnation, copy.hashes


def _length_in(cached: set[BlockHash], hashes: Sequence[BlockHash]) -> int:
    """The position of the first hash that is not in `cached`.

    Between two blocks of a chain that are there all are, but for rare cases, since chains are
    evicted from their end: of a long one the last block of each stride is looked up.
    """
    if not hashes or hashes[0] not in cached:
        return 0
    ends = hashes[_STRIDE - 1 :: _STRIDE]
    start = _STRIDE * next((i for i, each in enumerate(ends) if each not in cached), len(ends))
    rest = (i for i in range(start, len(hashes)) if hashes[i] not in cached)
    return next(rest, len(hashes))
