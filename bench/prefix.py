"""The benefit of prefix caches, prefix index and routing policies, by simulation.

    python -m baton.bench.prefix

The conversation trace runs through the production gateway, index, schedulers and prefix caches on
simulated engines (bench/played/simulation.py), in blocks of 512 tokens, as in the trace. Requests
are prompts with one output token. The trace is sped up until engines chosen by load alone compute
70 % of the time. The oracle is one LRU cache of all engines' memory together, without time: the
blocks of a request are there for the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from baton.core.membership import Role
from baton.core.metrics import percentile

from .floors.figures import ROOT, command_line, commit, machine
from .played.engine import Blocks, EngineSetup
from .played.simulation import Simulation
from .serve.clients.arrivals import TRACE_PIECE_TOKENS, Arrival, from_trace
from .simulated_goodput import H200_8B

TRACE = ROOT / "bench" / "data" / "mooncake_conversation.jsonl.xz"
POOL_TOKENS = 840_000  # of an H200 with an 8B model
HOST_TOKENS = 4_200_000  # in 512 GiB
AMPLE_TOKENS = 160_000_000  # more than the whole trace
BUSY = 0.7
_MAX_TOKENS = 1 << 17
_RESERVED = 2
_FIRST_SPEED = 0.5  # per engine: near the result
POLICIES = ("auto", "least_loaded", "random")


class Run(NamedTuple):
    """One run of the trace. `pool_tokens`: of each engine."""

    num_engines: int
    policy: str
    speed: float
    pool_tokens: int = POOL_TOKENS
    host_tokens: int = 0


@cache
def trace() -> Sequence[Arrival]:
    return tuple(from_trace(TRACE, float("inf"), speed=1.0, max_tokens=_MAX_TOKENS))


def token_ids(arrival: Arrival) -> array[int]:
    """Constant within each piece: only the identity of pieces matters."""
    pieces = np.repeat(np.array(arrival.prompt.seeds, np.uint32), TRACE_PIECE_TOKENS)
    ids = array("I")
    ids.frombytes(pieces[: arrival.prompt.num_tokens].tobytes())
    return ids


def oracle_hit_rate(num_tokens: int) -> float:
    """The hit rate of one cache of `num_tokens` tokens; a prompt's last token is always
    computed."""
    num_blocks = num_tokens // TRACE_PIECE_TOKENS
    kept: OrderedDict[int, None] = OrderedDict()
    hit_tokens = all_tokens = 0
    for arrival in trace():
        full = arrival.prompt.seeds[: (arrival.prompt.num_tokens - 1) // TRACE_PIECE_TOKENS]
        num_hits = next((i for i, each in enumerate(full) if each not in kept), len(full))
        hit_tokens += num_hits * TRACE_PIECE_TOKENS
        all_tokens += arrival.prompt.num_tokens
        for each in reversed(full):  # the end of a chain is evicted first
            kept[each] = None
            kept.move_to_end(each)
        while len(kept) > num_blocks:
            kept.popitem(last=False)
    return hit_tokens / all_tokens


async def play(run: Run) -> Simulation:
    blocks = Blocks(
        TRACE_PIECE_TOKENS,
        run.pool_tokens // TRACE_PIECE_TOKENS + _RESERVED,
        run.host_tokens // TRACE_PIECE_TOKENS,
    )
    prefill = EngineSetup(Role.PREFILL, None, 2048, 8192, blocks=blocks)
    setups = {f"{index:032x}": prefill for index in range(1, run.num_engines + 1)}
    setups["d" * 32] = EngineSetup(Role.DECODE, None, max_num_seqs=1 << 20)
    simulation = Simulation(H200_8B, setups, policy=run.policy)

    def call(arrival: Arrival) -> None:
        simulation.call(arrival.prompt.num_tokens, 1, token_ids=token_ids(arrival))

    for arrival in trace():
        simulation.at(arrival.at_s / run.speed, partial(call, arrival))
    simulation.run()
    assert all(call.is_served for call in simulation.calls)
    return simulation


def measure(run: Run) -> dict[str, Any]:
    """The figures of one run."""
    began_s = time.monotonic()
    simulation = asyncio.run(play(run))
    engines = [one for one in simulation.engines.values() if one.cache is not None]
    totals = [one.engine.stats.totals() for one in engines]
    ttfts_s = [call.ttft_s for call in simulation.calls]
    span_s = trace()[-1].at_s / run.speed
    num_tokens = sum(arrival.prompt.num_tokens for arrival in trace())
    return run._asdict() | {
        "hit_rate": sum(each.prefix_hit_tokens for each in totals) / num_tokens,
        "busy": sum(one.busy_s for one in engines) / len(engines) / span_s,
        "ttft_mean_s": sum(ttfts_s) / len(ttfts_s),
        "ttft_p50_s": percentile(ttfts_s, 50),
        "ttft_p99_s": percentile(ttfts_s, 99),
        "fetches": sum(one.num_fetches for one in engines),
        "num_requests": len(ttfts_s),
        "took_s": round(time.monotonic() - began_s, 1),
    }


def speed_for(num_engines: int) -> float:
    """The speed at which engines chosen by load alone compute BUSY of the time, within a few
    percent."""
    speed = _FIRST_SPEED * num_engines
    busy: float = measure(Run(num_engines, "least_loaded", speed))["busy"]
    return speed * BUSY / busy


def of_size(num_engines: int) -> list[dict[str, Any]]:
    """All policies with the cards' memory, and the best policy with ample memory."""
    speed = speed_for(num_engines)
    runs = [Run(num_engines, policy, speed) for policy in POLICIES]
    runs.append(Run(num_engines, "auto", speed, AMPLE_TOKENS))
    rows = [measure(run) for run in runs]
    for row in rows:
        row["oracle_hit_rate"] = oracle_hit_rate(row["pool_tokens"] * num_engines)
    return rows


def with_host_memory(_: int) -> list[dict[str, Any]]:
    """One engine with host memory."""
    speed = speed_for(1)
    row = measure(Run(1, "auto", speed, host_tokens=HOST_TOKENS))
    return [row | {"oracle_hit_rate": oracle_hit_rate(HOST_TOKENS)}]


def _measured(sizes: Sequence[int], jobs: int) -> Iterator[list[dict[str, Any]]]:
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        host = pool.apply_async(with_host_memory, (0,))
        yield from pool.imap_unordered(of_size, sorted(sizes, reverse=True))
        yield host.get()


def main(argv: list[str]) -> int:
    """Simulate, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 4, 16, 64], help="numbers")
    parser.add_argument("--jobs", type=int, default=2, help="sizes at a time")
    default = ROOT / "bench" / "results" / "prefix.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(argv)
    result: dict[str, Any] = {
        "commit": commit(),
        "command": command_line("prefix", argv),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "rows": [],
    }
    began_s = time.monotonic()
    for rows in _measured(options.engines, options.jobs):
        for row in rows:
            print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
        result["rows"] = sorted([*result["rows"], *rows], key=lambda row: row["num_engines"])
        result["took_s"] = round(time.monotonic() - began_s)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['took_s']} s")
    return 0


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
