"""The puller's state machine, path by path: which KV is in transfer, and when it may be used."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

import pytest
from fakes.clock import FakeClock
from fakes.handoff.block_pairs import split
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
from msgspec.structs import replace

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    FingerprintMismatch,
    HandoffFailed,
    LeaseExpired,
    NodeLost,
    StaleBlocks,
    UnknownTransfer,
)
from baton.engine.kv.block_pool import BlockRefs, Reservation
from baton.kv_transfer.protocol.events import (
    CancelPull,
    CloseWindow,
    Complete,
    DropReservation,
    Failed,
    Intended,
    IntentCancelled,
    OpenWindow,
    PeerLinked,
    PeerLost,
    PeerMessage,
    PullEnded,
    PullerEffect,
    PullerEvent,
    Reserve,
    Reserved,
    Send,
    StartPull,
    Tick,
    WindowFailed,
    WindowOpened,
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
from baton.kv_transfer.protocol.puller import RELINK_WAIT_S, Puller
from baton.kv_transfer.window.block_pairs import BlockPairs
from baton.kv_transfer.window.transport import PullOutcome

E = TypeVar("E")

LEASE_S = 9.0
LINK_WAIT_S = 10.0
DEADLINE_S = 600.0
T, T2 = ticket(1).transfer_id, ticket(2).transfer_id
STATE = HandoffState(first_token_id=42)
NUM_BLOCKS = 3
HASHES = prompt_hashes(10)  # two full blocks and a partial one
OK, STALE, CANCELLED = PullOutcome.OK, PullOutcome.STALE, PullOutcome.CANCELLED


class World:
    """A puller with one source: linked, greeted and with an open window if `is_ready`."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.clock = FakeClock()
        self.puller = Puller(hello(PULLER), self.clock, LINK_WAIT_S)
        if is_ready:
            self.link()

    def link(self) -> list[PullerEffect]:
        self.feed(PeerLinked(SOURCE))
        (opening,) = self.hear(hello(SOURCE))
        assert isinstance(opening, OpenWindow)
        return self.feed(WindowOpened(SOURCE))

    def feed(self, event: PullerEvent) -> list[PullerEffect]:
        return [comparable(effect) for effect in self.puller.handle(event)]

    def hear(self, message: Message, source: str = SOURCE) -> list[PullerEffect]:
        return self.feed(PeerMessage(source, message))

    def wait(self, seconds: float) -> list[PullerEffect]:
        self.clock.advance(seconds)
        return self.feed(Tick())

    def intend(self, number: int = 1, deadline_s: float = DEADLINE_S) -> list[PullerEffect]:
        return self.feed(Intended(ticket(number), f"key{number}", HASHES, 3, deadline_s))

    def manifest(self, seq: int, first: int, last: int, number: int = 1) -> list[PullerEffect]:
        return self.hear(manifest(seq, first, last, number))

    def reserve(self, num_cached_blocks: int = 0, number: int = 1) -> list[PullerEffect]:
        reserved = reservation(number, num_cached_blocks)
        return self.feed(Reserved(ticket(number).transfer_id, reserved))

    def end_pull(self, seq: int, outcome: PullOutcome) -> list[PullerEffect]:
        return self.feed(PullEnded(T, seq, outcome))

    def pull_one_chunk(self) -> None:
        """Bring the first of two chunks into transfer."""
        self.intend()
        self.manifest(0, 0, 2)
        self.reserve()

    def assert_over(self) -> None:
        assert self.puller.transfers == {}
        assert self.puller.next_deadline_s() == math.inf


def reservation(number: int = 1, num_cached_blocks: int = 0) -> Reservation:
    return Reservation(f"key{number}", (10, 11, 12, 13), num_cached_blocks, 3)


def manifest(seq: int, first: int, last: int, number: int = 1) -> Manifest:
    state = STATE if last == NUM_BLOCKS else None
    blocks = refs(HASHES, first, last)
    return Manifest(ticket(number).transfer_id, seq, blocks, LEASE_S, state)


def pull(seq: int, first: int, last: int) -> StartPull:
    destinations = range(10 + first, 10 + last)
    pairs = BlockPairs.join(refs(HASHES, first, last), destinations)
    return comparable(StartPull(T, seq, SOURCE, pairs))


def comparable(effect: E) -> E:
    """Its arrays as a list."""
    if isinstance(effect, StartPull):
        return dataclasses.replace(effect, pairs=split(effect.pairs))
    return effect


