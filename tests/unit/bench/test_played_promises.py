"""Promises that follow the mix of prompts and outputs, over played devices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engines.integrity import check_integrity

from baton.bench.played.engine import EngineSetup
from baton.bench.played.simulation import Simulation
from baton.bench.simulated_goodput import H200_8B
from baton.core.membership import Role
from baton.core.step_cost import StepCost

TARGET_S, TTFT_S, PHASE_S = 0.024, 1.0, 20.0
LARGE = replace(H200_8B, base_s=0.012)  # its weights take half of a step that keeps the promise
LONG, SHORT = ((8192, 256), 5.0), ((256, 1024), 12.0)  # prompt and output tokens, requests/s

Phase = tuple[tuple[int, int], float]


def play(*phases: Phase, cost: StepCost = LARGE, moves: bool = True) -> Simulation:
    """On two cards that both promise at first."""
    setups = {
        "prefill": EngineSetup(Role.PREFILL, TARGET_S, 2048, 8192),
        "decode": EngineSetup(Role.DECODE, TARGET_S),
    }
    simulation = Simulation(cost, setups, ttft_s=TTFT_S if moves else None)
    chance = random.Random(1)
    for number, (lengths, per_s) in enumerate(phases):
        due_s = number * PHASE_S
        while (due_s := due_s + chance.expovariate(per_s)) < (number + 1) * PHASE_S:
            simulation.at(due_s, lambda lengths=lengths: simulation.call(*lengths))
    simulation.run()
    return simulation


def first_tokens_in_time(simulation: Simulation) -> float:
    """The share of requests whose first token came within what is wanted."""
    calls = simulation.calls
    return sum(call.is_served and call.ttft_s <= TTFT_S for call in calls) / len(calls)


@pytest.mark.slow
async def test_the_mix_is_followed_there_and_back_within_ten_seconds() -> None:
    simulation = play(LONG, SHORT, LONG)
    assert {name for _, name, _ in simulation.moves} == {"prefill"}
    moves = [move for move in simulation.moves if move[0] < 3 * PHASE_S]
    assert [promises for _, _, promises in moves] == [False, True, False]
    for number, (moved_s, _, _) in enumerate(moves):
        assert number * PHASE_S < moved_s <= number * PHASE_S + 10
    for call in simulation.calls:
        assert call.is_served and call.error is None
        assert max(call.times.gaps_s) <= 3 * TARGET_S
    for engine in simulation.engines.values():
        check_integrity(engine.engine)


@pytest.mark.slow
async def test_the_rest_is_served_sooner_than_without_moves() -> None:
    assert first_tokens_in_time(play(LONG, LONG)) > 0.1 + first_tokens_in_time(
        play(LONG, LONG, moves=False)
    )


@pytest.mark.parametrize(
    ("per_s", "cost"),
    [(1.0, LARGE), pytest.param(2.0, H200_8B, marks=pytest.mark.slow), (6.5, H200_8B)],
)
async def test_a_load_that_both_can_take_moves_nothing(per_s: float, cost: StepCost) -> None:
    simulation = play((LONG[0], per_s), cost=cost)
    assert not simulation.moves and all(call.is_served for call in simulation.calls)
