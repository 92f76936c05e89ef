"""The two sides of one hand-off, minimal and independent of each other: for exhaustive search.

    SourceSide   real Source, real BlockPool, bytes        PullerSide   real Puller, BlockPool,
                                                                        copies in flight

A side changes by one method call at a time, which records sent messages (`outbox`) and events
(`done`). Sides share nothing, so a search may copy and combine them freely: a copy of blocks gets
the source's memory as it is at that moment. Each side asserts its own invariants at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from engines.integrity import check_pool
from fakes.handoff.block_pairs import BlockRef, packed
from fakes.handoff.memory_transport import MemoryPool, MemoryPull, MemoryWindow

from baton.core.errors import Cancelled
from baton.core.request.request import Ticket
from baton.core.request.token_ids import BlockHash, block_hashes, root_hash
from baton.engine.kv.block_pool import (
    NUM_RESERVED_BLOCKS,
    BlockPool,
    BlockRefs,
    Reservation,
)
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
    WindowOpened,
    Withdrawn,
)
from baton.kv_transfer.protocol.handoff_side import TOMBSTONE_S
from baton.kv_transfer.protocol.messages import (
    Attach,
    HandoffState,
    Hello,
    Manifest,
    Message,
    Release,
    Renew,
    Revoked,
)
from baton.kv_transfer.protocol.puller import Puller
from baton.kv_transfer.protocol.source import Source
from baton.kv_transfer.window.transport import PullOutcome

from ..clock import FakeClock

LEASE_S = 9.0
DEADLINE_S = 60.0
NUM_CHUNKS = 2  # of one block each: a full one and the partial last one
BLOCK_SIZE = 4
BLOCK_BYTES = 2  # copied one at a time: a rewrite fits between any two
NUM_BLOCKS = NUM_RESERVED_BLOCKS + NUM_CHUNKS  # of either pool: two attempts cannot both get blocks
_HASHES = tuple(block_hashes(root_hash("toy"), range(NUM_CHUNKS * BLOCK_SIZE - 1), BLOCK_SIZE))
_STRANGER = "f" * 32


class Attempt(NamedTuple):
    """One dispatch of the only request. All have the same prompt; bytes identify the attempt."""

    number: int
    source: str  # the incarnations in its ticket
    puller: str

    @property
    def transfer_id(self) -> str:
        return f"{self.number:032x}"

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.transfer_id, self.source, self.puller)

    @property
    def key(self) -> str:
        return f"request/{self.number}"


def content(transfer_id: str, index: int) -> bytes:
    """The content of logical block `index`: no byte equals that of another attempt or block."""
    return bytes([16 * int(transfer_id, 16) + index] * BLOCK_BYTES)


def block_hash(index: int) -> BlockHash | None:
    return _HASHES[index] if index < len(_HASHES) else None


class Memory(NamedTuple):
    """The pool of a source at one moment."""

    data: bytes
    generations: tuple[int, ...]
    num_steps: int


class _Side:
    """The common part of both sides: a state machine with transfers."""

    machine: Source | Puller

    def transfer_states(self) -> set[str]:
        return {transfer.state.value for transfer in self.machine.transfers.values()}


class SourceSide(_Side):
    """`done` holds successful ends: ("released", attempt number), when the puller has all
    blocks."""

    def __init__(self, incarnation: str, *, launches: bool = False) -> None:
        """`launches`: it announces a chunk to the machine before it computes it."""
        self.incarnation = incarnation
        self.launches = launches
        self.launched: dict[str, int] = {}  # transfer_id -> the step that computes its next chunk
        self.num_launched = 0
        self.clock = FakeClock()
        self.machine = Source(Hello(incarnation, {"model": "toy"}), self.clock, LEASE_S)
        self.memory = MemoryPool(NUM_BLOCKS, BLOCK_BYTES)
        self.pool = BlockPool(NUM_BLOCKS, self.memory.generations)
        self.held: dict[str, list[int]] = {}  # transfer_id -> blocks, until ReleaseBlocks
        self.num_computed: dict[str, int] = {}  # while computing
        self.over_s: dict[str, float | None] = {}  # transfer_id -> when it ended; None while live
        self.outbox: list[Send] = []
        self.done: list[tuple[str, int]] = []

    def snapshot(self) -> Memory:
        generations = tuple(self.memory.generations.read(i) for i in range(NUM_BLOCKS))
        return Memory(bytes(self.memory._data), generations, self.memory.num_steps or 0)

    def has_launched(self, transfer_id: str) -> bool:
        """Whether the next chunk may be computed."""
        return not self.launches or transfer_id in self.launched

    # ---- what may happen

    def offer(self, attempt: Attempt) -> None:
        """The gateway's dispatch arrives and memory is free: a refusal is returned at once."""
        transfer_id = attempt.transfer_id
        over_s = self.over_s.get(transfer_id)
        is_buried = over_s is not None and self.clock.monotonic_s() < over_s + TOMBSTONE_S
        blocks = self.pool.allocate(NUM_CHUNKS)
        assert blocks is not None
        self.held[transfer_id] = blocks
        self.num_computed[transfer_id] = 0
        self.over_s[transfer_id] = None
        self.feed(Offered(attempt.ticket, attempt.key, DEADLINE_S))
        is_refused = self.over_s[transfer_id] is not None
        assert is_refused or not is_buried, "a late dispatch revived a transfer"
        assert is_refused or attempt.source == self.incarnation, "computes what nobody can pull"

    def launch(self, transfer_id: str) -> None:
        """Launch a step that computes one more chunk."""
        self.num_launched += 1
        self.launched[transfer_id] = self.num_launched
        index = self.num_computed[transfer_id]
        refs, num_tokens = packed([self._ref(transfer_id, index)]), (index + 1) * BLOCK_SIZE
        self.feed(ChunkReady(transfer_id, refs, num_tokens, step=self.num_launched))

    def _ref(self, transfer_id: str, index: int) -> BlockRef:
        block_id = self.held[transfer_id][index]
        generation = self.memory.generations.read(block_id)
        return BlockRef(block_id, generation, block_hash(index))

    def compute(self, transfer_id: str) -> None:
        """Complete one more chunk in memory."""
        index = self.num_computed[transfer_id]
        ref = self._ref(transfer_id, index)
        self.memory.block(ref.block_id)[:] = content(transfer_id, index)
        state = None
        self.num_computed[transfer_id] += 1
        if self.num_computed[transfer_id] == NUM_CHUNKS:
            del self.num_computed[transfer_id]
            state = HandoffState(first_token_id=7)
        refs = BlockRefs() if self.launches else packed([ref])
        if self.launches:
            self.memory.num_steps = self.launched.pop(transfer_id)
        self.feed(ChunkReady(transfer_id, refs, (index + 1) * BLOCK_SIZE, state))

    def withdraw(self, attempt: Attempt) -> None:
        """The gateway cancels the attempt; its dispatch may still be on the way."""
        self.over_s.setdefault(attempt.transfer_id, self.clock.monotonic_s())
        self.feed(Withdrawn(attempt.transfer_id, Cancelled("by the gateway")))
        assert attempt.transfer_id not in self.held

    def rewrite(self) -> None:
        """Another request takes all free blocks, writes to them and ends."""
        blocks = self.pool.allocate(self.pool.num_available) or []
        for block_id in blocks:
            self.memory.block(block_id)[:] = b"\xee" * BLOCK_BYTES
        self.pool.release(blocks)

    def hear_stranger(self, transfer_id: str) -> None:
        """Another puller of the cluster sends every message about a transfer that is not its
        own."""
        over_s = dict(self.over_s)
        for event in _stranger_says(transfer_id):
            self.feed(event)
        reported = [each.message for each in self.outbox if each.incarnation == _STRANGER]
        assert not any(isinstance(message, Manifest) for message in reported), (
            "a stranger got blocks"
        )
        self.outbox = [each for each in self.outbox if each.incarnation != _STRANGER]
        assert self.over_s == over_s, "a stranger ended a transfer"

    def link(self, puller: str) -> None:
        self.feed(PeerLinked(puller))

    def lose(self, puller: str) -> None:
        self.feed(PeerLost(puller))

    def hear(self, puller: str, message: Message) -> None:
        self.feed(PeerMessage(puller, message))

    def tick(self) -> None:
        self.feed(Tick())

    def feed(self, event: SourceEvent) -> None:
        for effect in self.machine.handle(event):
            if isinstance(effect, ReleaseBlocks):
                assert self.over_s[effect.transfer_id] is None, "released twice"
                self.over_s[effect.transfer_id] = self.clock.monotonic_s()
                self.num_computed.pop(effect.transfer_id, None)
                self.launched.pop(effect.transfer_id, None)
                self.pool.release(self.held.pop(effect.transfer_id))
                if effect.error is None:
                    self.done.append(("released", int(effect.transfer_id, 16)))
            else:
                self.outbox.append(effect)

    # ---- what must hold

    def tidy(self) -> None:
        """Check the blocks, and reset what does not affect behaviour."""
        _reset(self.pool)
        check_pool(self.pool, {b: 1 for blocks in self.held.values() for b in blocks})

    def assert_nothing_left(self) -> None:
        assert not self.machine.transfers, self.transfer_states()
        assert not len(self.machine.tombstones)
        assert not self.held and None not in self.over_s.values()


