"""Free sequence slots of a decode engine, by its heartbeats and this gateway's own dispatches."""

from __future__ import annotations

import weakref
from array import array
from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.request import FinishReason
from baton.core.step_cost import KNOTS, StepCost
from baton.gateway.admission.queue_limit import fair_tokens_ahead
from baton.gateway.engines.engine_account import EngineAccount
from baton.gateway.engines.prompts_in_flight import LINGER_S
from baton.gateway.engines.reported_load import ReportedLoad, load_from_wire
from baton.gateway.request.engine_link import EngineOutput
from baton.proto.v1 import node_pb2


def key(number: int) -> tuple[str, int]:
    return f"r{number}", 0


def account(max_num_seqs: int = 0) -> EngineAccount:
    return EngineAccount(FakeClock(), max_num_seqs)


def beat(num_requests: int, room_blocks: int) -> ReportedLoad:
    links = frozenset[str]()
    return ReportedLoad(
        0, 0, 0, 0, 0, False, links, num_requests=num_requests, room_blocks=room_blocks
    )


def test_sequences_of_all_gateways_count() -> None:
    places = account(max_num_seqs=4)
    places.heartbeat(beat(num_requests=2, room_blocks=100))
    assert places.has_place(2, 1) and not places.has_place(3, 1)
    places.sent_decodes([key(0), key(1)], 7, 1)  # two samples
    assert not places.has_place(1, 1)
    places.heartbeat(beat(num_requests=3, room_blocks=100))  # another gateway's sequence ended
    assert places.num_requests == 3 and places.has_place(1, 1)
    places.ended(key(0))
    assert places.num_requests == 2, "known before the next heartbeat"
    places.heartbeat(beat(num_requests=0, room_blocks=100))  # older than the dispatch
    assert places.num_requests == 1


def test_blocks_are_kept_for_what_is_on_its_way() -> None:
    places = account(max_num_seqs=100)
    places.heartbeat(beat(num_requests=1, room_blocks=10))
    places.sent_decodes([key(0)], 7, 7)
    assert places.has_place(1, 3) and not places.has_place(1, 4)
    # The engine has accepted the request, and reserved blocks for its output.
    places.heartbeat(beat(num_requests=2, room_blocks=4))
    assert places.has_place(1, 4) and not places.has_place(1, 5)


def test_an_engine_that_has_nothing_takes_what_never_fits_better() -> None:
    places = account(max_num_seqs=4)
    places.heartbeat(beat(num_requests=0, room_blocks=10))
    assert places.has_place(128, 1000)
    places.heartbeat(beat(num_requests=1, room_blocks=10))
    assert not places.has_place(128, 1000) and not places.has_place(1, 1000)
    assert account().has_place(1, 1 << 30), "an engine that does not say how many it runs"


def test_places_become_free_as_fast_as_requests_stay_long() -> None:
    clock = FakeClock()
    places = EngineAccount(clock, max_num_seqs=100)
    for number in range(60):
        places.sent_decodes([key(number)], 7, 1)
    assert places.places_per_s is None
    clock.advance(10.0)
    places.ended(key(0))
    assert places.places_per_s == pytest.approx(5.9)
    places.ended(key(0))
    assert places.places_per_s == pytest.approx(5.9), "it had ended"
    clock.advance(10.0)
    for number in range(1, 60):
        places.ended(key(number))
    assert places.places_per_s == 0


def test_what_decodes_does_not_keep_its_prompt() -> None:
    clock = FakeClock()
    one = EngineAccount(clock, max_num_seqs=8)
    sent = one.prompts.sent("p", "fp", "", array("I", range(20)), 4)
    packed = weakref.ref(sent.packed)
    one.sent_prompt([key(0)], 7, num_tokens=20, cached_tokens=0, in_flight=sent)
    one.sent_decodes([key(0)], 7, 1)
    del sent
    one.settle([EngineOutput(*key(0), token_ids=(5,))])
    clock.advance(LINGER_S)
    assert not one.prompts.common_blocks("fp", "", array("I", range(20)), 4)
    assert one.num_requests == 1 and packed() is None


