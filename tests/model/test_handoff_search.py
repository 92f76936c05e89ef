"""Every sequence of events of one hand-off within bounds: none may violate an invariant. See
docs/proof.md.

In fakes/handoff, handoff_sides.py asserts the invariants after each step, handoff_moves.py defines
the possible events, and handoff_search.py checks that every sequence ends. The number of states
given with each search is a lower bound: a search that became smaller by accident would prove less.
"""

from __future__ import annotations

import pytest
from fakes.handoff.handoff_moves import FAULTS
from fakes.handoff.handoff_search import Bounds, Search

from baton.kv_transfer.protocol.puller_transfer import PullerState
from baton.kv_transfer.protocol.source import SourceState

PATIENT = False  # the next attempt only after one side has ended the previous one
IMPATIENT = True  # ... at any time
CRASH = frozenset({"crash"})

QUICK = [
    (Bounds(faults=1, advances=1, attempts=1), 27_300),
    (Bounds(faults=1, advances=0, attempts=1, launches=True, sees_steps=True), 6_700),
    (Bounds(1, 0, attempts=2, is_impatient=PATIENT, kinds=CRASH), 6_000),
]
FULL = [
    (Bounds(faults=1, advances=1, attempts=1, launches=True, sees_steps=True), 78_800),
    (Bounds(faults=1, advances=0, attempts=2, is_impatient=PATIENT), 37_700),
    (Bounds(faults=2, advances=1, attempts=1), 383_000),
    (Bounds(faults=2, advances=0, attempts=1, launches=True, sees_steps=True), 100_900),
    (Bounds(1, 0, attempts=2, is_impatient=PATIENT, launches=True, sees_steps=True), 173_900),
    (Bounds(faults=1, advances=0, attempts=2, is_impatient=IMPATIENT), 103_900),
    (Bounds(faults=0, advances=2, attempts=2, is_impatient=PATIENT), 229_000),
    (Bounds(1, 1, attempts=2, is_impatient=PATIENT, kinds=CRASH), 216_000),
]


def check(bounds: Bounds, min_states: int) -> None:
    found = Search(bounds).run()
    print(f"\n{bounds}\n{found}")
    assert found.num_states >= min_states
    assert any("completed" in ends for ends in found.ends)
    expected = {state.value for state in (*SourceState, *PullerState)}
    if bounds.attempts == 1:
        expected -= {PullerState.QUEUED.value}  # a single attempt never waits for memory
    if not bounds.faults:
        expected -= {PullerState.WAITING.value}  # the pair stays ready
    assert found.transfer_states >= expected


@pytest.mark.parametrize(("bounds", "min_states"), QUICK)
def test_no_story_ends_badly(bounds: Bounds, min_states: int) -> None:
    check(bounds, min_states)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("bounds", "min_states"), FULL)
def test_no_longer_story_ends_badly(bounds: Bounds, min_states: int) -> None:
    check(bounds, min_states)


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_every_kind_of_fault_leads_somewhere_new(kind: str) -> None:
    """Each kind of fault reaches new states, or a proof about it would be empty; duplicated
    messages and strangers' messages leave both sides as they are."""
    without = Search(Bounds(0, 0, attempts=1)).run()
    found = Search(Bounds(1, 0, attempts=1, kinds=frozenset({kind}))).run()
    assert found.num_states > without.num_states
    is_new = found.num_sides > without.num_sides
    assert is_new == (kind not in ("double", "stranger"))
