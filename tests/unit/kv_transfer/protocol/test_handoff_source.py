"""The source's state machine, path by path: which KV is held for which puller, and until when."""

from __future__ import annotations

import math

import pytest
from fakes.clock import FakeClock
from fakes.handoff.handoff import (
    FINGERPRINT,
    PULLER,
    SOURCE,
    hello,
    only,
    prompt_hashes,
    refs,
    ticket,
)

from baton.core.channels.addresses import HOST_ID_BYTES
from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    FingerprintMismatch,
    HandoffFailed,
    LeaseExpired,
    NodeLost,
    UnknownTransfer,
)
from baton.engine.kv.block_pool import BlockRefs
from baton.kv_transfer.protocol.events import (
    ChunkReady,
    Offered,
    PeerLinked,
    PeerLost,
    PeerMessage,
    ReleaseBlocks,
    Send,
    SourceEffect,
    SourceEvent,
    Tick,
    Withdrawn,
)
from baton.kv_transfer.protocol.handoff_side import TOMBSTONE_S
from baton.kv_transfer.protocol.messages import (
    Attach,
    HandoffState,
    Hello,
    Manifest,
    Message,
    Refused,
    Release,
    Renew,
    Revoked,
)
from baton.kv_transfer.protocol.source import Source
from baton.kv_transfer.window.network_address import KEY_BYTES, PoolAccess

LEASE_S = 10.0
DEADLINE_S = 600.0
T = ticket(1).transfer_id
OTHER_PULLER = "8" * 32
STATE = HandoffState(first_token_id=42)
NUM_BLOCKS = 3
HASHES = prompt_hashes(10)  # two full blocks and a partial one