def sent(effects: list[PullerEffect]) -> list[Message | Refused]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def failure(effects: list[PullerEffect]) -> type[BatonError]:
    return type(only(effects, Failed).error)


@pytest.fixture
def world() -> World:
    return World()


def test_pulls_chunk_by_chunk(world: World) -> None:
    assert world.intend() == [Send(SOURCE, Attach(T))]
    assert world.manifest(0, 0, 1) == [Reserve(T, "key1")]
    assert world.reserve() == [pull(0, 0, 1)]
    assert world.manifest(1, 1, 3) == [pull(1, 1, 3)]  # while the first is in flight
    assert world.end_pull(1, OK) == []
    assert world.end_pull(0, OK) == [
        Complete(T, "key1", STATE, reservation()),
        Send(SOURCE, Release(T)),
    ]
    world.assert_over()


def test_takes_no_memory_before_there_is_something_to_pull(world: World) -> None:
    effects = world.intend() + world.wait(1)
    assert not any(isinstance(effect, Reserve) for effect in effects)


def test_manifests_that_came_before_the_memory_are_pulled_with_it(world: World) -> None:
    world.intend()
    assert world.manifest(0, 0, 1) == [Reserve(T, "key1")]
    assert world.manifest(1, 1, 3) == []
    assert world.reserve() == [pull(0, 0, 1), pull(1, 1, 3)]


def test_what_is_cached_here_is_not_pulled(world: World) -> None:
    world.intend()
    world.manifest(0, 0, 1)
    assert world.reserve(num_cached_blocks=2) == []
    assert world.manifest(1, 1, 3) == [pull(1, 2, 3)]
    only(world.end_pull(1, OK), Complete)


def test_completes_without_a_copy_if_all_is_cached(world: World) -> None:
    world.intend()
    world.manifest(0, 0, 3)
    only(world.reserve(num_cached_blocks=3), Complete)
    world.assert_over()


def test_each_waits_for_memory_once_there_is_something_to_pull(world: World) -> None:
    world.intend(1)
    world.intend(2)
    assert world.manifest(0, 0, 3, number=2) == [Reserve(T2, "key2")]
    assert world.manifest(0, 0, 1, number=1) == [Reserve(T, "key1")]
    assert world.manifest(1, 1, 3, number=1) == []  # it is waiting already
    assert world.wait(1) == []
    assert world.reserve() == [pull(0, 0, 1), pull(1, 1, 3)]
    assert isinstance(only(world.reserve(number=2), StartPull), StartPull)


def test_memory_granted_to_who_gave_up_is_dropped(world: World) -> None:
    world.intend(1)
    world.intend(2)
    world.manifest(0, 0, 3, number=1)
    world.manifest(0, 0, 3, number=2)
    assert world.feed(IntentCancelled(T)) == [Send(SOURCE, Release(T))]
    assert world.reserve(number=1) == [DropReservation(T, reservation())]


@pytest.mark.parametrize("outcome", [STALE, PullOutcome.FAILED, CANCELLED])
def test_a_bad_copy_fails_the_transfer_and_fences_its_memory(
    world: World, outcome: PullOutcome
) -> None:
    world.pull_one_chunk()
    world.manifest(1, 2, 3)
    effects = world.end_pull(0, outcome)
    assert failure(effects) is (StaleBlocks if outcome is STALE else HandoffFailed)
    assert sent(effects) == [Release(T)]
    assert CancelPull(T) in effects
    assert world.end_pull(1, OK) == [DropReservation(T, reservation())]
    world.assert_over()


def test_cancel_is_silent_and_waits_for_the_copies(world: World) -> None:
    world.pull_one_chunk()
    assert world.feed(IntentCancelled(T)) == [Send(SOURCE, Release(T)), CancelPull(T)]
    assert world.feed(IntentCancelled(T)) == []
    assert world.manifest(1, 2, 3) == []
    assert world.wait(DEADLINE_S) == []
    assert world.end_pull(0, CANCELLED) == [DropReservation(T, reservation())]
    world.assert_over()


def test_a_doubled_pull_report_is_ignored(world: World) -> None:
    world.pull_one_chunk()
    world.manifest(1, 2, 3)
    assert world.end_pull(0, OK) == []
    assert world.end_pull(0, OK) == []  # pull 1 is still in flight
    only(world.end_pull(1, OK), Complete)


