"""Routing of prompts over simulated devices: gateways' knowledge of waiting prompts."""

from __future__ import annotations

import pytest

from baton.bench.played.engine import EngineSetup
from baton.bench.played.simulation import Simulation
from baton.bench.simulated_goodput import H200_8B
from baton.core.membership import Role

BOTH = EngineSetup(Role.DECODE, 0.024)


async def test_two_gateways_do_not_send_to_the_same_engine_within_a_moment() -> None:
    """The engine with fewer decodes is the best for both until its first prompt is reported."""
    simulation = Simulation(H200_8B, {"one": BOTH, "other": BOTH}, num_gateways=2)
    for due_s in (0.0, 0.1, 0.2):
        simulation.at(due_s, lambda: simulation.call(16, 1000))
    for pair in range(6):
        for late_s in (0.0, 0.005):
            simulation.at(0.5 + 0.6 * pair + late_s, lambda: simulation.call(8192, 1))
    simulation.run()
    assert all(call.is_served for call in simulation.calls)
    assert max(call.ttft_s for call in simulation.calls) < 0.25, "one alone takes 0.21 s"


@pytest.mark.parametrize("num_gateways", [1, 2])
async def test_nothing_is_sent_behind_a_prompt_that_takes_long(num_gateways: int) -> None:
    """No prompt is sent behind a long one: its linear work takes 2.5 s, its attention 7 s more,
    most of it at its end."""
    whole = EngineSetup(Role.PREFILL, None, 2048, 8192)
    setups = {"one": whole, "other": whole, "decode": EngineSetup(Role.DECODE)}
    simulation = Simulation(H200_8B, setups, num_gateways)
    simulation.at(0.0, lambda: simulation.call(120_000, 1))
    for number in range(1, 80):
        simulation.at(0.1 * number, lambda: simulation.call(2048, 1))
    simulation.run()
    long, *others = simulation.calls
    assert long.ttft_s > 8.0 and all(call.is_served for call in simulation.calls)
    assert max(call.ttft_s for call in others) < 0.1, "one alone takes 0.05 s"
