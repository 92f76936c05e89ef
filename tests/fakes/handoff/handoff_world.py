"""A whole hand-off without processes: two engines' memory, a network and time, all driven manually.

    SourceNode ── inbox ◄── link ──► inbox ── PullerNode
     real Source                               real Puller
     real bytes, generations ◄── MemoryTransport ── real bytes

The driver chooses every step: deliver, duplicate or swap messages, break links, kill a side,
advance a copy by bytes, rewrite blocks, advance time. The nodes check invariants at each step and
record what must hold at the end (`settle`). Copyable at any point with copy.deepcopy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from fakes.handoff.block_pairs import BlockRef, packed
from fakes.handoff.memory_transport import (
    MemoryPool,
    MemoryPull,
    MemoryTransport,
    MemoryWindow,
)

from baton.core.errors import BatonError, Cancelled, HandoffFailed
from baton.core.request.request import Ticket
from baton.core.request.token_ids import BlockHash, block_hashes, root_hash
from baton.engine.kv.block_pool import Reservation
from baton.kv_transfer.protocol.events import (
    CancelPull,
    ChunkReady,
    CloseWindow,
    Complete,
    DropReservation,
    Failed,
    Intended,
    IntentCancelled,
    Offered,
    OpenWindow,
    PeerLinked,
    PeerLost,
    PeerMessage,
    PullEnded,
    PullerEvent,
    ReleaseBlocks,
    Reserve,
    Reserved,
    Send,
    SourceEvent,
    StartPull,
    Tick,
    WindowFailed,
    WindowOpened,
    Withdrawn,
)
from baton.kv_transfer.protocol.messages import HandoffState, Hello, Refused
from baton.kv_transfer.protocol.puller import Puller
from baton.kv_transfer.protocol.source import Source
from baton.kv_transfer.window.transport import PullOutcome

from ..clock import FakeClock

LEASE_S = 9.0
DEADLINE_S = 60.0
BLOCK_SIZE = 4
BLOCK_BYTES = 8
NUM_POOL_BLOCKS = 12
MAX_PROMPT_BLOCKS = 4
_FINGERPRINT = {"model": "toy"}


@dataclass(slots=True)
class Prompt:
    """One request that is handed off from source to puller."""

    ticket: Ticket
    key: str
    num_blocks: int
    deadline_s: float

    @property
    def transfer_id(self) -> str:
        return self.ticket.transfer_id

    @property
    def hashes(self) -> list[BlockHash]:
        """The hashes of the full blocks; the last block is partial."""
        tokens = [int(self.transfer_id, 16) % 1000] * (self.num_blocks * BLOCK_SIZE - 1)
        return block_hashes(root_hash("toy"), tokens, BLOCK_SIZE)

    @property
    def first_token_id(self) -> int:
        return int(self.transfer_id, 16) + 7

    def content(self, index: int) -> bytes:
        """The expected content of logical block `index`."""
        name = f"{self.transfer_id}/{index}".encode()
        return hashlib.blake2b(name, digest_size=BLOCK_BYTES).digest()


class SourceNode:
    """A source with its memory; blocks belong to a key from the offer to its ReleaseBlocks."""

    def __init__(self, incarnation: str, clock: FakeClock) -> None:
        self.incarnation = incarnation
        self.pool = MemoryPool(NUM_POOL_BLOCKS, BLOCK_BYTES)
        self.machine = Source(Hello(incarnation, _FINGERPRINT), clock, LEASE_S)
        self.inbox: list[SourceEvent] = []
        self.outbox: list[Send] = []
        self.free = list(range(NUM_POOL_BLOCKS))
        self.held: dict[str, list[int]] = {}  # key -> blocks
        self.num_computed: dict[str, int] = {}  # transfer_id -> blocks, while computing
        self.ends: dict[str, BatonError | None] = {}  # key -> why it was released

    def offer(self, prompt: Prompt) -> bool:
        """Admit the prompt if all its blocks fit."""
        if len(self.free) < prompt.num_blocks:
            return False
        self.held[prompt.key] = [self.free.pop(0) for _ in range(prompt.num_blocks)]
        self.pool.generations.bump(self.held[prompt.key])
        self.num_computed[prompt.transfer_id] = 0
        self.feed(Offered(prompt.ticket, prompt.key, prompt.deadline_s))
        return True

    def compute(self, prompt: Prompt, num_blocks: int) -> None:
        """Compute up to `num_blocks` more blocks of a prompt that is still held."""
        if prompt.key not in self.held or prompt.transfer_id not in self.num_computed:
            return
        first = self.num_computed[prompt.transfer_id]
        last = min(first + num_blocks, prompt.num_blocks)
        refs = []
        for index in range(first, last):
            block_id = self.held[prompt.key][index]
            self.pool.block(block_id)[:] = prompt.content(index)
            generation = self.pool.generations.read(block_id)
            block_hash = prompt.hashes[index] if index < len(prompt.hashes) else None
            refs.append(BlockRef(block_id, generation, block_hash))
        state = None
        self.num_computed[prompt.transfer_id] = last
        if last == prompt.num_blocks:
            state = HandoffState(prompt.first_token_id)
            del self.num_computed[prompt.transfer_id]
        self.feed(ChunkReady(prompt.transfer_id, packed(refs), last * BLOCK_SIZE, state))

    def rewrite(self, block_id: int) -> None:
        """Another request gets the block: the generation changes, then the bytes do."""
        self.pool.generations.bump([block_id])
        self.pool.block(block_id)[:] = b"\xee" * BLOCK_BYTES

    def feed(self, event: SourceEvent) -> None:
        for effect in self.machine.handle(event):
            if isinstance(effect, ReleaseBlocks):
                assert effect.key not in self.ends, "released twice"
                self.free += self.held.pop(effect.key)
                self.ends[effect.key] = effect.error
                self.num_computed.pop(effect.transfer_id, None)
            else:
                self.outbox.append(effect)


class PullerNode:
    """A puller with its memory; Reserve and OpenWindow are answered when the driver says so."""

    def __init__(self, incarnation: str, clock: FakeClock, sources: dict[str, MemoryPool]) -> None:
        self.incarnation = incarnation
        self.pool = MemoryPool(NUM_POOL_BLOCKS, BLOCK_BYTES)
        self.transport = MemoryTransport(self.pool, sources)
        self.machine = Puller(Hello(incarnation, _FINGERPRINT), clock, LEASE_S)
        self.inbox: list[PullerEvent] = []
        self.outbox: list[Send] = []
        self.free = list(range(NUM_POOL_BLOCKS))
        self.prompts: dict[str, Prompt] = {}  # transfer_id -> its prompt
        self.reservations: dict[str, Reservation] = {}
        self.questions: list[Reserve] = []  # for memory; transfers that ended may still get it
        self.openings: list[OpenWindow] = []
        self.windows: dict[str, MemoryWindow] = {}
        self.pulls: dict[tuple[str, int], MemoryPull] = {}  # in flight
        self.started: set[tuple[str, int]] = set()  # all pulls ever
        self.ends: dict[str, str] = {}  # key -> how it ended

    def intend(self, prompt: Prompt) -> None:
        self.prompts[prompt.transfer_id] = prompt
        hashes, num_blocks = prompt.hashes, prompt.num_blocks
        self.feed(Intended(prompt.ticket, prompt.key, hashes, num_blocks, prompt.deadline_s))

    def cancel(self, prompt: Prompt) -> None:
        if prompt.key not in self.ends and prompt.transfer_id in self.prompts:
            self.ends[prompt.key] = "cancelled"
            self.feed(IntentCancelled(prompt.transfer_id))

    def answer_reserve(self, num_cached_blocks: int, *, is_full: bool = False) -> None:
        """Grant the first Reserve if there is room. The first blocks may be cached already."""
        if is_full or not self.may_grant:
            return
        transfer_id = self.questions.pop(0).transfer_id
        prompt = self.prompts[transfer_id]
        num_cached = min(num_cached_blocks, len(prompt.hashes))
        block_ids = tuple(self.free.pop(0) for _ in range(prompt.num_blocks))
        for index, block_id in enumerate(block_ids):
            content = prompt.content(index) if index < num_cached else bytes(BLOCK_BYTES)
            self.pool.block(block_id)[:] = content
        assert transfer_id not in self.reservations
        reservation = Reservation(prompt.key, block_ids, num_cached, prompt.num_blocks)
        self.reservations[transfer_id] = reservation
        self.feed(Reserved(transfer_id, reservation))

    @property
    def may_grant(self) -> bool:
        """Whether there is room for the first request that waits for memory."""
        if not self.questions:
            return False
        return len(self.free) >= self.prompts[self.questions[0].transfer_id].num_blocks

    def answer_opening(self, *, is_good: bool) -> None:
        """Answer the oldest OpenWindow."""
        if not self.openings:
            return
        opening = self.openings.pop(0)
        try:
            if not is_good:
                raise HandoffFailed("no transport")
            window = self.transport.open(opening)
        except HandoffFailed as error:
            self.feed(WindowFailed(opening.incarnation, error))
            return
        self.windows[opening.incarnation] = window
        self.feed(WindowOpened(opening.incarnation))

    def feed(self, event: PullerEvent) -> None:
        for effect in self.machine.handle(event):
            match effect:
                case Send():
                    self.outbox.append(effect)
                case Reserve(transfer_id):
                    requested = {*self.reservations, *(each.transfer_id for each in self.questions)}
                    assert transfer_id not in requested, "reserved twice"
                    self.questions.append(effect)
                case OpenWindow():
                    self.openings.append(effect)
                case CloseWindow(incarnation):
                    self.openings = [o for o in self.openings if o.incarnation != incarnation]
                    window = self.windows.pop(incarnation, None)
                    if window is not None:
                        window.close()
                case StartPull():
                    self._start_pull(effect)
                case CancelPull(transfer_id):
                    for (owner, _), pull in self.pulls.items():
                        if owner == transfer_id:
                            pull.cancel()
                case Complete():
                    self._complete(effect)
                case Failed(transfer_id, key, error):
                    assert key not in self.ends, "ended twice"
                    self.ends[key] = error.code
                case DropReservation(transfer_id, reservation):
                    assert not self._num_in_flight(transfer_id), "dropped under a copy"
                    assert self.reservations.pop(transfer_id) is reservation
                    self.free += reservation.block_ids

    def _start_pull(self, pull: StartPull) -> None:
        reservation = self.reservations[pull.transfer_id]
        own = set(reservation.block_ids[reservation.num_cached_blocks :])
        assert {*pull.pairs.ids[1].tolist()} <= own
        assert (pull.transfer_id, pull.seq) not in self.started, "pulled twice"
        self.started.add((pull.transfer_id, pull.seq))
        on_done = partial(self._on_done, pull.transfer_id, pull.seq)
        handle = self.windows[pull.incarnation].start_pull(pull.pairs, on_done)
        self.pulls[pull.transfer_id, pull.seq] = handle

    def _on_done(self, transfer_id: str, seq: int, outcome: PullOutcome) -> None:
        del self.pulls[transfer_id, seq]
        self.inbox.append(PullEnded(transfer_id, seq, outcome))

    def _complete(self, complete: Complete) -> None:
        prompt = self.prompts[complete.transfer_id]
        assert complete.key == prompt.key
        assert prompt.key not in self.ends, "ended twice"
        assert not self._num_in_flight(complete.transfer_id)
        self.ends[prompt.key] = "complete"
        assert complete.state == HandoffState(prompt.first_token_id)
        block_ids = self.reservations.pop(complete.transfer_id).block_ids
        for index, block_id in enumerate(block_ids):
            found = bytes(self.pool.block(block_id))
            assert found == prompt.content(index), f"block {index} holds wrong KV"
        self.free += block_ids  # the request runs and ends

    def _num_in_flight(self, transfer_id: str) -> int:
        return sum(owner == transfer_id for owner, _ in self.pulls)


@dataclass
class World:
    """Both nodes, the stream between them, and time."""

    clock: FakeClock = field(default_factory=FakeClock)
    pools: dict[str, MemoryPool] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    is_linked: bool = False
    num_starts: int = 0

    def __post_init__(self) -> None:
        self.restart_source()
        self.restart_puller()
        self.link()

    # ---- faults of processes and streams

    def restart_source(self) -> None:
        self.unlink()
        self.source = SourceNode(self._new_incarnation(), self.clock)
        self.pools[self.source.incarnation] = self.source.pool

    def restart_puller(self) -> None:
        self.unlink()
        self.puller = PullerNode(self._new_incarnation(), self.clock, self.pools)

    def link(self) -> None:
        if not self.is_linked:
            self.is_linked = True
            self.source.inbox.append(PeerLinked(self.puller.incarnation))
            self.puller.inbox.append(PeerLinked(self.source.incarnation))

    def unlink(self, num_kept: int = 0) -> None:
        """Break the stream; each side still receives `num_kept` of the messages on the way to
        it."""
        if self.is_linked:
            self.is_linked = False
            self._lose_messages(num_kept)
            self.source.inbox.append(PeerLost(self.puller.incarnation))
            self.puller.inbox.append(PeerLost(self.source.incarnation))

    def replace_link(self) -> None:
        """Replace the stream by a new one before either side noticed that the old one broke."""
        if self.is_linked:
            self._lose_messages(0)
            self.is_linked = False
            self.link()

    def _lose_messages(self, num_kept: int) -> None:
        for node in (self.source, self.puller):
            on_the_way = [e for e in node.inbox if isinstance(e, PeerMessage)]
            for event in on_the_way[num_kept:]:
                node.inbox.remove(event)  # type: ignore[arg-type]

    def _new_incarnation(self) -> str:
        self.num_starts += 1
        return f"{self.num_starts:032x}"

    # ---- requests

    def new_prompt(self, num_blocks: int) -> Prompt:
        transfer_id = f"{len(self.prompts) + 1:032x}"
        ticket = Ticket(transfer_id, self.source.incarnation, self.puller.incarnation)
        deadline_s = self.clock.monotonic_s() + DEADLINE_S
        prompt = Prompt(ticket, f"key{len(self.prompts) + 1}", num_blocks, deadline_s)
        self.prompts.append(prompt)
        return prompt

    # ---- the network

    def deliver(self, node: SourceNode | PullerNode, index: int = 0) -> None:
        if index < len(node.inbox):
            node.feed(node.inbox.pop(index))  # type: ignore[arg-type]
            self.carry()

    def exchange(self) -> None:
        """Deliver all messages on the way in order, and the messages that they cause."""
        self.carry()
        while self.source.inbox or self.puller.inbox:
            self.deliver(self.source)
            self.deliver(self.puller)

    def double(self, node: SourceNode | PullerNode, index: int) -> None:
        if 0 <= index < len(node.inbox):
            node.inbox.insert(index, node.inbox[index])  # type: ignore[arg-type]

    def carry(self) -> None:
        """Move sent messages to the other side's inbox, or lose them if the stream is down."""
        for node, other in ((self.source, self.puller), (self.puller, self.source)):
            for effect in node.outbox:
                if not self.is_linked or effect.incarnation != other.incarnation:
                    continue
                if isinstance(effect.message, Refused):
                    self.unlink(num_kept=len(other.inbox))
                else:
                    other.inbox.append(PeerMessage(node.incarnation, effect.message))
            node.outbox.clear()

    # ---- time

    def tick(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.source.feed(Tick())
        self.puller.feed(Tick())
        self.carry()

    # ---- the end

    def run(self, *, num_cached_blocks: int = 0) -> None:
        """Run everything that can happen without time passing."""
        self.carry()
        while self.source.inbox or self.puller.inbox or self._is_busy():
            self.deliver(self.source)
            self.deliver(self.puller)
            self.puller.answer_opening(is_good=True)
            self.puller.answer_reserve(num_cached_blocks)
            for pull in list(self.puller.pulls.values()):
                pull.finish()
            self.carry()

    def _is_busy(self) -> bool:
        puller = self.puller
        return bool(puller.openings or puller.pulls) or puller.may_grant

    def settle(self) -> None:
        """Without more faults every transfer must end once, and nothing may be left."""
        self.run()
        for prompt in self.prompts:
            self.source.compute(prompt, MAX_PROMPT_BLOCKS)
        self.run()
        for _ in range(3):
            self.tick(LEASE_S)
            self.run()
        self.tick(DEADLINE_S)
        self.run()
        self.tick(DEADLINE_S)
        self._assert_nothing_left(self.source.held, self.puller.reservations)

    def _assert_nothing_left(self, *left: Iterable[object]) -> None:
        for each in left:
            assert not list(each)
        for node in (self.source, self.puller):
            assert not node.machine.transfers
            assert not len(node.machine.tombstones)
            assert node.machine.next_deadline_s() == math.inf
            assert sorted(node.free) == list(range(NUM_POOL_BLOCKS))
        assert self.is_linked or not self.puller.windows
        intended = {prompt.key for prompt in self.puller.prompts.values()}
        assert intended == set(self.puller.ends)


def withdrawn(prompt: Prompt) -> Withdrawn:
    return Withdrawn(prompt.transfer_id, Cancelled("the client left"))