def test_the_deadline_ends_it(world: World) -> None:
    world.pull_one_chunk()
    world.clock.advance(DEADLINE_S)
    effects = world.feed(Tick())
    assert failure(effects) is DeadlineExceeded
    assert world.end_pull(0, OK) == [DropReservation(T, reservation())]
    world.assert_over()


def test_renews_all_leases_of_a_source_in_one_message(world: World) -> None:
    world.intend(1)
    world.intend(2)
    assert world.puller.next_deadline_s() == DEADLINE_S  # no manifest, no lease
    world.manifest(0, 0, 2, number=1)
    world.manifest(0, 0, 2, number=2)
    assert world.puller.next_deadline_s() == LEASE_S / 3
    for _ in range(4):
        assert Renew((T, T2)) in sent(world.wait(LEASE_S / 3))
    world.feed(IntentCancelled(T))
    assert Renew((T2,)) in sent(world.wait(LEASE_S / 3))


def test_a_new_lease_does_not_postpone_the_others(world: World) -> None:
    world.intend(1)
    world.intend(2)
    world.manifest(0, 0, 2, number=1)
    world.wait(LEASE_S / 3 - 1)
    world.manifest(0, 0, 2, number=2)
    assert Renew((T, T2)) in sent(world.wait(1))


def test_waits_for_the_pair_to_become_ready() -> None:
    world = World(is_ready=False)
    assert world.intend() == []
    assert world.link() == [Send(SOURCE, Attach(T))]


def test_a_pair_that_never_becomes_ready_fails_the_intent() -> None:
    world = World(is_ready=False)
    world.intend()
    assert world.puller.next_deadline_s() == LINK_WAIT_S
    assert failure(world.wait(LINK_WAIT_S)) is NodeLost
    world.assert_over()


def test_a_link_that_has_just_ended_is_waited_for_a_moment(world: World) -> None:
    """A hand-off waits briefly for a link that has just ended: the sender of the request did not
    know yet, and will choose another pair later."""
    world.feed(PeerLost(SOURCE))
    world.intend(1)
    assert world.link() == [Send(SOURCE, Attach(T))], "it came back"
    world.feed(PeerLost(SOURCE))
    world.intend(2)
    assert failure(world.wait(RELINK_WAIT_S)) is NodeLost
    world.assert_over()
    world.link()
    world.feed(PeerLost(SOURCE))
    world.wait(LINK_WAIT_S)
    world.intend(3)
    assert world.puller.next_deadline_s() == world.clock.monotonic_s() + LINK_WAIT_S, "long ago"


def test_a_source_out_of_reach_is_refused() -> None:
    world = World(is_ready=False)
    world.intend()
    world.feed(PeerLinked(SOURCE))
    only(world.hear(hello(SOURCE)), OpenWindow)
    effects = world.feed(WindowFailed(SOURCE, HandoffFailed("no transport")))
    assert failure(effects) is HandoffFailed
    only(sent(effects), Refused)
    world.assert_over()


@pytest.mark.parametrize("moment", ["before the stream", "before Hello", "behind Hello"])
def test_a_window_that_opens_late_is_opened_once_for_the_first_transfer(moment: str) -> None:
    world = World(is_ready=False)
    effects = world.intend() if moment == "before the stream" else []
    effects += world.feed(PeerLinked(SOURCE, "host", opens_late=True))
    effects += world.intend() if moment == "before Hello" else []
    effects += world.hear(hello(SOURCE))
    effects += world.intend() if moment == "behind Hello" else []
    effects += world.intend(2)
    assert only(effects, OpenWindow).host == "host"
    attached = [Send(SOURCE, Attach(each)) for each in (T, T2)]
    assert world.feed(WindowOpened(SOURCE)) == attached


def test_a_window_that_failed_is_not_wanted_again_at_once() -> None:
    """A source whose window failed counts as unlinked for a while: each prefix fetched in vain
    would cost the channel."""
    world = World(is_ready=False)
    for is_open in (True, False):
        world.feed(PeerLinked(SOURCE, opens_late=True))
        world.hear(hello(SOURCE))
        assert world.puller.is_linked(SOURCE) == is_open
        if is_open:
            only(world.intend(), OpenWindow)
            effects = world.feed(WindowFailed(SOURCE, HandoffFailed("no transport")))
            only(sent(effects), Refused)
    world.clock.advance(TOMBSTONE_S)
    assert world.puller.is_linked(SOURCE)


