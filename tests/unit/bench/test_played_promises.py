"""Promises that follow the mix of prompts and outputs, over played devices."""

from __future__ import annotations

import random

import pytest

from baton.bench.played.engine import EngineSetup
from baton.bench.played.simulation import Simulation
from baton.bench.simulated_goodput import H200_8B
from baton.core.membership import Role

TARGET_S, TTFT_S, PHASE_S = 0.024, 1.0, 20.0
LONG, SHORT = ((8192, 256), 7.0), ((256, 1024), 12.0)  # prompt and output tokens, requests/s


def play(*phases: tuple[tuple[int, int], float]) -> Simulation:
    """On two cards that both promise at first."""
    setups = {
        "prefill": EngineSetup(Role.PREFILL, TARGET_S, 2048, 8192),
        "decode": EngineSetup(Role.DECODE, TARGET_S),
    }
    simulation = Simulation(H200_8B, setups, ttft_s=TTFT_S)
    chance = random.Random(1)
    for number, (lengths, per_s) in enumerate(phases):
        due_s = number * PHASE_S
        while (due_s := due_s + chance.expovariate(per_s)) < (number + 1) * PHASE_S:
            simulation.at(due_s, lambda lengths=lengths: simulation.call(*lengths))
    return simulation


@pytest.mark.slow
async def test_the_mix_is_followed_there_and_back_within_ten_seconds() -> None:
    simulation = play(LONG, SHORT, LONG)
    simulation.run()
    assert {name for _, name, _ in simulation.moves} == {"prefill"}
    assert [promises for _, _, promises in simulation.moves] == [False, True, False]
    for number, (moved_s, _, _) in enumerate(simulation.moves):
        assert number * PHASE_S < moved_s <= number * PHASE_S + 10
    for call in simulation.calls:
        assert call.is_served and call.error is None
        assert max(call.times.gaps_s) <= 3 * TARGET_S
    for engine in simulation.engines.values():
        engine.engine.check_integrity()


async def test_a_load_that_both_can_take_moves_nothing() -> None:
    simulation = play((LONG[0], 2.0))
    simulation.run()
    assert not simulation.moves and all(call.is_served for call in simulation.calls)