class World:
    """A source with one linked and greeted puller."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.source = Source(hello(SOURCE), self.clock, LEASE_S)
        self.feed(PeerLinked(PULLER))
        self.hear(hello(PULLER))

    def feed(self, event: SourceEvent) -> list[SourceEffect]:
        return self.source.handle(event)

    def hear(self, message: Message, puller: str = PULLER) -> list[SourceEffect]:
        return self.feed(PeerMessage(puller, message))

    def wait(self, seconds: float) -> list[SourceEffect]:
        self.clock.advance(seconds)
        return self.feed(Tick())

    def offer(self) -> list[SourceEffect]:
        return self.feed(Offered(ticket(1), "key", DEADLINE_S))

    def launch(self, first: int, last: int, step: int) -> list[SourceEffect]:
        return self.feed(ChunkReady(T, refs(HASHES, first, last), 4 * last, step=step))

    def computed(self, last: int) -> list[SourceEffect]:
        """A launched chunk has completed."""
        state = STATE if last == NUM_BLOCKS else None
        return self.feed(ChunkReady(T, BlockRefs(), 4 * last, state))

    def chunk(self, first: int, last: int) -> list[SourceEffect]:
        state = STATE if last == NUM_BLOCKS else None
        return self.feed(ChunkReady(T, refs(HASHES, first, last), 4 * last, state))

    def hold(self) -> None:
        """Offer, attach and compute a prompt, so that its lease runs."""
        self.offer()
        self.hear(Attach(T))
        self.chunk(0, 3)

    def assert_over(self) -> None:
        assert self.source.transfers == {}
        assert self.source.next_deadline_s() == math.inf


@pytest.fixture
def world() -> World:
    return World()


def sent(effects: list[SourceEffect]) -> list[Message | Refused]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def released(effects: list[SourceEffect]) -> type[BatonError] | None:
    """The error class of the only ReleaseBlocks; None if the puller has pulled all blocks."""
    error = only(effects, ReleaseBlocks).error
    return None if error is None else type(error)


def revoked(effects: list[SourceEffect]) -> type[BatonError]:
    return type(only(sent(effects), Revoked).error)


def test_says_what_it_is_to_a_puller_that_fits_and_to_no_other() -> None:
    source = Source(hello(SOURCE), FakeClock(), LEASE_S)
    assert source.handle(PeerLinked(PULLER)) == []
    theirs = PeerMessage(PULLER, hello(PULLER))
    assert source.handle(theirs) == [Send(PULLER, Hello(SOURCE, FINGERPRINT))]
    assert source.handle(theirs) == [], "once a link"
    source.handle(PeerLinked(PULLER))
    (refusal,) = source.handle(PeerMessage(PULLER, Hello(PULLER, {"block_size": "8"})))
    assert isinstance(refusal, Send) and isinstance(refusal.message, Refused)


def test_each_puller_gets_a_key_of_its_own_and_none_the_engine_s() -> None:
    mine = PoolAccess(bytes(HOST_ID_BYTES), 4242, bytes(KEY_BYTES))
    source = Source(hello(SOURCE), FakeClock(), LEASE_S, mine)
    found = []
    for puller in (PULLER, OTHER_PULLER):
        source.handle(PeerLinked(puller))
        (answer,) = sent(source.handle(PeerMessage(puller, hello(puller))))
        assert isinstance(answer, Hello)
        assert answer.access == mine.of_puller(puller)
        found.append(answer.access.key)
    assert len({mine.key, *found}) == 3


def test_hands_over(world: World) -> None:
    assert world.offer() == []
    assert world.hear(Attach(T)) == []
    assert world.chunk(0, 1) == [
        Send(PULLER, Manifest(T, 0, refs(HASHES, 0, 1), LEASE_S, None)),
    ]
    assert world.chunk(1, 3) == [
        Send(PULLER, Manifest(T, 1, refs(HASHES, 1, 3), LEASE_S, STATE)),
    ]
    assert released(world.hear(Release(T))) is None
    world.assert_over()


def test_keeps_chunks_until_the_puller_attaches(world: World) -> None:
    world.offer()
    assert world.chunk(0, 2) == []
    assert world.chunk(2, 3) == []
    assert [m.seq for m in sent(world.hear(Attach(T)))] == [0, 1]


def test_attach_may_come_before_the_offer(world: World) -> None:
    assert world.hear(Attach(T)) == []
    assert world.offer() == []
    assert [m.seq for m in sent(world.chunk(0, 3))] == [0]


def test_an_attach_without_an_offer_is_revoked_after_one_lease(world: World) -> None:
    world.hear(Attach(T))
    assert world.source.next_deadline_s() == LEASE_S
    assert world.wait(LEASE_S - 0.01) == []
    assert revoked(world.wait(0.01)) is UnknownTransfer
    world.assert_over()
    assert released(world.offer()) is UnknownTransfer  # too late: the puller no longer waits


def test_unattached_blocks_are_kept_one_lease_after_the_last_chunk(world: World) -> None:
    world.offer()
    world.chunk(0, 2)
    assert world.wait(3 * LEASE_S) == []
    world.chunk(2, 3)
    assert world.wait(LEASE_S - 0.01) == []
    assert released(world.wait(0.01)) is LeaseExpired
    assert revoked(world.hear(Attach(T))) is LeaseExpired


def test_no_lease_expires_while_the_prompt_is_computed(world: World) -> None:
    world.hear(Attach(T))
    world.offer()
    world.chunk(0, 1)
    assert world.source.next_deadline_s() == math.inf
    assert world.wait(100 * LEASE_S) == []


def test_attaching_starts_a_full_lease(world: World) -> None:
    world.offer()
    world.chunk(0, 3)
    world.wait(LEASE_S * 0.9)
    assert only(sent(world.hear(Attach(T))), Manifest).lease_remaining_s == LEASE_S
    assert world.wait(LEASE_S * 0.9) == []


def test_the_lease_expires_without_renewal(world: World) -> None:
    world.hold()
    effects = world.wait(LEASE_S)
    assert released(effects) is LeaseExpired
    assert revoked(effects) is LeaseExpired
    assert world.hear(Release(T)) == []
    world.assert_over()


def test_one_renew_renews_all(world: World) -> None:
    world.hold()
    world.feed(Offered(ticket(2), "key2", DEADLINE_S))
    world.hear(Attach(ticket(2).transfer_id))
    world.feed(ChunkReady(ticket(2).transfer_id, refs(HASHES, 0, 3), 12, STATE))
    for _ in range(5):
        assert world.wait(LEASE_S * 0.9) == []
        assert world.hear(Renew((T, ticket(2).transfer_id))) == []


def test_a_renewal_that_waited_in_the_inbox_counts(world: World) -> None:
    world.hold()
    world.clock.advance(3 * LEASE_S)  # the process was stopped
    world.hear(Renew((T,)))
    assert world.feed(Tick()) == []


def test_no_lease_outlives_the_deadline(world: World) -> None:
    world.hold()
    for _ in range(int(DEADLINE_S / 5) - 1):
        world.wait(5)
        world.hear(Renew((T,)))
    assert released(world.wait(5)) is DeadlineExceeded


@pytest.mark.parametrize("chunks", [[], [(0, 1)], [(0, 3)]])
@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("end", ["release", "withdrawn", "lost", "relinked"])
def test_ends_at_any_point(
    world: World, chunks: list[tuple[int, int]], is_attached: bool, end: str
) -> None:
    world.offer()
    if is_attached:
        world.hear(Attach(T))
    for first, last in chunks:
        world.chunk(first, last)
    events: dict[str, SourceEvent] = {
        "release": PeerMessage(PULLER, Release(T)),
        "withdrawn": Withdrawn(T, Cancelled("the client left")),
        "lost": PeerLost(PULLER),
        "relinked": PeerLinked(PULLER),
    }
    effects = world.feed(events[end])
    is_whole = end == "release" and is_attached and chunks == [(0, 3)]
    cancelled = None if is_whole else Cancelled
    assert released(effects) is (cancelled if end in ("release", "withdrawn") else NodeLost)
    revocations = [m for m in sent(effects) if isinstance(m, Revoked)]
    assert len(revocations) == (end == "withdrawn" and is_attached)
    assert world.chunk(0, 1) == []  # a chunk that was in flight
    world.assert_over()


@pytest.mark.parametrize(
    "late", [Attach(T), Release(T), Renew((T,))], ids=lambda m: type(m).__name__
)
def test_nothing_late_revives_a_transfer(world: World, late: Message) -> None:
    world.hold()
    world.hear(Release(T))
    assert all(isinstance(m, Revoked) for m in sent(world.hear(late)))
    world.assert_over()
    assert released(world.offer()) is UnknownTransfer
    world.wait(TOMBSTONE_S)
    assert not len(world.source.tombstones)


def test_a_release_that_overtakes_everything_leaves_a_tombstone(world: World) -> None:
    assert world.hear(Release(T)) == []
    assert released(world.offer()) is Cancelled


def test_a_withdrawal_before_the_offer_is_told_to_who_attaches(world: World) -> None:
    world.feed(Withdrawn(T, Cancelled("finished at its first token")))
    assert revoked(world.hear(Attach(T))) is Cancelled


def test_withdrawn_revokes_an_early_attach(world: World) -> None:
    world.hear(Attach(T))
    effects = world.feed(Withdrawn(T, Cancelled("the client left")))
    assert revoked(effects) is Cancelled
    assert len(effects) == 1  # nothing was offered, so nothing is released


def test_only_the_tickets_puller_is_heard(world: World) -> None:
    world.feed(PeerLinked(OTHER_PULLER))
    world.hear(hello(OTHER_PULLER), OTHER_PULLER)
    world.hold()
    assert revoked(world.hear(Attach(T), OTHER_PULLER)) is UnknownTransfer
    assert revoked(world.hear(Renew((T,)), OTHER_PULLER)) is UnknownTransfer
    assert world.hear(Release(T), OTHER_PULLER) == []
    assert world.feed(PeerLost(OTHER_PULLER)) == []
    assert released(world.hear(Release(T))) is None


def test_an_early_attach_of_the_wrong_puller_yields_to_the_ticket(world: World) -> None:
    world.feed(PeerLinked(OTHER_PULLER))
    world.hear(hello(OTHER_PULLER), OTHER_PULLER)
    world.hear(Attach(T), OTHER_PULLER)
    effect = world.offer()[0]
    assert isinstance(effect, Send) and effect.incarnation == OTHER_PULLER
    assert revoked([effect]) is UnknownTransfer
    world.hear(Attach(T))
    assert only(world.chunk(0, 3), Send).incarnation == PULLER


def test_a_ticket_is_good_for_one_request(world: World) -> None:
    world.offer()
    second = world.feed(Offered(ticket(1), "other key", DEADLINE_S))
    assert second == [ReleaseBlocks(T, "other key", None)]  # errors are not compared
    assert released(second) is HandoffFailed
    world.hear(Attach(T))
    world.chunk(0, 3)
    assert world.hear(Release(T)) == [ReleaseBlocks(T, "key", None)]


def test_a_ticket_of_another_incarnation_is_refused(world: World) -> None:
    foreign = ticket(1, source="4" * 32)
    world.hear(Attach(T))
    assert released(world.feed(Offered(foreign, "key", DEADLINE_S))) is UnknownTransfer
    assert world.chunk(0, 1) == []  # a step that was in flight


def test_an_offer_may_wait_for_its_pullers_first_link() -> None:
    clock = FakeClock()
    source = Source(hello(SOURCE), clock, LEASE_S)
    source.handle(Offered(ticket(1), "key", DEADLINE_S))
    source.handle(PeerLinked(PULLER))
    source.handle(PeerMessage(PULLER, hello(PULLER)))
    source.handle(PeerMessage(PULLER, Attach(T)))
    assert source.handle(ChunkReady(T, refs(HASHES, 0, 3), 12, STATE))


@pytest.mark.parametrize(
    ("theirs", "error", "named"),
    [
        (Hello(PULLER, {**FINGERPRINT, "dtype": "bfloat16"}), FingerprintMismatch, "dtype"),
        (Hello(PULLER, {**FINGERPRINT, "layers": "2"}), FingerprintMismatch, "layers"),
        (Hello(PULLER, {"model": "toy"}), FingerprintMismatch, "block_size"),
        (Hello(PULLER, FINGERPRINT, protocol=99), FingerprintMismatch, "protocol"),
        (Hello(OTHER_PULLER, FINGERPRINT), HandoffFailed, OTHER_PULLER),
    ],
)
def test_refuses_a_pair_and_says_why(theirs: Message, error: type[BatonError], named: str) -> None:
    source = Source(hello(SOURCE), FakeClock(), LEASE_S)
    source.handle(Offered(ticket(1), "key", DEADLINE_S))
    source.handle(PeerLinked(PULLER))
    effects = source.handle(PeerMessage(PULLER, theirs))
    closed = only(sent(effects), Refused)
    assert type(closed.error) is error
    assert named in closed.error.message
    assert released(effects) is error
    assert source.handle(PeerMessage(PULLER, Attach(T))) == []  # its stream is ignored


@pytest.mark.parametrize(
    "message",
    [Manifest(T, 0, BlockRefs(), 1.0), Revoked(T, Cancelled("")), Hello(PULLER, {})],
    ids=lambda m: type(m).__name__,
)
def test_closes_a_puller_that_speaks_out_of_turn(world: World, message: Message) -> None:
    world.hold()
    effects = world.hear(message)
    only(sent(effects), Refused)
    assert released(effects) is not None
    world.assert_over()


def test_what_comes_before_hello_belongs_to_an_older_stream(world: World) -> None:
    world.feed(PeerLinked(PULLER))
    assert world.hear(Attach(T)) == []
    world.hear(hello(PULLER))
    world.offer()
    assert world.chunk(0, 3) == []  # no puller has attached on this stream
    assert len(sent(world.hear(Attach(T)))) == 1


def test_messages_of_strangers_are_dropped(world: World) -> None:
    world.hold()
    assert world.hear(Release(T), "7" * 32) == []
    assert world.hear(Hello("7" * 32, {}), "7" * 32) == []
    assert world.hear(hello(PULLER)) == []  # a repeated Hello is harmless


def manifests(effects: list[SourceEffect]) -> list[tuple[int, int, int, bool]]:
    """For each manifest: its number, its number of blocks, their step, whether it is last."""
    sent = [e.message for e in effects if isinstance(e, Send)]
    return [
        (m.seq, len(m.blocks), m.step, m.state is not None) for m in sent if isinstance(m, Manifest)
    ]


def test_a_puller_that_sees_steps_is_told_of_chunks_when_they_are_launched() -> None:
    world = World()
    world.hear(Attach(T, sees_steps=True))
    world.offer()
    assert manifests(world.launch(0, 1, step=5)) == [(0, 1, 5, False)]
    assert manifests(world.computed(1)) == []
    assert manifests(world.launch(1, 3, step=6)) == [(1, 2, 6, False)]
    assert manifests(world.computed(3)) == [(2, 0, 0, True)]
    assert only(world.hear(Release(T)), ReleaseBlocks).error is None


def test_a_puller_that_does_not_is_told_when_they_are_computed() -> None:
    world = World()
    world.hear(Attach(T))
    world.offer()
    assert manifests(world.launch(0, 1, step=5)) == []
    assert manifests(world.computed(1)) == [(0, 1, 0, False)]
    world.launch(1, 3, step=6)
    assert manifests(world.computed(3)) == [(1, 2, 0, False), (2, 0, 0, True)]


def test_a_puller_that_comes_late_waits_for_the_step_in_flight_alone() -> None:
    world = World()
    world.offer()
    world.launch(0, 1, step=5)
    world.computed(1)
    world.launch(1, 3, step=6)
    attached = world.hear(Attach(T, sees_steps=True))
    assert manifests(attached) == [(0, 1, 0, False), (1, 2, 6, False)]


def test_a_request_that_ends_under_its_step_is_revoked() -> None:
    world = World()
    world.hear(Attach(T, sees_steps=True))
    world.offer()
    world.launch(0, 3, step=5)
    effects = world.feed(Withdrawn(T, Cancelled("by the gateway")))
    assert isinstance(only(effects, Send).message, Revoked)
    assert world.launch(3, 3, step=6) == world.computed(3) == []
