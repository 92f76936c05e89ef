"""Two engines that fetch from each other: neither waits forever, and no block is wrong. The pools
are so small that making room for a prefix may evict the one that the other engine fetches, or that
two requests which move in opposite directions find no room: then both stay.
"""

from __future__ import annotations

import pytest
from fakes.handoff.mutual_pulls import search


@pytest.mark.parametrize(
    ("num_blocks", "max_faults", "min_states"),
    [
        (4, 0, 104),
        (3, 0, 50),
        pytest.param(3, 1, 1400, marks=pytest.mark.slow),
        pytest.param(4, 1, 3000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_no_story_of_two_fetches_ends_badly(
    num_blocks: int, max_faults: int, min_states: int
) -> None:
    found = search(num_blocks, max_faults)
    print(found)
    assert found.num_states >= min_states
    assert any("fetched" in ends for ends in found.ends)
    assert (("fetched", "fetched") in found.ends) == (num_blocks == 4)


@pytest.mark.parametrize(
    ("num_blocks", "max_faults", "min_states"),
    [
        (4, 0, 152),
        (3, 0, 31),
        pytest.param(3, 1, 570, marks=pytest.mark.slow),
        pytest.param(4, 1, 5000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_requests_that_move_both_ways_at_once_wait_for_nobody_s_memory(
    num_blocks: int, max_faults: int, min_states: int
) -> None:
    found = search(num_blocks, max_faults, is_running=True)
    print(found)
    assert found.num_states >= min_states
    if num_blocks == 4:
        assert ("fetched", "fetched") in found.ends
    else:
        assert any("no room" in ends for ends in found.ends)