class PullerSide(_Side):
    """`done` holds terminal events: ("completed" | "failed", attempt number)."""

    def __init__(self, incarnation: str, *, sees_steps: bool = False) -> None:
        self.incarnation = incarnation
        self.sees_steps = sees_steps
        self.early: dict[tuple[str, int], tuple[str, StartPull]] = {}  # -> source; await a step
        self.clock = FakeClock()
        self.machine = Puller(Hello(incarnation, {"model": "toy"}), self.clock, LEASE_S)
        self.memory = MemoryPool(NUM_BLOCKS, BLOCK_BYTES)
        self.pool = BlockPool(NUM_BLOCKS, self.memory.generations)
        self.ends: dict[str, str | None] = {}  # transfer_id -> how its intent ended
        self.waiting: dict[str, str] = {}  # for memory: transfer_id -> key, in order
        self.reservations: dict[str, list[int]] = {}
        self.openings: list[OpenWindow] = []
        self.windows: set[str] = set()  # sources whose window is open or opening
        self.pulls: dict[tuple[str, int], tuple[str, MemoryPull]] = {}  # -> source, copy in flight
        self.started: set[tuple[str, int]] = set()
        self.reports: list[PullEnded] = []  # of copies that ended, not yet given to the machine
        self.outbox: list[Send] = []
        self.done: list[tuple[str, int]] = []

    # ---- what may happen

    def intend(self, attempt: Attempt) -> None:
        """The gateway's dispatch arrives; a refusal is returned at once."""
        transfer_id = attempt.transfer_id
        if self.ends.get(transfer_id) == "cancelled":  # its cancel came first: the role refuses it
            return
        must_refuse = attempt.puller != self.incarnation
        self.ends[transfer_id] = None
        self.feed(Intended(attempt.ticket, attempt.key, _HASHES, NUM_CHUNKS, DEADLINE_S))
        assert self.ends[transfer_id] is not None or not must_refuse, "waits for another's KV"

    def gave_up(self, number: int) -> bool:
        """Whether no more KV of the attempt is expected here."""
        return self.ends.get(f"{number:032x}") in ("failed", "cancelled")

    def cancel(self, attempt: Attempt) -> None:
        """The gateway cancels the attempt; there is no response."""
        if self.ends.get(attempt.transfer_id) is None:
            self.ends[attempt.transfer_id] = "cancelled"
            self._wait_no_more(attempt.transfer_id)
            self.feed(IntentCancelled(attempt.transfer_id))

    def hear_stranger(self, transfer_id: str) -> None:
        """Another source of the cluster sends every message about a transfer that is not its
        own."""
        before = self._state_of_transfers()
        for event in _stranger_says(transfer_id):
            self.feed(event)
        self.outbox = [each for each in self.outbox if each.incarnation != _STRANGER]
        assert self._state_of_transfers() == before, "a stranger changed a transfer"

    def _state_of_transfers(self) -> object:
        return repr((self.machine.transfers, self.ends, self.reservations, self.pulls))

    def open_window(self) -> None:
        opening = self.openings.pop(0)
        self.feed(WindowOpened(opening.incarnation, self.sees_steps))

    def begin(self, pull: tuple[str, int]) -> None:
        """The step that writes these blocks has completed."""
        _, early = self.early.pop(pull)
        self._begin(early)

    def copy(self, pull: tuple[str, int], memory: Memory) -> None:
        """Copy the next byte from the source's memory as it is now."""
        _, handle = self.pulls[pull]
        pool = handle._window.source
        pool._data[:] = memory.data
        pool.generations._values[:] = memory.generations
        handle.advance(1)
        pool._data[:] = bytes(len(memory.data))  # so that equal sides compare equal
        pool.generations._values[:] = [0] * NUM_BLOCKS

    def report(self) -> None:
        self.feed(self.reports.pop(0))

    def link(self, source: str) -> None:
        self.feed(PeerLinked(source))

    def lose(self, source: str) -> None:
        self.feed(PeerLost(source))

    def hear(self, source: str, message: Message) -> None:
        self.feed(PeerMessage(source, message))

    def tick(self) -> None:
        self.feed(Tick())

    def feed(self, event: PullerEvent) -> None:
        for effect in self.machine.handle(event):
            match effect:
                case Send():
                    self.outbox.append(effect)
                case OpenWindow(incarnation):
                    self.openings.append(effect)
                    self.windows.add(incarnation)
                case CloseWindow(incarnation):
                    self.windows.remove(incarnation)
                    self._end_early(lambda pull, gone=incarnation: pull.incarnation == gone)
                    self.openings = [o for o in self.openings if o.incarnation != incarnation]
                case Reserve(transfer_id, key):
                    self._reserve(transfer_id, key)
                case StartPull():
                    self._start_pull(effect)
                case CancelPull(transfer_id):
                    self._end_early(lambda pull, over=transfer_id: pull.transfer_id == over)
                    for (owner, _), (_, handle) in self.pulls.items():
                        if owner == transfer_id:
                            handle.cancel()
                case Complete(transfer_id):
                    self._complete(transfer_id)
                case Failed(transfer_id):
                    self._end(transfer_id, "failed")
                case DropReservation(transfer_id):
                    self._drop(transfer_id)

    def _reserve(self, transfer_id: str, key: str) -> None:
        """Reserve as the engine does: first come, first served."""
        assert transfer_id not in (*self.reservations, *self.waiting), "reserved twice"
        self.waiting[transfer_id] = key
        self._grant()

    def _grant(self) -> None:
        while self.waiting and (blocks := self.pool.allocate(NUM_CHUNKS)) is not None:
            transfer_id = next(iter(self.waiting))
            key = self.waiting.pop(transfer_id)
            self.reservations[transfer_id] = blocks
            reservation = Reservation(key, tuple(blocks), 0, NUM_CHUNKS)
            self.feed(Reserved(transfer_id, reservation))

    def _wait_no_more(self, transfer_id: str) -> None:
        if self.waiting.pop(transfer_id, None) is not None:
            self._grant()

    def _start_pull(self, pull: StartPull) -> None:
        name = (pull.transfer_id, pull.seq)
        assert name not in self.started, "pulled twice"
        assert pull.incarnation in self.windows, "a pull through a closed window"
        assert {*pull.pairs.ids[1].tolist()} <= {*self.reservations[pull.transfer_id]}
        self.started.add(name)
        if pull.step:
            assert self.sees_steps, "told of what it cannot see"
            self.early[name] = (pull.incarnation, pull)
        else:
            self._begin(pull)

    def _end_early(self, is_over: Callable[[StartPull], bool]) -> None:
        for name, (_, pull) in [*self.early.items()]:
            if is_over(pull):
                del self.early[name]
                self.reports.append(PullEnded(*name, PullOutcome.CANCELLED))

    def _begin(self, pull: StartPull) -> None:
        name = (pull.transfer_id, pull.seq)
        window = MemoryWindow(MemoryPool(NUM_BLOCKS, BLOCK_BYTES), self.memory)
        handle = window.start_pull(pull.pairs, partial(self._on_done, name))
        self.pulls[name] = (pull.incarnation, handle)

    def _on_done(self, pull: tuple[str, int], outcome: PullOutcome) -> None:
        del self.pulls[pull]
        self.reports.append(PullEnded(*pull, outcome))

    def _complete(self, transfer_id: str) -> None:
        self._end(transfer_id, "completed")
        for index, block_id in enumerate(self.reservations[transfer_id]):
            found = bytes(self.memory.block(block_id))
            assert found == content(transfer_id, index), f"block {index} holds {found.hex()}"
        self._drop(transfer_id)  # the request runs and ends

    def _end(self, transfer_id: str, how: str) -> None:
        assert self.ends[transfer_id] is None, f"{how} after it was {self.ends[transfer_id]}"
        self.ends[transfer_id] = how
        self._wait_no_more(transfer_id)
        self.started = {each for each in self.started if each[0] != transfer_id}
        self.done.append((how, int(transfer_id, 16)))

    def _drop(self, transfer_id: str) -> None:
        copies = [*self.pulls, *self.early]
        assert all(owner != transfer_id for owner, _ in copies), "dropped under a copy"
        for block_id in self.reservations[transfer_id]:
            self.memory.block(block_id)[:] = bytes(BLOCK_BYTES)
        self.pool.release(self.reservations.pop(transfer_id))
        self._grant()

    # ---- what must hold

    def tidy(self) -> None:
        """Check the blocks, and reset what does not affect behaviour."""
        _reset(self.pool)
        self.memory.generations._values[:] = [0] * NUM_BLOCKS  # nobody pulls from here
        check_pool(self.pool, {b: 1 for blocks in self.reservations.values() for b in blocks})

    def assert_nothing_left(self) -> None:
        assert not self.machine.transfers, self.transfer_states()
        assert not len(self.machine.tombstones)
        assert (
            not self.reservations
            and not self.waiting
            and not self.pulls
            and not self.reports
            and not self.early
        )
        assert all(self.ends.values()), "an intent has no end"


