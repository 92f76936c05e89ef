"""Places on a decode engine: counted from heartbeats and from what one gateway sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.engines.engine_accounts import DecodePlaces


def key(number: int) -> tuple[str, int]:
    return f"r{number}", 0


def test_sequences_of_all_gateways_count() -> None:
    places = DecodePlaces(max_num_seqs=4)
    places.heartbeat(num_requests=2, room_blocks=100)
    assert places.has_place(2, 1) and not places.has_place(3, 1)
    places.sent([key(0), key(1)], 1, 0.0)  # two samples
    assert not places.has_place(1, 1)
    places.heartbeat(num_requests=3, room_blocks=100)  # one of the others' has ended
    assert places.num_requests == 3 and places.has_place(1, 1)
    places.ended(key(0), 1.0)
    assert places.num_requests == 2, "known before the next heartbeat"
    places.heartbeat(num_requests=0, room_blocks=100)  # older than what was sent
    assert places.num_requests == 1


def test_blocks_are_kept_for_what_is_on_its_way() -> None:
    places = DecodePlaces(max_num_seqs=100)
    places.heartbeat(num_requests=1, room_blocks=10)
    places.sent([key(0)], 7, 0.0)
    assert places.has_place(1, 3) and not places.has_place(1, 4)
    places.heartbeat(num_requests=2, room_blocks=4)  # the engine knows of it now, and of its growth
    assert places.has_place(1, 4) and not places.has_place(1, 5)


def test_an_engine_that_has_nothing_takes_what_never_fits_better() -> None:
    places = DecodePlaces(max_num_seqs=4)
    places.heartbeat(num_requests=0, room_blocks=10)
    assert places.has_place(128, 1000)
    places.heartbeat(num_requests=1, room_blocks=10)
    assert not places.has_place(128, 1000) and not places.has_place(1, 1000)
    assert DecodePlaces().has_place(1, 1 << 30), "an engine that does not say how many it runs"


def test_places_become_free_as_fast_as_requests_stay_long() -> None:
    places = DecodePlaces(max_num_seqs=100)
    for number in range(60):
        places.sent([key(number)], 1, 0.0)
    assert places.places_per_s is None
    places.ended(key(0), 10.0)
    assert places.places_per_s == pytest.approx(5.9)
    assert not places.ended(key(0), 10.0)
    for number in range(1, 60):
        places.ended(key(number), 20.0)
    assert places.places_per_s == 0


@given(
    st.lists(st.tuples(st.sampled_from(["send", "end", "beat"]), st.integers(0, 9)), max_size=60)
)
def test_what_has_ended_is_forgotten(moves: list[tuple[str, int]]) -> None:
    places, running = DecodePlaces(max_num_seqs=5), set[int]()
    places.heartbeat(0, 50)
    for number, (move, which) in enumerate(moves):
        if move == "send" and which not in running and places.has_place(1, which):
            places.sent([key(which)], which, float(number))
            running.add(which)
        elif move == "end":
            assert places.ended(key(which), float(number)) == (which in running)
            running.discard(which)
        elif move == "beat":
            places.heartbeat(len(running), 50)
        assert places.num_requests == len(running) <= 5
    for which in list(running):
        places.ended(key(which), 1e3)
    assert places.num_requests == 0 and places.has_place(9, 999)
