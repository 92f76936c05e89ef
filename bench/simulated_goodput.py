"""The goodput of different ways to use the same cards, by simulation.

    python -m baton.bench.simulated_goodput

Good requests are defined in bench/goodput/figures.py. Requests of the first third of a run do not
count. `auto` and `aggregated` promise Y, less a margin, and `auto` moves promises; `disaggregated`
uses the split of the cards that a search finds best for exactly these requests.
bench/played/simulation.py lists what is simulated and what is the product.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.core.membership import Role
from baton.core.metrics import percentile
from baton.core.step_cost import KNOTS, StepCost

from .floors.figures import ROOT, command_line, commit, machine
from .goodput.figures import TTFT_S, keeps
from .played.engine import EngineSetup
from .played.simulation import Call, Simulation
from .serve.clients.arrivals import from_trace
from .serve.clients.workloads import TRACE

# Llama-3.1-8B on an H200: fitted to bench/results/gpu.json, including steps of both kinds.
H200_8B = StepCost(
    *(0.0046, (*(0.0,) * 6, 7.2e-6, *(20.6e-6,) * 3), 9e-10, 3.2e-8),
    mixed_s=2.7e-3,
    mixed_pair_s=2.5e-10,
)
# Qwen3-30B-A3B, from gpu_30b-a3b.json: 13.5 ms for all experts, of which a row activates 8 of 128.
_EXPERTS_S = [13.5e-3 * (1 - (1 - 8 / 128) ** rows) for rows in (*KNOTS, 2048)]
_EACH_S = (
    10.5e-6 + (after - before) / (end - begin)
    for (before, after), (begin, end) in zip(
        pairwise(_EXPERTS_S), pairwise((*KNOTS, 2048)), strict=True
    )
)
H200_30B_A3B = StepCost(1.6e-3, tuple(_EACH_S), 1.4e-9, 2.4e-8)
AUTO, AGGREGATED, DISAGGREGATED = "auto", "aggregated", "disaggregated"
MARGIN = 0.04  # of Y
DECODE_STEP_TOKENS = 640  # budget of a decode engine without a promise
TRACE_S = 120.0
_TRACE_STEP_S = 3.0  # resolution of its time stamps; arrivals of one time stamp are spread evenly
_PHASES = 4  # of a mix that shifts
_MOST_SEARCHED = 8  # splits; fewer with many cards, since a run is long
_MOST_SEARCHED_OF_MANY, _MANY_CARDS = 4, 32

Lengths = tuple[int, int]
Arrival = tuple[float, Lengths]  # time, and tokens in and out


@dataclass(frozen=True, slots=True)
class Point:
    """Requests at a rate. `kinds`: lengths and rate on two cards; several kinds take turns by
    phases of the run; without any, the trace's requests are sent, `trace_speed` times as fast."""

    name: str
    kinds: tuple[tuple[Lengths, float], ...]
    y_ms: float
    seconds: float = 40.0
    num_cards: int = 2
    num_gateways: int = 1
    trace_speed: float = 0.0
    cost: StepCost = H200_8B

    def arrivals(self) -> Iterator[Arrival]:
        """Arrivals in proportion to the number of pairs of cards."""
        num_pairs = self.num_cards / 2
        if not self.kinds:
            return self._of_trace(max(1, round(num_pairs)))
        return self._poisson(num_pairs)

    def _poisson(self, num_pairs: float) -> Iterator[Arrival]:
        chance, due_s = random.Random(1), 0.0
        while True:
            phase = int(_PHASES * due_s / self.seconds)
            lengths, rate = self.kinds[phase % len(self.kinds)]
            due_s += chance.expovariate(rate * num_pairs)
            if due_s >= self.seconds:
                return
            yield due_s, lengths

    def _of_trace(self, num_copies: int) -> Iterator[Arrival]:
        """Several copies of the trace, each shifted in time."""
        requests = from_trace(TRACE, TRACE_S, speed=1.0, max_tokens=1 << 17)
        at_once = [list(same) for _, same in itertools.groupby(requests, lambda one: one.at_s)]
        for copy in range(num_copies):
            shift_s = TRACE_S * copy / num_copies
            for together in at_once:
                for number, one in enumerate(together):
                    at_s = one.at_s + _TRACE_STEP_S * number / len(together)
                    due_s = (at_s + shift_s) % TRACE_S / self.trace_speed
                    if due_s < self.seconds:
                        yield due_s, (one.prompt.num_tokens, one.num_output_tokens)


