"""Two engines that fetch prefixes from each other's caches, and all possible orders of events.

With `is_running` each prefix belongs to a request that decodes on its engine and moves to the other
one: it keeps its blocks until the other engine has a copy, or it ends where it is.

State machines, block pools, caches and bytes are real; messages, copies, time and other use of
memory are moves. A state is the whole world: small, so that it is copied for each move.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial

from engines.integrity import check_pool
from fakes.handoff.memory_transport import MemoryPool, MemoryPull, MemoryWindow

from baton.core.errors import StaleBlocks
from baton.core.request.request import Ticket
from baton.core.request.token_ids import BlockHash, block_hashes, root_hash
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, BlockPool, Fence, Reservation
from baton.engine.kv.lent_prefixes import BorrowedPrefix, LentPrefixes
from baton.engine.kv.prefix_cache import PrefixCache
from baton.kv_transfer.protocol.events import (
    CancelPull,
    ChunkReady,
    Complete,
    DropReservation,
    Failed,
    Intended,
    Offered,
    OpenWindow,
    PeerLinked,
    PeerLost,
    PeerMessage,
    PinPrefix,
    PullEnded,
    PullerEvent,
    ReleaseBlocks,
    Send,
    SourceEvent,
    StartPull,
    Tick,
    WindowOpened,
    Withdrawn,
)
from baton.kv_transfer.protocol.messages import HandoffState, Hello, Message
from baton.kv_transfer.protocol.puller import Puller
from baton.kv_transfer.protocol.source import Source
from baton.kv_transfer.window.transport import PullOutcome

from ..clock import FakeClock
from ..object_graphs import forked, frozen

NAMES = (f"{1:032x}", f"{2:032x}")
BLOCK_SIZE, BLOCK_BYTES, PREFIX_BLOCKS = 1, 2, 2
LIMIT_S, LEASE_S, LINK_WAIT_S = 4.0, 9.0, 5.0


def hashes_of(owner: int) -> list[BlockHash]:
    """The hashes of the prefix that this engine has at first, and the other one fetches."""
    return block_hashes(root_hash("toy"), [owner + 1] * PREFIX_BLOCKS, BLOCK_SIZE)


def content(block_hash: BlockHash) -> bytes:
    return hashlib.blake2b(block_hash, digest_size=BLOCK_BYTES).digest()


class Peer:
    """One of the two engines. `to_source`, `to_puller`: messages from the other engine."""

    def __init__(self, number: int, clock: FakeClock, num_blocks: int, *, is_running: bool) -> None:
        self.number, self.name, self.other = number, NAMES[number], NAMES[1 - number]
        self.memory = MemoryPool(NUM_RESERVED_BLOCKS + num_blocks, BLOCK_BYTES)
        self.pool = BlockPool(NUM_RESERVED_BLOCKS + num_blocks, self.memory.generations)
        self.cache = PrefixCache(self.pool)
        self.lent = LentPrefixes(self.pool, self.cache, lambda: 1 << 30)
        self.clock = clock
        hello = Hello(self.name, {"model": "toy"})
        self.source = Source(hello, clock, LEASE_S)
        self.puller = Puller(hello, clock, LINK_WAIT_S)
        self.to_source: deque[Message] = deque()
        self.to_puller: deque[Message] = deque()
        self.out: list[tuple[bool, Message]] = []  # whether it is for the other's source
        self.pins: dict[str, Fence] = {}
        self.prefix: BorrowedPrefix | None = None
        self.end: str | None = None  # how its fetch ended
        self.pull: MemoryPull | None = None
        self.reports: list[PullEnded] = []
        blocks = self.pool.allocate(PREFIX_BLOCKS) or []
        for block_id, block_hash in zip(blocks, hashes_of(number), strict=True):
            self.memory.block(block_id)[:] = content(block_hash)
        self.cache.store(hashes_of(number), blocks)
        self.running = self.pool.open_fence(blocks) if is_running else None
        self.pool.release(blocks)

    def begin(self) -> None:
        """A prompt with the other's prefix arrives; without room for a fetch it is computed."""
        self.prefix = self.lent.borrow(hashes_of(1 - self.number))
        if self.prefix is None:
            self.end = "no room"
            return
        ticket = Ticket(f"{10 + self.number:032x}", self.other, self.name)
        prefix, due_s = self.prefix, self.clock.monotonic_s() + LIMIT_S
        hashes, num_cached = prefix.block_hashes, prefix.num_cached_blocks
        reserved = Reservation("key", prefix.block_ids, num_cached, len(hashes))
        self.feed_puller(Intended(ticket, "key", hashes, len(hashes), due_s, reserved))

    def leave(self) -> None:
        """The request that runs here has moved, or has ended."""
        assert self.running is not None
        assert self.cache.match(hashes_of(self.number)) == [*self.running.block_ids], "it lost them"
        self.running.close()
        self.running = None

    def reuse(self) -> None:
        """Another request takes all available blocks, writes to them and ends."""
        blocks = self.pool.allocate(self.pool.num_available) or []
        for block_id in blocks:
            self.memory.block(block_id)[:] = b"\xee" * BLOCK_BYTES
        self.pool.release(blocks)

    def copy(self, sources: MemoryPool) -> None:
        """Copy the next byte."""
        assert self.pull is not None
        self.pull._window.source = sources
        self.pull.advance(1)
        if self.pull is not None:
            self.pull._window.source = self.memory  # so that it is not part of this state

    def _pulled(self, name: tuple[str, int], outcome: PullOutcome) -> None:
        self.pull = None
        self.reports.append(PullEnded(*name, outcome))

    def feed_source(self, event: SourceEvent) -> None:
        for effect in self.source.handle(event):
            match effect:
                case Send(_, message):
                    self.out.append((False, message))
                case PinPrefix(ticket, hashes):
                    self._pin(ticket, hashes)
                case ReleaseBlocks(transfer_id):
                    self.lent.give_back(self.pins.pop(transfer_id))

    def _pin(self, ticket: Ticket, hashes: tuple[BlockHash, ...]) -> None:
        """Pin the prefix as node/peers/prefixes.py and the engine do."""
        transfer_id = ticket.transfer_id
        lent = self.lent.lend(hashes)
        if lent is None:
            self.feed_source(Withdrawn(transfer_id, StaleBlocks("evicted")))
            return
        self.pins[transfer_id], refs = lent
        self.feed_source(Offered(ticket, "", 1e9))
        self.feed_source(ChunkReady(transfer_id, refs, len(refs), HandoffState()))

    def feed_puller(self, event: PullerEvent) -> None:
        for effect in self.puller.handle(event):
            match effect:
                case Send(_, message):
                    self.out.append((True, message))
                case OpenWindow(incarnation):
                    self.feed_puller(WindowOpened(incarnation))
                case StartPull():
                    window = MemoryWindow(self.memory, self.memory)
                    name = (effect.transfer_id, effect.seq)
                    self.pull = window.start_pull(effect.pairs, partial(self._pulled, name))
                case CancelPull() if self.pull is not None:
                    self.pull.cancel()
                case Complete():
                    self._over("fetched")
                    self._keep()
                case Failed(_, _, error):
                    self._over(error.code)
                case DropReservation():
                    assert self.prefix is not None and self.pull is None, "dropped under a copy"
                    self.lent.drop(self.prefix)
                    self.prefix = None

    def _keep(self) -> None:
        assert self.prefix is not None
        for block_id, block_hash in zip(
            self.prefix.block_ids, self.prefix.block_hashes, strict=True
        ):
            assert bytes(self.memory.block(block_id)) == content(block_hash), "a wrong block"
        self.lent.keep(self.prefix)
        self.prefix = None

    def _over(self, how: str) -> None:
        assert self.end is None, f"{how} after {self.end}"
        self.end = how

    def check(self) -> None:
        """Check the invariants of a state; reset what does not affect behaviour."""
        self.pool.num_releases = 0
        self.pool._free.sort(reverse=True)
        owners = Counter(b for fence in self.pool.open_fences for b in fence.block_ids)
        check_pool(self.pool, owners)
        for block_hash, block_id in self.cache._block_of.items():
            found = bytes(self.memory.block(block_id))
            assert found == content(block_hash), f"{found.hex()} is in the cache"

    def assert_nothing_left(self) -> None:
        assert self.end is not None, "the prompt waits for ever"
        assert self.running is None, "it runs for ever"
        assert not self.pool.open_fences and not self.pins and self.prefix is None
        assert not self.source.transfers and not self.puller.transfers


