"""Goodput of ways to use two cards, by simulation: `python -m baton.bench.goodput_sim`.

Goodput is the highest rate at which 90 % of requests have their first token within a second and the
99th percentile of their own gaps within Y. Arrivals are Poisson; a request counts if it comes
between the lifetimes of those that come first and the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

from baton.core.membership import Role
from baton.core.step_cost import StepCost

from .played.simulation import Call, EngineSetup, Simulation

# Llama-3.1-8B on an H200: steps of bench/results/gpu.json, fitted.
H200_8B = StepCost(0.0046, (0.0, 0.0, 7.2e-6, 13.4e-6, 0.0, 0.0), 9e-10, 3.2e-8)
TTFT_S, SHARE = 1.0, 0.9
DECODE_STEP_TOKENS = 640


def setups(mode: str, promise_s: float) -> dict[str, EngineSetup]:
    prefill = EngineSetup(Role.PREFILL, None, 2048, 8192)
    promising = EngineSetup(Role.DECODE, promise_s)
    if mode == "disaggregated":
        return {"p": prefill, "d": EngineSetup(Role.DECODE, None, DECODE_STEP_TOKENS)}
    if mode == "aggregated":
        return {"d": promising, "e": promising}
    if mode == "both":
        return {"p": EngineSetup(Role.PREFILL, promise_s, 2048, 8192), "d": promising}
    return {"p": prefill, "d": promising}


async def run(
    mode: str, promise_s: float, lengths: tuple[int, int], rate: float, seconds: float, seed: int
) -> list[Call]:
    """The calls that count."""
    simulation = Simulation(H200_8B, setups(mode, promise_s))
    chance, due_s = random.Random(seed), 0.0
    while (due_s := due_s + chance.expovariate(rate)) < seconds:
        simulation.at(due_s, lambda: simulation.call(*lengths))
    simulation.run()
    assert all(call.is_served for call in simulation.calls)
    counted = [c for c in simulation.calls if seconds / 3 <= c.arrived_s]
    for engine in simulation.engines.values():
        engine.engine.check_integrity()
    return counted


def is_good(call: Call, y_s: float) -> bool:
    gaps = sorted(call.gaps_s())
    return call.ttft_s <= TTFT_S and gaps[int(0.99 * len(gaps))] <= y_s and gaps[-1] <= 4 * y_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="8192/256")
    parser.add_argument("--y-ms", type=float, default=25.0)
    parser.add_argument("--rates", default="3,4,5")
    parser.add_argument("--modes", default="disaggregated,aggregated,auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    prompt, outputs = map(int, options.lengths.split("/"))
    y_s = options.y_ms / 1000
    for mode in options.modes.split(","):
        for rate in map(float, options.rates.split(",")):
            began_s = time.monotonic()
            calls = asyncio.run(run(mode, y_s * 0.96, (prompt, outputs), rate, options.seconds, 1))
            good = sum(is_good(call, y_s) for call in calls) / len(calls)
            ttft = sorted(call.ttft_s for call in calls)
            gaps = sorted(gap for call in calls for gap in call.gaps_s())
            print(
                f"{mode:14} {rate:5.1f}/s good {good:.2f}  TTFT {ttft[len(ttft) // 2]:.3f} "
                f"{ttft[len(ttft) * 9 // 10]:.3f}  TBT {1e3 * gaps[len(gaps) // 2]:.1f} "
                f"{1e3 * gaps[len(gaps) * 99 // 100]:.1f} ms  ({time.monotonic() - began_s:.1f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
