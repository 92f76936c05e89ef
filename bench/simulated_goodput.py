"""Which ways to use two cards serve how much, by simulation.

    python -m baton.bench.simulated_goodput

A request is good if its first token comes within a second, the 99th percentile of its own gaps is
within Y, and none is longer than 4 Y. Arrivals are Poisson; requests of the first third of a run do
not count. `auto` and `aggregated` promise Y, less a margin. bench/played/simulation.py says what is
played and what is the product.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from baton.core.membership import Role
from baton.core.step_cost import StepCost

from .floors.figures import ROOT, command_line, commit, machine
from .played.simulation import Call, EngineSetup, Simulation

# Llama-3.1-8B on an H200: steps of bench/results/gpu.json, fitted.
H200_8B = StepCost(0.0046, (0.0, 0.0, 7.2e-6, 13.4e-6, 0.0, 0.0), 9e-10, 3.2e-8)
MODES = ("disaggregated", "aggregated", "auto")
TTFT_S = 1.0
MARGIN = 0.04  # of Y
DECODE_STEP_TOKENS = 640  # of a decode engine without a promise


@dataclass(frozen=True, slots=True)
class Cell:
    """Lengths of prompts and outputs, Y, and the rates that are tried."""

    lengths: tuple[int, int]
    y_ms: float
    rates: tuple[float, ...]

    @property
    def name(self) -> str:
        return "{}/{}".format(*self.lengths)


CELLS = [
    *(Cell((8192, 256), y_ms, (3.0, 4.0, 5.0, 6.0)) for y_ms in (8, 15, 25, 50)),
    *(Cell((1024, 512), y_ms, (26.0, 32.0)) for y_ms in (15, 25)),
    Cell((256, 1024), 25, (16.0,)),
]


def setups(mode: str, promise_s: float, num_cards: int) -> dict[str, EngineSetup]:
    """Half of the cards for each role, or all for both."""
    names = [f"gpu{index}" for index in range(num_cards)]
    both = EngineSetup(Role.DECODE, promise_s)
    if mode == "aggregated":
        return dict.fromkeys(names, both)
    prefill = EngineSetup(Role.PREFILL, promise_s, 2048, 8192)
    decode = both
    if mode == "disaggregated":
        prefill = EngineSetup(Role.PREFILL, None, 2048, 8192)
        decode = EngineSetup(Role.DECODE, None, DECODE_STEP_TOKENS)
    return {name: prefill if index < num_cards // 2 else decode for index, name in enumerate(names)}


async def run(
    simulation: Simulation, lengths: tuple[int, int], rate: float, seconds: float
) -> list[Call]:
    """The calls that count."""
    chance, due_s = random.Random(1), 0.0
    while (due_s := due_s + chance.expovariate(rate)) < seconds:
        simulation.at(due_s, lambda: simulation.call(*lengths))
    simulation.run()
    assert all(call.is_served for call in simulation.calls)
    for engine in simulation.engines.values():
        engine.engine.check_integrity()
        assert not engine.engine.pool.counts.held
    return [call for call in simulation.calls if call.arrived_s >= seconds / 3]


def is_good(call: Call, y_s: float) -> bool:
    gaps_s = sorted(call.gaps_s())
    gap_s = gaps_s[int(0.99 * len(gaps_s))]
    return call.ttft_s <= TTFT_S and gap_s <= y_s and gaps_s[-1] <= 4 * y_s


def measure(mode: str, cell: Cell, rate: float, options: argparse.Namespace) -> dict[str, object]:
    """One run's figures; times in ms."""
    y_s, began_s = cell.y_ms / 1000, time.monotonic()
    engines = setups(mode, y_s * (1 - MARGIN), options.cards)
    simulation = Simulation(H200_8B, engines, options.gateways)
    rate_of_all = rate * options.cards / 2
    calls = asyncio.run(run(simulation, cell.lengths, rate_of_all, options.seconds))
    ttfts_s = sorted(call.ttft_s for call in calls)
    gaps_s = sorted(gap for call in calls for gap in call.gaps_s())
    return {
        "mode": mode,
        "lengths": cell.name,
        "y_ms": cell.y_ms,
        "rate_per_s": rate_of_all,
        "good_share": round(sum(is_good(call, y_s) for call in calls) / len(calls), 3),
        "ttft_p50_ms": round(1e3 * ttfts_s[len(ttfts_s) // 2], 1),
        "ttft_p90_ms": round(1e3 * ttfts_s[len(ttfts_s) * 9 // 10], 1),
        "tbt_p50_ms": round(1e3 * gaps_s[len(gaps_s) // 2], 2),
        "tbt_p99_ms": round(1e3 * gaps_s[len(gaps_s) * 99 // 100], 2),
        "num_requests": len(calls),
        "took_s": round(time.monotonic() - began_s, 1),
    }


def main(argv: list[str]) -> int:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="lengths, as 8192/256")
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals")
    parser.add_argument("--cards", type=int, default=2, help="rates are those of two")
    parser.add_argument("--gateways", type=int, default=1)
    default = ROOT / "bench" / "results" / "simulated_goodput.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(argv)
    rows = []
    for cell in CELLS:
        if options.only and cell.name not in options.only:
            continue
        for rate in cell.rates:
            for mode in options.modes:
                rows.append(measure(mode, cell, rate, options))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    result = {
        "commit": commit(),
        "command": command_line("simulated_goodput", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
