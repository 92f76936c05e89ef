"""A gateway's copy of what every linked engine has cached, kept up by the index's messages.

    exact at seq ──DELTA seq+1──► exact at seq+1
         │ any other number: something was lost
         ▼
      inexact ──SNAPSHOT s, read and installed──► exact at s

An inexact copy goes on taking deltas: it is still a good hint. All of this is hints: a wrong one
makes a prompt's prefill longer and changes no token. `PrefixMirror` is pure state; `Follower` feeds
it from the broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ..core.ports import Clock
from ..core.request.token_ids import BlockHash
from .messages import (
    MAX_HASHES,
    BadMessage,
    Delta,
    Head,
    IndexAway,
    Snapshot,
    SnapshotChunk,
    decode,
)
from .redis_link import RedisIndexLink

STALE_S = 60.0  # an engine of which no message came for so long counts as empty
REQUEST_S = 0.5  # one request for a snapshot in so long

_STRIDE = 64


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """Something was lost: request a snapshot of this engine."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """Read this snapshot's chunks, and install them."""

    snapshot: Snapshot


@dataclass(slots=True)
class _Copy:
    """One engine's cache as we know it: `in_host` are those of `hashes` that are in host memory
    alone. `seq` is None while the copy is inexact."""

    max_hashes: int
    received_s: float
    seq: int | None = 0
    hashes: set[BlockHash] = field(default_factory=set)
    in_host: set[BlockHash] = field(default_factory=set)
    may_request_s: float = 0.0


