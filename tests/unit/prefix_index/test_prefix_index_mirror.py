"""Journal and mirror: whatever messages are lost, duplicated or reordered, hints are as exact as
claimed.

The oracle is a plain set with the same changes as the engine's cache, and a copy of it at each
sequence number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fakes.clock import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.request.token_ids import BlockHash, Tier, block_hashes, root_hash
from baton.prefix_index.engine_copy import READ_S
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.messages import MAX_HASHES, Delta, Head, Message, NetChanges, encode
from baton.prefix_index.mirror import STALE_S, PrefixMirror
from baton.prefix_index.pages import PAGE_BLOCKS, Contents, decode_page

A, B = "aa" * 16, "bb" * 16
NUM_HASHES = 6


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


@dataclass
class Channel:
    """A publisher's journal, a mirror, and a channel between them that the test controls."""

    clock: FakeClock = field(default_factory=FakeClock)
    cache: set[BlockHash] = field(default_factory=set)
    sent: list[Message] = field(default_factory=list)
    cache_at: dict[int, set[BlockHash]] = field(default_factory=lambda: {0: set()})
    pages: dict[int, bytes] = field(default_factory=dict)  # stored in Redis

    def __post_init__(self) -> None:
        self.journal = CacheJournal(A)
        self.mirror = PrefixMirror(self.clock)
        self.mirror.add(A, NUM_HASHES)
        self.contents = self.journal.contents(0)
        self.was_ahead = False

    def toggle(self, block_hash: BlockHash) -> None:
        is_removed = block_hash in self.cache
        self.cache ^= {block_hash}
        self.journal.record([block_hash] * is_removed, [block_hash] * (not is_removed))

    def publish(self) -> None:
        """Publish as the publisher does: pages, contents, deltas."""
        deltas = self.journal.take()
        self.write_pages()
        self.contents = self.journal.contents(0)
        self.sent += deltas or [self.journal.head()]
        self.cache_at[self.journal.seq] = set(self.cache)

    def write_pages(self) -> None:
        """Write pages, also between two deltas: a large write takes time."""
        stored = self.journal.stored
        self.was_ahead |= len(self.journal._unpublished) > 0
        self.pages.update(stored.encode(stored.changed, 0))
        stored.changed.clear()

    def read(self) -> None:
        """Read the pages as the follower does."""
        copy = self.mirror.copies[A]
        if not copy.wants(self.contents):
            return
        hashes, in_host = set[BlockHash](), set[BlockHash]()
        for index in range(self.contents.num_pages):
            page = decode_page(self.pages[index], A, index)
            hashes.update(page.hashes)
            in_host.update(page.in_host)
        copy.install(self.contents, hashes, in_host, self.clock.monotonic_s())

    def deliver(self, message: Message, *, is_read: bool = True) -> str | None:
        """Deliver a message as the follower does; without `is_read`, Redis does not reply."""
        need = self.mirror.take(encode(message))
        if need is not None and is_read:
            self.read()
        return need

    def mirrored(self) -> set[BlockHash]:
        return {h(i) for i in range(NUM_HASHES) if self.mirror.holds_any([A], [h(i)])}

    def settle(self) -> None:
        """Channel and Redis work again."""
        for _ in range(2):
            self.clock.advance(READ_S)
            self.sent.clear()
            self.publish()
            for message in list(self.sent):
                self.deliver(message)


steps = st.one_of(
    st.tuples(st.just("toggle"), st.integers(0, NUM_HASHES - 1)),
    st.tuples(st.sampled_from(["publish", "write pages", "wait"]), st.just(0)),
    st.tuples(st.sampled_from(["deliver", "lose", "double", "late", "unread"]), st.integers(0, 50)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=60))
def test_an_exact_mirror_is_right_and_every_mirror_becomes_exact(
    script: list[tuple[str, int]],
) -> None:
    """A mirror with a sequence number equals the cache at that number, and every mirror gets one.
    If pages are ahead of their contents, it may also have hashes that no delta has named yet."""
    channel = Channel()
    for verb, number in script:
        if verb == "toggle":
            channel.toggle(h(number))
        elif verb == "publish":
            channel.publish()
        elif verb == "write pages":
            channel.write_pages()
        elif verb == "wait":
            channel.clock.advance(READ_S)
        elif channel.sent:
            index = number % len(channel.sent) if verb == "late" else 0
            message = channel.sent[index] if verb == "double" else channel.sent.pop(index)
            if verb != "lose":
                channel.deliver(message, is_read=verb != "unread")
        if (seq := channel.mirror.copies[A].seq) is not None and not channel.was_ahead:
            assert channel.mirrored() == channel.cache_at[seq]
    channel.settle()
    assert channel.mirror.copies[A].seq == channel.journal.seq
    assert channel.mirrored() == channel.cache


def test_a_gap_is_noticed_and_closed_by_the_pages() -> None:
    channel = Channel()
    channel.toggle(h(1))
    channel.publish()
    channel.sent.clear()  # lost
    channel.toggle(h(2))
    channel.publish()
    assert channel.deliver(channel.sent[-1], is_read=False) == A
    assert channel.mirrored() == {h(2)}, "an inexact mirror is still a hint"
    assert channel.deliver(Head(A, 2)) is None, "one look is enough for a while"
    channel.clock.advance(READ_S)
    assert channel.deliver(Head(A, 2)) == A
    assert channel.mirrored() == {h(1), h(2)}
    assert channel.mirror.copies[A].seq == 2
    assert not channel.mirror.copies[A].wants(channel.contents), "whoever is exact reads nothing"


def test_engines_that_are_new_are_to_be_read() -> None:
    channel = Channel()
    assert channel.mirror.added.is_set()
    channel.mirror.add(B, 5)
    channel.mirror.remove(B)
    assert channel.mirror.take_new() == [A]
    assert not channel.mirror.added.is_set()
    assert channel.mirror.take_new() == []