def test_a_prompt_that_goes_on_where_it_was_computed_takes_its_place_once() -> None:
    one = account(max_num_seqs=8)
    one.sent_prompt([key(0)], 7, num_tokens=100, cached_tokens=32)
    one.sent_decodes([key(0), key(1)], 7, 1)
    assert (one.tokens_ahead, one.num_requests) == (68, 2)
    for number, found in ((1, 0), (0, 16), (0, 0)):  # no hit predicted; then all was reported
        one.settle([EngineOutput(*key(number), cached_tokens=found, error=None)])
        assert (one.prompts.num_index_hits, one.prompts.num_stale_hits) == (1 - number, 1 - number)
    assert (one.tokens_ahead, one.num_requests) == (0, 2) and one.released == {7}
    one.released.clear()
    one.settle([EngineOutput(*key(number), token_ids=(5,)) for number in (0, 1)])
    assert not one.released, "it was answered already"
    one.settle([EngineOutput(*key(0), 1, (5,), FinishReason.STOP)])
    assert one.num_requests == 1 and one.released == {7}
    one.ended(key(1))
    assert not one._decodes and not one.unanswered and not one.own_tokens


def test_what_a_long_prompt_sees_takes_its_time() -> None:
    """A queued prompt counts with its attention: 500,500 pairs of 1000 tokens, which take 1 s
    themselves, take as long as 2002 more tokens."""
    ours, theirs = account(), account()
    cost = StepCost(0.0, (1e-3,) * len(KNOTS), pair_s=4e-6, max_rows=1 << 20)
    ours.heartbeat(replace(beat(0, 0), step_cost=cost))
    ours.sent_prompt([key(0)], 7, num_tokens=1000, cached_tokens=0)
    load = replace(beat(0, 0), step_cost=cost, waiting_tokens=1000, waiting_pairs=500_500)
    theirs.heartbeat(load)
    for one in (ours, theirs):
        assert one.tokens_ahead == 3002
        one._clock.advance(2.0)
        assert one.tokens_ahead == pytest.approx(1002, abs=1)
        assert one.speed is not None
        behind_s = one.speed.prompt_seconds(0, 0, one.tokens_ahead)
        assert behind_s == pytest.approx(1.002, abs=1e-3)
    ours.settle([EngineOutput(*key(0), token_ids=(5,))])
    assert ours.tokens_ahead == 0


def test_what_waited_behind_a_prompt_that_is_cancelled_begins_then() -> None:
    """The engine worked on the cancelled prompt, so no token of the next one is taken as
    computed."""
    one = account()
    cost = StepCost(0.0, (1e-3,) * len(KNOTS), max_rows=1 << 20)
    one.heartbeat(replace(beat(0, 0), step_cost=cost))
    for number in (0, 1, 2):
        one.sent_prompt([key(number)], 7, num_tokens=10_000, cached_tokens=0)
    one._clock.advance(9.0)
    one.ended(key(2))  # no prompt waits behind this one
    assert one.tokens_ahead == fair_tokens_ahead(one, 7, 100, {}) == 11_000
    one.ended(key(0))
    assert one.tokens_ahead == fair_tokens_ahead(one, 7, 100, {}) == 10_000
    one._clock.advance(4.0)
    assert one.tokens_ahead == fair_tokens_ahead(one, 7, 100, {}) == 6000


@pytest.mark.parametrize("part_s", [3599.0, 1e300, 1e308])
def test_no_number_that_is_believed_stops_routing(part_s: float) -> None:
    """Values of any size in an engine's heartbeat raise no error: all requests pass this code."""
    load = replace(beat(0, 0), waiting_tokens=1000, waiting_pairs=(1 << 64) - 1)
    one = account()
    for part in ({"pair_s": part_s}, {"row_s": (part_s,) * len(KNOTS)}, {"base_s": part_s}):
        sent = {"row_s": [0.0] * len(KNOTS), "max_rows": 4096} | part
        wire = node_pb2.Heartbeat(step_cost=node_pb2.StepCost(**sent))
        one.heartbeat(replace(load, step_cost=load_from_wire(wire).step_cost))
        one._clock.advance(2.0)
        assert one.tokens_ahead >= 0
        assert one.speed is None or one.speed.prompt_seconds(1 << 20, 0, one.tokens_ahead) > 0


@given(
    st.lists(st.tuples(st.sampled_from(["send", "end", "beat"]), st.integers(0, 9)), max_size=60)
)
def test_what_has_ended_is_forgotten(moves: list[tuple[str, int]]) -> None:
    places, running = account(max_num_seqs=5), set[int]()
    places.heartbeat(beat(0, 50))
    for move, which in moves:
        if move == "send" and which not in running and places.has_place(1, which):
            places.sent_decodes([key(which)], 7, which)
            running.add(which)
        elif move == "end":
            places.released.clear()
            places.ended(key(which))
            assert bool(places.released) == (which in running)
            running.discard(which)
        elif move == "beat":
            places.heartbeat(beat(len(running), 50))
        assert places.num_requests == len(running) <= 5
    for which in list(running):
        places.ended(key(which))
    assert places.num_requests == 0 and places.has_place(9, 999)