class PrefixMirror:
    """Engines come and go by `add` and `remove`: messages of any other are dropped.

    `num_bad_messages`: junk; `num_foreign_messages`: of engines that we do not know.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._copies: dict[str, _Copy] = {}
        self.num_bad_messages = 0
        self.num_foreign_messages = 0
        self.num_gaps = 0

    def add(self, incarnation: str, num_blocks: int) -> None:
        """Begin to mirror an engine that can cache at most `num_blocks` blocks, in all tiers."""
        self._copies[incarnation] = _Copy(num_blocks, self._clock.monotonic_s())

    def remove(self, incarnation: str) -> None:
        self._copies.pop(incarnation, None)

    # -- messages in ---------------------------------------------------------------------------

    def take(self, raw: bytes) -> RequestSnapshot | ReadSnapshot | None:
        """Take a message as it came; returns what must be done about it."""
        try:
            message = decode(raw)
        except BadMessage:
            self.num_bad_messages += 1
            return None
        copy = self._copies.get(message.incarnation)
        if copy is None:
            self.num_foreign_messages += 1
            return None
        copy.received_s = self._clock.monotonic_s()
        match message:
            case Head(_, seq):
                if copy.seq is not None and seq > copy.seq:
                    self._note_gap(copy)
            case Delta():
                self._apply(copy, message)
            case Snapshot():
                return self._consider(copy, message)
            case SnapshotChunk():
                self.num_bad_messages += 1  # belongs in a key
        return self._request(message.incarnation, copy)

    def _apply(self, copy: _Copy, delta: Delta) -> None:
        if copy.seq is not None:
            if delta.seq <= copy.seq:
                return  # a double
            if delta.seq > copy.seq + 1:
                self._note_gap(copy)
            else:
                copy.seq = delta.seq
        if copy.in_host:
            copy.in_host.difference_update(delta.removed, delta.stored)
        copy.hashes.difference_update(delta.removed)
        copy.hashes.update(delta.stored)
        if delta.in_host:
            copy.hashes.difference_update(delta.in_host)  # so that both have the same object
            copy.hashes.update(delta.in_host)
            copy.in_host.update(delta.in_host)
        if len(copy.hashes) > copy.max_hashes:  # lost removals, or lies
            copy.hashes.clear()
            copy.in_host.clear()
            self._note_gap(copy)

    def _note_gap(self, copy: _Copy) -> None:
        self.num_gaps += copy.seq is not None
        copy.seq = None

    def _request(self, incarnation: str, copy: _Copy) -> RequestSnapshot | None:
        now_s = self._clock.monotonic_s()
        if copy.seq is not None or now_s < copy.may_request_s:
            return None
        copy.may_request_s = now_s + REQUEST_S
        return RequestSnapshot(incarnation)

    def _consider(self, copy: _Copy, snapshot: Snapshot) -> ReadSnapshot | None:
        """A snapshot is on offer, perhaps for another gateway."""
        if copy.seq is not None and snapshot.seq <= copy.seq:
            return None
        if snapshot.num_chunks > 1 + copy.max_hashes // MAX_HASHES:
            self.num_bad_messages += 1
            return None
        return ReadSnapshot(snapshot)

    def install(
        self, snapshot: Snapshot, hashes: set[BlockHash], in_host: Iterable[BlockHash] = ()
    ) -> None:
        """Replace the copy by a snapshot that was read whole; `hashes` is ours from now on. Those
        `in_host`, which are among them, are in host memory alone."""
        copy = self._copies.get(snapshot.incarnation)
        if copy is None:
            return
        if len(hashes) > copy.max_hashes:
            self.num_bad_messages += 1
            return
        copy.hashes, copy.in_host, copy.seq = hashes, set(in_host), snapshot.seq

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

    def host_blocks(self, incarnation: str, hashes: Sequence[BlockHash]) -> int:
        """How many of `hashes` this engine has in host memory alone: to be copied before use."""
        copy = self._copies.get(incarnation)
        if copy is None or not copy.in_host:
            return 0
        return sum(map(copy.in_host.__contains__, hashes))

    def _fresh(self, incarnations: Iterable[str]) -> Iterable[tuple[str, set[BlockHash]]]:
        """The copies of these engines that are worth a look: not empty, not stale."""
        oldest_s = self._clock.monotonic_s() - STALE_S
        for incarnation in incarnations:
            copy = self._copies.get(incarnation)
            if copy is not None and copy.hashes and copy.received_s >= oldest_s:
                yield incarnation, copy.hashes


def _length_in(cached: set[BlockHash], hashes: Sequence[BlockHash]) -> int:
    """The position of the first hash that is not in `cached`."""
    start = 0
    while start < len(hashes) and cached.issuperset(hashes[start : start + _STRIDE]):
        start += _STRIDE  # many at a time: a long prompt is looked up on every engine
    rest = (i for i in range(start, len(hashes)) if hashes[i] not in cached)
    return next(rest, len(hashes))


class Follower:
    """Keeps a mirror up to date; `run` follows until cancelled, through any loss of Redis.

    One message at a time, in order: while a snapshot is read, the deltas behind it wait in the
    subscription, so that they fit.
    """

    def __init__(self, link: RedisIndexLink, mirror: PrefixMirror) -> None:
        self._link = link
        self._mirror = mirror

    async def run(self) -> None:
        async with aclosing(self._link.messages()) as messages:
            async for raw in messages:
                await self.take(raw)

    async def take(self, raw: bytes) -> None:
        """One message, and what follows from it. What fails is made up for by the next head."""
        try:
            match self._mirror.take(raw):
                case RequestSnapshot(incarnation):
                    await self._link.request_snapshot(incarnation)
                case ReadSnapshot(snapshot):
                    hashes, in_host = await read_snapshot(self._link, snapshot)
                    self._mirror.install(snapshot, hashes, in_host)
        except (BadMessage, IndexAway):
            return


async def read_snapshot(
    link: RedisIndexLink, snapshot: Snapshot
) -> tuple[set[BlockHash], set[BlockHash]]:
    """Its hashes, and those of them that are in host memory alone. Raises IndexAway, BadMessage if
    a chunk is gone or is not what it should be."""
    hashes: set[BlockHash] = set()
    in_host: set[BlockHash] = set()
    for index in range(snapshot.num_chunks):
        wanted = (snapshot.incarnation, snapshot.seq, index)
        chunk = decode(await link.read_chunk(snapshot.incarnation, index))
        if not isinstance(chunk, SnapshotChunk) or chunk.place != wanted:
            raise BadMessage("no chunk of this snapshot")
        hashes.update(chunk.hashes, chunk.in_host)
        in_host.update(chunk.in_host)
    return hashes, in_host