def _stranger_says(transfer_id: str) -> Iterator[PeerLinked | PeerMessage | PeerLost]:
    """Each message without a Hello, after a valid Hello and after an incompatible one."""
    for hellos in ((), (Hello(_STRANGER, {"model": "toy"}),), (Hello(_STRANGER, {}),)):
        for message in _every_message(transfer_id):
            yield PeerLinked(_STRANGER)
            for each in (*hellos, message):
                yield PeerMessage(_STRANGER, each)
            yield PeerLost(_STRANGER)


def _every_message(transfer_id: str) -> list[Message]:
    """All messages about a transfer that a peer of either side can send."""
    blocks = packed([BlockRef(NUM_RESERVED_BLOCKS, 1, _HASHES[0])])
    error = Cancelled("so a stranger says")
    return [
        Attach(transfer_id),
        Attach(transfer_id, sees_steps=True),
        Renew((transfer_id,)),
        Release(transfer_id),
        Manifest(transfer_id, 0, blocks, LEASE_S),
        Manifest(transfer_id, 0, blocks, LEASE_S, HandoffState(7), 3),
        Revoked(transfer_id, error),
    ]


def _reset(pool: BlockPool) -> None:
    pool.num_releases = 0
    pool._free.sort(reverse=True)


def mapped(side: PullerSide) -> set[str]:
    """The sources from whose memory copies are in flight or still possible."""
    copies = [*side.pulls.values(), *side.early.values()]
    return {*side.windows, *(source for source, _ in copies)}