@dataclass
class World:
    """Both engines, linked both ways, before either prompt has arrived."""

    clock: FakeClock
    peers: list[Peer]
    begun: list[bool]
    num_faults: int = 0

    @classmethod
    def new(cls, num_blocks: int, *, is_running: bool) -> World:
        clock = FakeClock()
        peers = [Peer(n, clock, num_blocks, is_running=is_running) for n in (0, 1)]
        world = cls(clock, peers, [False, False])
        world._link()
        while any(peer.to_source or peer.to_puller for peer in world.peers):
            for name in [name for name in world.own_moves() if name[0].startswith("to_")]:
                world.move(name)
        return world

    def _link(self) -> None:
        for peer in self.peers:
            peer.feed_source(PeerLinked(peer.other))
            peer.feed_puller(PeerLinked(peer.other))
        self._carry()

    def own_moves(self) -> Iterator[tuple[str, int]]:
        """The moves that need neither a fault nor time."""
        for peer in self.peers:
            number = peer.number
            if not self.begun[number]:
                yield "begin", number
            for name, queue in (("to_source", peer.to_source), ("to_puller", peer.to_puller)):
                if queue:
                    yield name, number
            if peer.pull is not None:
                yield "copy", number
            if peer.reports:
                yield "report", number
            # A request whose move failed stays until it ends, at any later time.
            if peer.running is not None and self.peers[1 - number].end is not None:
                yield "leave", number

    def faults(self) -> Iterator[tuple[str, int]]:
        for peer in self.peers:
            yield "reuse", peer.number
        yield "break", 0
        if self._next_deadline_s() < math.inf:
            yield "time", 0

    def _next_deadline_s(self) -> float:
        machines = [m for peer in self.peers for m in (peer.source, peer.puller)]
        return min(machine.next_deadline_s() for machine in machines)

    def move(self, what: tuple[str, int]) -> None:
        name, number = what
        peer = self.peers[number]
        match name:
            case "begin":
                self.begun[number] = True
                peer.begin()
            case "to_source":
                peer.feed_source(PeerMessage(peer.other, peer.to_source.popleft()))
            case "to_puller":
                peer.feed_puller(PeerMessage(peer.other, peer.to_puller.popleft()))
            case "copy":
                peer.copy(self.peers[1 - number].memory)
            case "report":
                peer.feed_puller(peer.reports.pop(0))
            case "leave":
                peer.leave()
            case "reuse":
                peer.reuse()
            case "break":
                self._break()
            case "time":
                self._advance()
        self._carry()
        for each in self.peers:
            each.check()

    def _break(self) -> None:
        for peer in self.peers:
            peer.to_source.clear()
            peer.to_puller.clear()
        for peer in self.peers:
            peer.feed_source(PeerLost(peer.other))
            peer.feed_puller(PeerLost(peer.other))
            peer.out.clear()
        self._link()

    def _advance(self) -> None:
        due_s = self._next_deadline_s()
        self.clock.advance(max(0.0, due_s - self.clock.monotonic_s()))
        for peer in self.peers:
            peer.feed_source(Tick())
            peer.feed_puller(Tick())

    def _carry(self) -> None:
        for peer in self.peers:
            other = self.peers[1 - peer.number]
            for is_for_source, message in peer.out:
                (other.to_source if is_for_source else other.to_puller).append(message)
            peer.out.clear()

    def key(self) -> Hashable:
        return frozen([self.peers, self.begun, self.num_faults, self.clock.monotonic_s()])