def _steady(lengths: Lengths, rate: float, y_ms: float, **more: Any) -> Point:
    return Point("{}/{}".format(*lengths), ((lengths, rate),), y_ms, **more)


def _mixture(lengths: Lengths, rate: float) -> Point:
    return Point("30B-A3B {}/{}".format(*lengths), ((lengths, rate),), 25, cost=H200_30B_A3B)


def _shifting(num_cards: int) -> Point:
    kinds = (((8192, 128), 5.5), ((256, 512), 34.0))
    return Point("8192/128 then 256/512", kinds, 25, num_cards=num_cards)


def _trace(speed: float, **more: Any) -> Point:
    return Point(f"trace x {speed:g}", (), 50, trace_speed=speed, **more)


POINTS = [
    *(
        _steady((8192, 256), rate, y_ms)
        for y_ms, rate in itertools.product((15, 25, 50), (4.0, 5.0, 6.0))
    ),
    *(_steady((1024, 512), 32.0, y_ms, seconds=15) for y_ms in (15, 25)),
    _steady((256, 1024), 16.0, 25, seconds=20),
    *(_mixture((8192, 256), rate) for rate in (3.0, 4.0, 5.0)),
    *(_mixture((1024, 512), rate) for rate in (14.0, 18.0)),
    *(_trace(speed, seconds=TRACE_S / speed) for speed in (0.3, 0.5)),
    *(_shifting(num_cards) for num_cards in (2, 4)),
    *(_trace(0.4, seconds=60, num_cards=8, num_gateways=n) for n in (1, 2)),
    *(
        _steady((8192, 128), 5.0, 25, seconds=seconds, num_cards=cards, num_gateways=n)
        for cards, seconds, n in ((8, 20, 1), (8, 20, 2), (32, 12, 2), (256, 2, 1), (256, 2, 2))
    ),
]


def setups(mode: str, promise_s: float, num_cards: int, num_prefill: int) -> dict[str, EngineSetup]:
    """Engines by name: `num_prefill` cards for prefill, or with AGGREGATED all cards for both
    roles."""
    names = [f"gpu{index}" for index in range(num_cards)]
    both = EngineSetup(Role.DECODE, promise_s)
    if mode == AGGREGATED:
        return dict.fromkeys(names, both)
    prefill = EngineSetup(Role.PREFILL, promise_s, 2048, 8192)
    decode = both
    if mode == DISAGGREGATED:
        prefill = EngineSetup(Role.PREFILL, None, 2048, 8192)
        decode = EngineSetup(Role.DECODE, None, DECODE_STEP_TOKENS)
    return {name: prefill if index < num_prefill else decode for index, name in enumerate(names)}


async def run(simulation: Simulation, point: Point) -> list[Call]:
    """Run the simulation; returns the calls that count."""
    for due_s, lengths in point.arrivals():
        simulation.at(due_s, lambda lengths=lengths: simulation.call(*lengths))  # type: ignore[misc]
    simulation.run()
    assert all(call.is_served for call in simulation.calls)
    for engine in simulation.engines.values():
        assert not engine.engine.pool.counts.held
    return [call for call in simulation.calls if call.arrived_s >= point.seconds / 3]