def test_an_absurd_number_costs_one_look() -> None:
    channel = Channel()
    assert channel.deliver(Head(A, 2**63)) == A
    channel.toggle(h(1))
    channel.settle()
    assert channel.mirrored() == {h(1)}


def test_the_unknown_are_dropped_and_the_gone_forgotten() -> None:
    channel = Channel()
    channel.deliver(Delta(B, 1, (), (h(1),)))
    assert B not in channel.mirror.copies
    assert not channel.mirror.holds_any([A, B], [h(1)])
    channel.deliver(Delta(A, 1, (), (h(1),)))
    channel.mirror.remove(A)
    channel.mirror.remove(A)
    assert not channel.mirror.holds_any([A, B], [h(1)])


def test_nobody_has_more_blocks_than_its_pool() -> None:
    channel = Channel()
    many = tuple(h(i) for i in range(NUM_HASHES + 1))
    assert channel.deliver(Delta(A, 1, (), many)) == A
    assert channel.mirrored() == set()
    channel.mirror.copies[A].seq = None
    assert not channel.mirror.copies[A].wants(Contents(A, 9, 1, 4, NUM_HASHES - 3, 0))
    channel.mirror.copies[A].install(Contents(A, 9, 1, 1, 0, 0), set(many), set(), 0.0)
    assert channel.mirror.copies[A].seq is None


def test_contents_of_more_pages_than_an_engine_can_fill_are_lies() -> None:
    mirror = PrefixMirror(FakeClock())
    mirror.add(A, 2 * PAGE_BLOCKS)
    assert mirror.copies[A].wants(Contents(A, 1, 3, 10, 0, 0))
    assert not mirror.copies[A].wants(Contents(A, 1, 4_000_000, 10, 0, 0))


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


@given(st.integers(1, 300), st.integers(0, 300))
def test_long_chains_are_looked_up_as_far_as_they_are_there(length: int, num_cached: int) -> None:
    mirror, chain = PrefixMirror(FakeClock()), [h(i) for i in range(length)]
    mirror.add(A, 1000)
    mirror.take(encode(Delta(A, 1, (), tuple(chain[:num_cached]))))
    assert mirror.cached_blocks([A], chain).get(A, 0) == min(length, num_cached)


def test_large_changes_travel_in_pieces() -> None:
    journal = CacheJournal(A)
    everything = [h(i) for i in range(2 * MAX_HASHES + 5)]
    journal.record([], everything)
    journal.take()
    journal.record(everything[:10], [h(10**6 + i) for i in range(MAX_HASHES)])
    first, second = journal.take()
    assert (first.seq, second.seq) == (4, 5), "three deltas came before"
    assert (len(first.removed), len(first.stored)) == (10, MAX_HASHES - 10)
    assert (len(second.removed), len(second.stored)) == (0, 10)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from(Tier)), max_size=120))
def test_pages_hold_what_the_journal_was_told(steps: list[tuple[int, Tier]]) -> None:
    journal, expected, written = CacheJournal(A), dict[BlockHash, Tier](), dict[int, bytes]()
    for number, now in steps:
        hashes = [h(number + 1)]
        journal.record(*(hashes if tier is now else [] for tier in (Tier.NOWHERE, Tier.DEVICE)))
        journal.record([], [], hashes if now is Tier.HOST else [])
        expected[hashes[0]] = now
        written.update(journal.stored.encode(journal.stored.changed, 7))
        journal.stored.changed.clear()
    read = [decode_page(raw, A, index) for index, raw in written.items()]
    assert [*written] == [*range(journal.stored.num_pages)]
    found = {each: Tier.DEVICE for page in read for each in page.hashes}
    found |= {each: Tier.HOST for page in read for each in page.in_host}
    assert found == {each: tier for each, tier in expected.items() if tier}
    assert len(found) == sum(map(journal.stored.count, (Tier.DEVICE, Tier.HOST)))
    contents, tiers = journal.contents(7), [*found.values()]
    assert contents.device_blocks == tiers.count(Tier.DEVICE)
    assert contents.host_blocks == tiers.count(Tier.HOST)


def test_what_goes_and_what_comes_share_pages() -> None:
    """A step that evicts as many blocks as it stores changes only the pages of the evicted ones."""
    journal = CacheJournal(A)
    journal.record([], [h(i) for i in range(4 * PAGE_BLOCKS)])
    journal.stored.changed.clear()
    gone = [h(i) for i in range(PAGE_BLOCKS, 2 * PAGE_BLOCKS)]
    journal.record(gone, [h(10**6 + i) for i in range(PAGE_BLOCKS)])
    assert journal.stored.changed == {1}
    assert journal.stored.num_pages == 4


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
    taken = [
        (each, tier) for tier, found in zip(Tier, changes.take(), strict=True) for each in found
    ]
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
        num_cached = mirror.cached_blocks([A], chain).get(A, 0)
        return num_cached, mirror.num_on_device(A, chain[:num_cached])

    publish(stored=chain)
    assert found() == (4, 4)
    publish(in_host=chain[2:])
    assert found() == (4, 2)
    pages = [decode_page(raw, A, 0) for _, raw in journal.stored.encode([0], 0)]
    contents = journal.contents(0)
    publish(stored=chain[2:3], removed=chain[3:])
    assert found() == (3, 3)
    mirror.copies[A].seq = None
    mirror.copies[A].install(contents, set(pages[0].hashes), set(pages[0].in_host), 0.0)
    assert found() == (4, 2)
    publish(in_host=[h(n) for n in range(100, 120)])
    assert found()[0] == 0, "more than there can be: lies"