def test_a_window_that_was_not_opened_is_not_closed() -> None:
    world = World(is_ready=False)
    world.feed(PeerLinked(SOURCE, opens_late=True))
    assert world.hear(hello(SOURCE)) == []
    assert world.feed(PeerLost(SOURCE)) == []


def test_the_window_of_an_earlier_stream_is_closed_and_opened_anew() -> None:
    world = World(is_ready=False)
    world.intend()
    world.feed(PeerLinked(SOURCE))
    only(world.hear(hello(SOURCE)), OpenWindow)
    assert CloseWindow(SOURCE) in world.feed(PeerLinked(SOURCE))
    world.intend(2)
    only(world.hear(hello(SOURCE)), OpenWindow)
    assert world.feed(WindowOpened(SOURCE)) == [Send(SOURCE, Attach(T2))]


@pytest.mark.parametrize("progress", ["attached", "queued", "pulling"])
def test_loss_of_the_source_fails_what_is_not_all_here(world: World, progress: str) -> None:
    world.intend()
    if progress != "attached":
        world.manifest(0, 0, 2)
    if progress == "pulling":
        world.reserve()
    effects = world.feed(PeerLost(SOURCE))
    assert failure(effects) is NodeLost
    assert sent(effects) == []
    assert effects[-1] == CloseWindow(SOURCE)
    if progress == "queued":
        assert world.reserve() == [DropReservation(T, reservation())]
    if progress == "pulling":
        assert world.end_pull(0, OK) == [DropReservation(T, reservation())]
    world.assert_over()


@pytest.mark.parametrize(("outcome", "is_good"), [(OK, True), (STALE, False), (CANCELLED, False)])
def test_the_last_copies_may_outlive_the_source(
    world: World, outcome: PullOutcome, is_good: bool
) -> None:
    world.pull_one_chunk()
    world.manifest(1, 2, 3)
    assert world.feed(PeerLost(SOURCE)) == [CloseWindow(SOURCE)]
    assert world.end_pull(0, OK) == []
    effects = world.end_pull(1, outcome)
    assert sent(effects) == []  # there is no peer to send a release to
    if is_good:
        only(effects, Complete)
    else:
        assert failure(effects) is NodeLost
        only(effects, DropReservation)
    world.assert_over()


def test_revoked_fails_with_the_sources_reason(world: World) -> None:
    world.pull_one_chunk()
    effects = world.hear(Revoked(T, LeaseExpired("")))
    assert failure(effects) is LeaseExpired
    assert sent(effects) == []
    assert world.end_pull(0, OK) == [DropReservation(T, reservation())]


def test_a_doubled_manifest_is_ignored(world: World) -> None:
    world.pull_one_chunk()
    assert world.manifest(0, 0, 2) == []
    assert world.manifest(1, 2, 3) == [pull(1, 2, 3)]
    assert world.manifest(1, 2, 3) == []


@pytest.mark.parametrize(
    "bad",
    [
        manifest(2, 2, 3),  # a gap
        manifest(1, 1, 2),  # a block twice
        Manifest(T, 1, refs(HASHES, 2, 4), LEASE_S, STATE),  # more blocks than the prompt has
        Manifest(T, 1, refs(prompt_hashes(12), 2, 3), LEASE_S, STATE),  # a hash too many
        Manifest(T, 1, BlockRefs(), LEASE_S, STATE),  # the last manifest before all blocks
    ],
)
def test_a_manifest_that_breaks_the_protocol_fails_the_transfer(
    world: World, bad: Manifest
) -> None:
    world.pull_one_chunk()
    effects = world.hear(bad)
    assert failure(effects) is HandoffFailed
    assert sent(effects) == [Release(T)]


def test_another_prompts_blocks_are_never_pulled(world: World) -> None:
    world.intend()
    foreign = refs(prompt_hashes(10, seed=1), 0, 2)
    effects = world.hear(Manifest(T, 0, foreign, LEASE_S))
    assert failure(effects) is HandoffFailed
    assert not any(isinstance(effect, Reserve | StartPull) for effect in effects)


def test_a_manifest_after_the_last_fails_the_transfer(world: World) -> None:
    world.intend()
    world.manifest(0, 0, 3)
    assert failure(world.hear(Manifest(T, 1, BlockRefs(), LEASE_S))) is HandoffFailed


