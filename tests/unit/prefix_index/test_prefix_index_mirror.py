"""Journal and mirror: whatever the channel loses, doubles or shuffles, hints stay what they claim.

The oracle is a plain set that is changed like the engine's cache, and its copies at each number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fakes.clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.request.token_ids import BlockHash, Tier, block_hashes, root_hash
from baton.prefix_index.messages import (
    MAX_HASHES,
    CacheJournal,
    Delta,
    Head,
    Message,
    NetChanges,
    Snapshot,
    SnapshotChunk,
    encode,
)
from baton.prefix_index.mirror import (
    REQUEST_S,
    STALE_S,
    PrefixMirror,
    ReadSnapshot,
    RequestSnapshot,
)

A, B = "aa" * 16, "bb" * 16
NUM_HASHES = 6


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


@dataclass
class Channel:
    """A publisher's journal, a mirror, and a channel between them that the test orders about."""

    clock: FakeClock = field(default_factory=FakeClock)
    cache: set[BlockHash] = field(default_factory=set)
    sent: list[Message] = field(default_factory=list)
    cache_at: dict[int, set[BlockHash]] = field(default_factory=lambda: {0: set()})
    snapshots: dict[int, list[SnapshotChunk]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.journal = CacheJournal(A)
        self.mirror = PrefixMirror(self.clock)
        self.mirror.add(A, NUM_HASHES)

    def toggle(self, block_hash: BlockHash) -> None:
        is_removed = block_hash in self.cache
        self.cache ^= {block_hash}
        self.journal.record([block_hash] * is_removed, [block_hash] * (not is_removed))

    def publish(self) -> None:
        self.sent += self.journal.take() or [self.journal.head()]
        self.cache_at[self.journal.seq] = set(self.cache)

    def offer_snapshot(self) -> None:
        self.publish()
        chunks, snapshot = self.journal.snapshot()
        self.snapshots[snapshot.seq] = chunks
        self.sent.append(snapshot)

    def deliver(self, message: Message) -> RequestSnapshot | ReadSnapshot | None:
        """As the follower does."""
        need = self.mirror.take(encode(message))
        if isinstance(need, ReadSnapshot):
            chunks = self.snapshots[need.snapshot.seq]
            hashes = {block_hash for chunk in chunks for block_hash in chunk.hashes}
            self.mirror.install(need.snapshot, hashes)
        return need

    def mirrored(self) -> set[BlockHash]:
        return {h(i) for i in range(NUM_HASHES) if self.mirror.holds_any([A], [h(i)])}

    def settle(self) -> None:
        """A channel that works again: heads come, questions are answered."""
        for _ in range(3):
            self.clock.advance(REQUEST_S)
            self.sent.clear()
            self.publish()
            for message in list(self.sent):
                if isinstance(self.deliver(message), RequestSnapshot):
                    self.offer_snapshot()
                    self.deliver(self.sent[-1])


steps = st.one_of(
    st.tuples(st.just("toggle"), st.integers(0, NUM_HASHES - 1)),
    st.tuples(st.sampled_from(["publish", "snapshot"]), st.just(0)),
    st.tuples(st.sampled_from(["deliver", "lose", "double", "late"]), st.integers(0, 50)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=60))
def test_an_exact_mirror_is_right_and_every_mirror_becomes_exact(
    script: list[tuple[str, int]],
) -> None:
    channel = Channel()
    for verb, number in script:
        if verb == "toggle":
            channel.toggle(h(number))
        elif verb == "publish":
            channel.publish()
        elif verb == "snapshot":
            channel.offer_snapshot()
        elif channel.sent:
            index = number % len(channel.sent) if verb == "late" else 0
            message = channel.sent[index] if verb == "double" else channel.sent.pop(index)
            if verb != "lose":
                channel.deliver(message)
        if (seq := channel.mirror._copies[A].seq) is not None:
            assert channel.mirrored() == channel.cache_at[seq]
    channel.settle()
    assert channel.mirror._copies[A].seq == channel.journal.seq
    assert channel.mirrored() == channel.cache


def test_a_gap_is_noticed_asked_about_and_closed() -> None:
    channel = Channel()
    channel.toggle(h(1))
    channel.publish()
    channel.sent.clear()  # lost
    channel.toggle(h(2))
    channel.publish()
    assert channel.deliver(channel.sent[-1]) == RequestSnapshot(A)
    assert channel.mirrored() == {h(2)}, "an inexact mirror is still a hint"
    assert channel.deliver(Head(A, 2)) is None, "one question is enough for a while"
    channel.offer_snapshot()
    assert isinstance(channel.deliver(channel.sent[-1]), ReadSnapshot)
    assert channel.mirrored() == {h(1), h(2)}
    assert (channel.mirror._copies[A].seq, channel.mirror.num_gaps) == (2, 1)
    assert channel.deliver(channel.sent[-1]) is None, "whoever is exact reads no snapshot"


def test_an_absurd_number_costs_one_snapshot() -> None:
    channel = Channel()
    assert channel.deliver(Head(A, 2**63)) == RequestSnapshot(A)
    channel.toggle(h(1))
    channel.settle()
    assert channel.mirrored() == {h(1)}


def test_the_unknown_are_dropped_and_the_gone_forgotten() -> None:
    channel = Channel()
    channel.deliver(Delta(B, 1, (), (h(1),)))
    channel.mirror.install(Snapshot(B, 1, 1), {h(1)})
    assert channel.mirror.num_foreign_messages == 1
    assert not channel.mirror.holds_any([A, B], [h(1)])
    channel.deliver(Delta(A, 1, (), (h(1),)))
    channel.mirror.remove(A)
    channel.mirror.remove(A)
    assert not channel.mirror.holds_any([A, B], [h(1)])


def test_nobody_has_more_blocks_than_its_pool() -> None:
    channel = Channel()
    many = tuple(h(i) for i in range(NUM_HASHES + 1))
    assert channel.deliver(Delta(A, 1, (), many)) == RequestSnapshot(A)
    assert channel.mirrored() == set()
    assert channel.deliver(Snapshot(A, 9, 2**32 - 1)) is None
    channel.mirror.install(Snapshot(A, 9, 1), set(many))
    assert channel.mirror._copies[A].seq is None
    channel.deliver(SnapshotChunk(A, 1, 0, ()))
    assert channel.mirror.num_bad_messages == 3


def test_an_engine_that_is_not_heard_of_counts_as_empty_until_it_is() -> None:
    channel = Channel()
    channel.toggle(h(1))
    channel.publish()
    channel.deliver(channel.sent[0])
    channel.clock.advance(STALE_S + 1)
    assert channel.mirrored() == set()
    assert channel.deliver(channel.journal.head()) is None
    assert channel.mirrored() == {h(1)}


def test_cached_blocks_are_the_unbroken_beginning() -> None:
    mirror = PrefixMirror(FakeClock())
    chain = block_hashes(root_hash("fp"), range(5 * 4), 4)
    for incarnation, cached in ((A, chain[:3]), (B, [chain[0], chain[2]])):
        mirror.add(incarnation, 10)
        mirror.take(encode(Delta(incarnation, 1, (), tuple(cached))))
    assert mirror.cached_blocks([A, B], chain) == {A: 3, B: 1}
    assert mirror.cached_blocks([A, B], chain[:2]) == {A: 2, B: 1}
    assert mirror.cached_blocks([B, "cc" * 16], []) == {B: 0}


def test_large_caches_travel_in_pieces() -> None:
    journal = CacheJournal(A)
    everything = [h(i) for i in range(2 * MAX_HASHES + 5)]
    journal.record([], everything)
    journal.take()
    journal.record(everything[:10], [h(10**6 + i) for i in range(MAX_HASHES)])
    first, second = journal.take()
    assert (first.seq, second.seq) == (4, 5), "three deltas came before"
    assert (len(first.removed), len(first.stored)) == (10, MAX_HASHES - 10)
    assert (len(second.removed), len(second.stored)) == (0, 10)
    chunks, snapshot = journal.snapshot()
    assert (snapshot.num_chunks, snapshot.seq) == (len(chunks), 5) == (3, 5)
    assert len({x for chunk in chunks for x in chunk.hashes}) == 3 * MAX_HASHES - 5


moves = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(Tier)))


