"""Requests that outgrow their engine's promise, or whose engine withdraws it, in simulation: they
move to another engine once, and no client sees a longer gap.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from baton.bench.played.engine import EngineSetup
from baton.bench.played.simulation import Simulation
from baton.bench.simulated_goodput import H200_8B
from baton.core.membership import Role
from baton.core.metrics import percentile
from baton.core.step_cost import StepCost

# 5 ms and 1 ms per thousand keys: a batch that fits at first no longer does when it has grown.
COST = StepCost(0.005, (*(0.0,) * 6, 7.2e-6, *(20.6e-6,) * 3), 0.0, 1e-6)
PROMISE_S = 0.015
NUM_REQUESTS, LENGTHS = 8, (600, 1200)


async def play(num_gateways: int, *, moves: bool) -> Simulation:
    """All requests begin on the first engine; the others join before its promise breaks."""
    setup = EngineSetup(Role.DECODE, PROMISE_S)
    simulation = Simulation(COST, dict.fromkeys("abc", setup), num_gateways)
    simulation.moves_requests = moves
    for name in "bc":
        simulation.engines[name].is_draining = True
        for gateway in simulation.gateways:
            engine = gateway.table.engines[name]
            engine.receive_heartbeat(simulation.engines[name].load())

    def join() -> None:
        for name in "bc":
            simulation.engines[name].is_draining = False

    for index in range(NUM_REQUESTS):
        simulation.at(0.05 * index, lambda: simulation.call(*LENGTHS))
    simulation.at(3.0, join)
    simulation.run()
    assert all(call.is_served for call in simulation.calls)
    for engine in simulation.engines.values():
        assert not engine.engine.pool.counts.held
    return simulation


def late_p90_s(simulation: Simulation) -> float:
    """The 90th percentile of the gaps after the time when the promise would have broken."""
    gaps = [
        after - before
        for call in simulation.calls
        for before, after in zip(call.token_s, call.token_s[1:], strict=False)
        if before > 10.0
    ]
    return percentile(gaps, 90) or 0.0


@pytest.mark.parametrize("num_gateways", [1, 2])
def test_a_broken_promise_is_mended_by_a_few_moves(num_gateways: int) -> None:
    still = asyncio.run(play(num_gateways, moves=False))
    assert late_p90_s(still) > 1.1 * PROMISE_S
    moved = asyncio.run(play(num_gateways, moves=True))
    assert late_p90_s(moved) <= 1.05 * PROMISE_S
    outcomes = sum((gateway.table.plans.moves for gateway in moved.gateways), Counter())
    assert 1 <= outcomes["moved"] <= NUM_REQUESTS // 2, "none goes to and fro"
    longest_s = max(gap for call in moved.calls for gap in call.times.gaps_s)
    assert longest_s <= 3 * PROMISE_S


async def play_withdrawal(*, moves: bool) -> Simulation:
    """Sixteen requests decode on two engines when one of them is set to compute prompts alone."""
    setups = {
        "prefill": EngineSetup(Role.PREFILL, PROMISE_S, 2048, 8192),
        "decode": EngineSetup(Role.DECODE, PROMISE_S),
    }
    simulation = Simulation(H200_8B, setups)
    simulation.moves_requests = moves
    for index in range(16):
        simulation.at(0.05 * index, lambda: simulation.call(256, 1200))
    prefill = simulation.engines["prefill"]
    simulation.at(3.0, lambda: prefill.set_promise(is_promising=False))
    for index in range(24):
        simulation.at(3.0 + 0.25 * index, lambda: simulation.call(8192, 1))
    simulation.run()
    assert all(call.is_served for call in simulation.calls)
    return simulation


def test_what_decodes_where_a_promise_is_withdrawn_goes_where_it_is_kept() -> None:
    """Decodes on an engine that withdraws its promise move to one that keeps it; else their gaps
    stay longer until they end."""
    late_s = {}
    for moves in (False, True):
        simulation = asyncio.run(play_withdrawal(moves=moves))
        gaps = [
            after - before
            for call in simulation.calls
            for before, after in zip(call.token_s, call.token_s[1:], strict=False)
            if 4.0 < before < 9.0
        ]
        late_s[moves] = percentile(gaps, 95) or 0.0
    assert simulation.gateways[0].table.plans.moves["moved"] > 4
    assert late_s[True] <= PROMISE_S < 1.5 * PROMISE_S < late_s[False]