def measure(point: Point, mode: str, num_prefill: int) -> dict[str, Any]:
    """The figures of one run; times in ms."""
    y_s, began_s = point.y_ms / 1000, time.monotonic()
    engines = setups(mode, y_s * (1 - MARGIN), point.num_cards, num_prefill)
    ttft_s = TTFT_S if mode == AUTO else None
    simulation = Simulation(point.cost, engines, point.num_gateways, ttft_s=ttft_s)
    calls = asyncio.run(run(simulation, point))
    ttfts_s = [call.times.ttft_s or 0.0 for call in calls]
    gaps_s = [gap for call in calls for gap in call.times.gaps_s]

    def ms(values: list[float], q: float) -> float:
        return round(1e3 * (percentile(values, q) or 0.0), 2)

    return {
        "mode": mode,
        "requests": point.name,
        "y_ms": point.y_ms,
        "cards": point.num_cards,
        "prefill_cards": None if mode == AGGREGATED else num_prefill,
        "gateways": point.num_gateways,
        "rate_per_s": round(len(calls) / (point.seconds * 2 / 3), 1),
        "good_share": round(sum(keeps(call.times, y_s) for call in calls) / len(calls), 3),
        "ttft_p50_ms": ms(ttfts_s, 50),
        "ttft_p90_ms": ms(ttfts_s, 90),
        "tbt_p50_ms": ms(gaps_s, 50),
        "tbt_p99_ms": ms(gaps_s, 99),
        "num_requests": len(calls),
        "took_s": round(time.monotonic() - began_s, 1),
    }


def best_split(num_cards: int, share_of: Callable[[int], float]) -> int:
    """The best number of prefill cards, if the share of good requests has a single peak: searches
    from the middle towards the better side in ever smaller steps."""
    shares: dict[int, float] = {}

    def share(num_prefill: int) -> float:
        if num_prefill not in shares:
            shares[num_prefill] = share_of(num_prefill)
        return shares[num_prefill]

    most = _MOST_SEARCHED if num_cards < _MANY_CARDS else _MOST_SEARCHED_OF_MANY
    best = step = num_cards // 2
    while share(best) < 1.0 and step > 1 and len(shares) < most:
        step = (step + 1) // 2
        sides = [side for side in (best - step, best + step) if 0 < side < num_cards]
        best = max([best, *sides], key=share)
    return best


def measure_point(point: Point) -> list[dict[str, Any]]:
    """`auto`, and the fixed modes: all cards for both roles, and the best split."""
    half = point.num_cards // 2
    rows = [measure(point, mode, half) for mode in (AUTO, AGGREGATED)]
    found: dict[int, dict[str, Any]] = {}

    def share_of(num_prefill: int) -> float:
        found[num_prefill] = measure(point, DISAGGREGATED, num_prefill)
        share: float = found[num_prefill]["good_share"]
        return share

    return [*rows, found[best_split(point.num_cards, share_of)]]


def _measure_numbered(numbered: tuple[int, Point]) -> tuple[int, list[dict[str, Any]]]:
    index, point = numbered
    return index, measure_point(point)


def main(argv: list[str]) -> int:
    """Simulate, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="requests, as 8192/256")
    parser.add_argument("--cards", type=int, nargs="*", default=[], help="numbers of them")
    parser.add_argument("--jobs", type=int, default=2, help="points at a time")
    default = ROOT / "bench" / "results" / "simulated_goodput.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(argv)
    points = [
        point
        for point in POINTS
        if (not options.only or point.name in options.only)
        and (not options.cards or point.num_cards in options.cards)
    ]
    if not points:
        parser.error("there is no such point")
    # The longest first, so that both cores are busy to the end.
    order = sorted(range(len(points)), key=lambda index: -points[index].num_cards)
    rows: list[list[dict[str, Any]]] = [[] for _ in points]
    result: dict[str, Any] = {
        "commit": commit(),
        "command": command_line("simulated_goodput", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
    }
    began_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=4) as pool:
        found = pool.imap_unordered(_measure_numbered, [(index, points[index]) for index in order])
        for index, of_point in found:
            rows[index] = of_point
            for row in of_point:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            result["took_s"] = round(time.monotonic() - began_s)
            result["rows"] = [row for of_point in rows for row in of_point]
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['took_s']} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
