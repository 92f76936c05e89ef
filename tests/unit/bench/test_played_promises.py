"""Promises that follow the mix of prompts and outputs, over simulated devices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engines.integrity import check_integrity

from baton.bench.goodput.figures import keeps
from baton.bench.played.engine import EngineSetup
from baton.bench.played.simulation import Simulation
from baton.bench.simulated_goodput import H200_8B, H200_30B_A3B
from baton.core.membership import Role
from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape

TARGET_S, TTFT_S, PHASE_S = 0.024, 1.0, 20.0
# Weights take half of a step that keeps the promise, and mixed steps have no extra cost.
LARGE = replace(H200_8B, base_s=0.012, mixed_s=0.0, mixed_pair_s=0.0)
LONG, SHORT = ((8192, 256), 5.0), ((256, 1024), 12.0)  # prompt and output tokens, requests/s

Phase = tuple[tuple[int, int], float]


class DearMixture(StepCost):
    """A mixture of experts whose mixed steps take longer than the sum of their parts."""

    __slots__ = ()

    def seconds(self, shape: StepShape) -> float:
        is_mixed = shape.num_prompt_tokens and shape.num_decodes
        return super().seconds(shape) + (0.0025 if is_mixed else 0.0)


MIXTURE = DearMixture(
    H200_30B_A3B.base_s, H200_30B_A3B.row_s, H200_30B_A3B.pair_s, H200_30B_A3B.key_s
)


def play(
    *phases: Phase, cost: StepCost = LARGE, moves: bool = True, phase_s: float = PHASE_S
) -> Simulation:
    """Simulate the phases on two GPUs that both promise at first."""
    setups = {
        "prefill": EngineSetup(Role.PREFILL, TARGET_S, 2048, 8192),
        "decode": EngineSetup(Role.DECODE, TARGET_S),
    }
    simulation = Simulation(cost, setups, ttft_s=TTFT_S if moves else None)
    chance = random.Random(1)
    for number, (lengths, per_s) in enumerate(phases):
        due_s = number * phase_s
        while (due_s := due_s + chance.expovariate(per_s)) < (number + 1) * phase_s:
            simulation.at(due_s, lambda lengths=lengths: simulation.call(*lengths))
    simulation.run()
    return simulation


def first_tokens_in_time(simulation: Simulation) -> float:
    """The share of requests whose TTFT is within its target."""
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
    [(1.0, LARGE), pytest.param(2.0, H200_8B, marks=pytest.mark.slow), (3.5, H200_8B)],
)
async def test_a_load_that_both_can_take_moves_nothing(per_s: float, cost: StepCost) -> None:
    simulation = play((LONG[0], per_s), cost=cost)
    assert not simulation.moves and all(call.is_served for call in simulation.calls)


@pytest.mark.slow
async def test_a_mixture_whose_mixed_steps_are_dear_decodes_on_one_card() -> None:
    """If mixed steps are expensive, one GPU decodes, and as many requests are served well as with a
    fixed split of the GPUs."""
    late = [
        call
        for call in play(((2048, 256), 19.0), cost=MIXTURE, phase_s=30.0).calls
        if call.arrived_s > 10
    ]
    assert sum(keeps(call.times, 0.025) for call in late) > 0.95 * len(late)


@pytest.mark.slow
async def test_prompts_do_not_stay_among_decodes_that_leave_them_no_room() -> None:
    """Prompts leave GPUs whose decodes leave them no room: after half the load and a pause comes
    the full load, which a fixed split of the GPUs serves well."""
    nothing = (LONG[0], 1e-9)
    simulation = play((LONG[0], 2.0), nothing, *[(LONG[0], 4.0)] * 7, cost=MIXTURE, phase_s=5.0)
    assert [promises for _, _, promises in simulation.moves[:2]] != [False, True]
    late = [call for call in simulation.calls if call.arrived_s > 25]
    assert sum(keeps(call.times, 0.025) for call in late) > 0.9 * len(late)
    assert max(call.ttft_s for call in late) < 5.0