@pytest.mark.parametrize(
    "late",
    [manifest(0, 0, 2), manifest(1, 2, 3), Revoked(T, Cancelled(""))],
    ids=["manifest", "last manifest", "revoked"],
)
def test_nothing_late_revives_a_transfer(world: World, late: Message) -> None:
    world.intend()
    world.feed(IntentCancelled(T))
    assert world.hear(late) == []
    assert failure(world.intend()) is Cancelled
    world.assert_over()


def test_only_the_tickets_source_is_heard(world: World) -> None:
    other = "6" * 32
    world.feed(PeerLinked(other))
    world.hear(hello(other), other)
    world.intend()
    assert world.hear(manifest(0, 0, 2), other) == []
    assert world.hear(Revoked(T, Cancelled("")), other) == []
    assert world.feed(PeerLost(other)) == [CloseWindow(other)]
    assert world.manifest(0, 0, 2) == [Reserve(T, "key1")]


def test_a_ticket_is_good_for_one_request(world: World) -> None:
    world.intend()
    again = Intended(ticket(1), "other key", HASHES, 3, DEADLINE_S)
    failed = only(world.feed(again), Failed)
    assert failed.key == "other key"
    assert type(failed.error) is HandoffFailed
    assert world.manifest(0, 0, 2) == [Reserve(T, "key1")]


def test_a_ticket_of_another_incarnation_is_refused(world: World) -> None:
    foreign = Intended(ticket(1, puller="4" * 32), "key", HASHES, 3, DEADLINE_S)
    assert failure(world.feed(foreign)) is UnknownTransfer


@pytest.mark.parametrize(
    ("theirs", "error", "named"),
    [
        (Hello(SOURCE, {**FINGERPRINT, "dtype": "bfloat16"}), FingerprintMismatch, "dtype"),
        (Hello("6" * 32, FINGERPRINT), HandoffFailed, "6" * 32),
    ],
)
def test_refuses_a_pair_and_says_why(theirs: Message, error: type[BatonError], named: str) -> None:
    world = World(is_ready=False)
    world.intend()
    world.feed(PeerLinked(SOURCE))
    effects = world.hear(theirs)
    assert failure(effects) is error
    assert named in only(sent(effects), Refused).error.message
    world.assert_over()


@pytest.mark.parametrize(
    "message",
    [Attach(T), Renew((T,)), Release(T), Hello(SOURCE, {})],
    ids=lambda m: type(m).__name__,
)
def test_closes_a_source_that_speaks_out_of_turn(world: World, message: Message) -> None:
    world.intend()
    effects = world.hear(message)
    only(sent(effects), Refused)
    only(effects, Failed)


def test_what_comes_before_hello_belongs_to_an_older_stream() -> None:
    world = World(is_ready=False)
    world.intend()
    world.feed(PeerLinked(SOURCE))
    assert world.hear(manifest(0, 0, 2)) == []
    assert world.hear(Revoked(T, Cancelled(""))) == []
    only(world.hear(hello(SOURCE)), OpenWindow)
    assert world.feed(WindowOpened(SOURCE)) == [Send(SOURCE, Attach(T))]


def test_messages_of_strangers_are_dropped(world: World) -> None:
    assert world.hear(Attach(T), "7" * 32) == []
    assert world.hear(Revoked("f" * 32, Cancelled(""))) == []
    assert world.hear(hello(SOURCE)) == []  # a repeated Hello is harmless


def test_a_chunk_whose_step_is_seen_is_pulled_behind_it() -> None:
    world = World(is_ready=False)
    world.feed(PeerLinked(SOURCE))
    (opening,) = world.hear(hello(SOURCE))
    assert isinstance(opening, OpenWindow)
    world.feed(WindowOpened(SOURCE, sees_steps=True))
    assert world.intend() == [Send(SOURCE, Attach(T, sees_steps=True))]
    world.hear(replace(manifest(0, 0, 2), step=7))
    assert only(world.reserve(), StartPull).step == 7
    world.end_pull(0, OK)
    world.hear(replace(manifest(1, 2, 3), step=8, state=None))
    assert not any(isinstance(e, Complete) for e in world.end_pull(1, OK)), "no first token yet"
    done = world.hear(Manifest(T, 2, BlockRefs(), LEASE_S, STATE))
    assert only(done, Complete).state == STATE


def test_a_chunk_whose_step_cannot_be_seen_fails_its_transfer() -> None:
    world = World()
    world.intend()
    effects = world.hear(replace(manifest(0, 0, 2), step=7))
    assert isinstance(only(effects, Failed).error, HandoffFailed)