@dataclass
class Found:
    """The statistics of a search without a violation. `ends`: of both fetches, in final states."""

    num_states: int
    ends: Counter[tuple[str | None, ...]]


def search(num_blocks: int, max_faults: int, *, is_running: bool = False) -> Found:
    """Search every state within `max_faults` faults. Raises AssertionError with the sequence of
    moves."""
    first = World.new(num_blocks, is_running=is_running)
    seen: set[Hashable] = {first.key()}
    calmed: set[Hashable] = set()
    frontier: deque[tuple[World, tuple[tuple[str, int], ...]]] = deque([(first, ())])
    found = Found(0, Counter())
    while frontier:
        world, story = frontier.popleft()
        found.num_states += 1
        try:
            _calm(world, calmed, found)
            moves = [(move, 0) for move in world.own_moves()]
            if world.num_faults < max_faults:
                moves += [(move, 1) for move in world.faults()]
            for move, is_fault in moves:
                story_then = (*story, move)
                after = forked(world)
                after.num_faults += is_fault
                after.move(move)
                if (key := after.key()) not in seen:
                    seen.add(key)
                    frontier.append((after, story_then))
        except AssertionError as error:
            raise AssertionError(f"{error}: {story}") from error
    return found


def _calm(world: World, calmed: set[Hashable], found: Found) -> None:
    """Without more faults both prompts are served, and nothing is left."""
    way, after = [], forked(world)
    while (key := after.key()) not in calmed:
        way.append(key)
        assert len(way) < 300, "it never comes to rest"
        if (move := next(after.own_moves(), None)) is not None:
            after.move(move)
        elif after._next_deadline_s() < math.inf and any(
            peer.end is None or peer.pins for peer in after.peers
        ):
            after.move(("time", 0))
        else:
            for peer in after.peers:
                peer.assert_nothing_left()
            found.ends[tuple(peer.end for peer in after.peers)] += 1
            break
    calmed.update(way)