@given(moves, moves)
def test_net_changes_lead_from_one_state_to_the_other(
    first: list[tuple[int, Tier]], second: list[tuple[int, Tier]]
) -> None:
    changes, tiers = NetChanges(), dict.fromkeys(range(5), Tier.NOWHERE)

    def move(steps: list[tuple[int, Tier]]) -> None:
        for number, now in steps:
            if tiers[number] is not now:
                changes.moved([h(number)], tiers[number], now)
                tiers[number] = now

    move(first)
    changes.take()
    before = dict(tiers)
    move(second)
    expected = {(h(n), tier) for n, tier in tiers.items() if tier is not before[n]}
    assert len(changes) == len(expected)
    taken = changes.take()
    assert set(taken) == expected and len(taken) == len(expected)
    assert not changes


def test_the_mirror_knows_what_is_in_host_memory_alone() -> None:
    journal, mirror = CacheJournal(A), PrefixMirror(FakeClock())
    mirror.add(A, 10)
    chain = [h(n) for n in range(4)]

    def publish(**changes: list[BlockHash]) -> None:
        journal.record(**({"removed": [], "stored": []} | changes))
        for delta in journal.take():
            mirror.take(encode(delta))

    def found() -> tuple[int, int]:
        return mirror.cached_blocks([A], chain).get(A, 0), mirror.host_blocks(A, chain)

    publish(stored=chain)
    assert found() == (4, 0)
    publish(in_host=chain[2:])
    assert found() == (4, 2)
    chunks, snapshot = journal.snapshot()
    publish(stored=chain[2:3], removed=chain[3:])
    assert found() == (3, 0)
    mirror._copies[A].seq = None
    hashes = {each for chunk in chunks for each in (*chunk.hashes, *chunk.in_host)}
    mirror.install(snapshot, hashes, {each for chunk in chunks for each in chunk.in_host})
    assert found() == (4, 2)
    assert mirror.host_blocks("bb" * 16, chain) == 0
    publish(in_host=[h(n) for n in range(100, 120)])
    assert found() == (0, 0), "more than there can be: lies"
