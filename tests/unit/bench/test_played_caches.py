"""The product's caches, index and routing over simulated engines: hot prefixes, bursts, host
memory, and what a tenant can infer about another tenant's prompts from its own latencies.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial

import pytest
from engines.integrity import check_integrity

from baton.bench import prefix
from baton.bench.played.engine import Blocks, EngineSetup
from baton.bench.played.simulation import Simulation
from baton.bench.simulated_goodput import H200_8B
from baton.core.membership import Role

SIZE = 64
DECODE = EngineSetup(Role.DECODE, None, max_num_seqs=1 << 20)


def simulation(num_engines: int, num_blocks: int = 4000, num_host: int = 0) -> Simulation:
    blocks = Blocks(SIZE, num_blocks, num_host)
    prefill = EngineSetup(Role.PREFILL, None, 2048, 8192, blocks=blocks)
    setups = {f"{index:032x}": prefill for index in range(1, num_engines + 1)}
    return Simulation(H200_8B, setups | {"d" * 32: DECODE})


def prompt(*parts: tuple[int, int]) -> array[int]:
    """Random token ids, concatenated from parts given as (seed, length)."""
    ids = array("I")
    for seed, length in parts:
        chance = random.Random(seed)
        ids.extend(chance.choices(range(3, 30_000), k=length))
    return ids


async def played(
    simulation: Simulation, calls: Sequence[tuple[float, array[int], str]]
) -> list[float]:
    """TTFTs in the order of the calls."""
    for due_s, ids, salt in calls:
        call = partial(simulation.call, len(ids), 1, token_ids=ids, cache_salt=salt)
        simulation.at(due_s, call)
    simulation.run()
    for engine in simulation.engines.values():
        check_integrity(engine.engine)
    assert all(call.is_served for call in simulation.calls)
    return [call.ttft_s for call in simulation.calls]


def computed_tokens(simulation: Simulation) -> int:
    totals = [engine.engine.stats.totals() for engine in simulation.engines.values()]
    return sum(each.prefix_query_tokens - each.prefix_hit_tokens for each in totals)


async def test_a_hot_prefix_is_fetched_by_others() -> None:
    """A hot prefix is fetched by others; the engine that has it could compute 2/3 of the load."""
    sim, chance = simulation(4), random.Random(1)
    calls, due_s = [(0.0, prompt((0, 8192)), "")], 1.0
    for number in range(150):
        due_s += chance.expovariate(75.0)
        calls.append((due_s, prompt((0, 8192), (number + 1, 1024)), ""))
    ttfts_s = await played(sim, calls)
    engines = [engine for engine in sim.engines.values() if engine.cache is not None]
    assert sum(engine.num_fetches > 0 for engine in engines) >= 1
    assert all(engine.engine.stats.totals().prefix_hit_tokens > 0 for engine in engines)
    assert computed_tokens(sim) < 8192 * 2 + 150 * (1024 + SIZE), "no engine computes it again"
    assert sum(ttfts_s[1:]) / 150 < 0.06


async def test_a_burst_of_one_prompt_is_computed_once_or_twice() -> None:
    sim = simulation(4)
    burst = [(1.0 + 0.001 * n, prompt((0, 8192), (n + 1, 256)), "") for n in range(12)]
    await played(sim, burst)
    assert computed_tokens(sim) <= 2 * 8192 + 12 * (256 + 2 * SIZE) + 12 * 2048


async def test_what_left_the_pool_comes_back_from_host_memory() -> None:
    sim = simulation(1, 200, 1000)
    turns = [(0.5 * n, prompt((n % 4, 64 * 80), (n + 10, 64)), "") for n in range(12)]
    await played(sim, turns)
    (engine, *_) = sim.engines.values()
    assert engine.engine.stats.totals().host_hit_tokens >= 7 * 64 * 80
    assert computed_tokens(sim) < 4 * 64 * 80 + 12 * 3 * SIZE + 64 * 80


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """The probability that a hit takes longer than a miss; ties count half."""
    ordered = sorted(misses)
    wins = sum(bisect_left(ordered, each) + bisect_right(ordered, each) for each in hits)
    return wins / (2 * len(hits) * len(misses))


async def probed(prober: str) -> float:
    """The AUC of a probe's latency: half of 2,000 prompts were computed before for tenant `acme`,
    and other tenants' load runs meanwhile."""
    sim, chance = simulation(2, 60_000), random.Random(3)
    calls: list[tuple[float, array[int], str]] = []
    secrets = [prompt((seed, 320)) for seed in range(2000)]
    for number, ids in enumerate(secrets[::2]):
        calls.append((0.01 * number, ids, "acme"))
    probes = chance.sample(range(2000), 2000)
    for order, number in enumerate(probes):
        calls.append((20.0 + 0.02 * order, secrets[number], prober))
    for number in range(300):
        calls.append((20.0 + chance.uniform(0, 40), prompt((10_000 + number, 2048)), "other"))
    order = sorted(range(len(calls)), key=lambda index: calls[index][0])
    ttfts_s = await played(sim, [calls[index] for index in order])
    by_call = dict(zip(order, ttfts_s, strict=True))
    of_probes = {number: by_call[1000 + order] for order, number in enumerate(probes)}
    return auc([of_probes[n] for n in range(0, 2000, 2)], [of_probes[n] for n in range(1, 2000, 2)])


@pytest.mark.slow
async def test_a_probe_s_time_tells_nothing_of_another_tenant() -> None:
    assert 0.45 < await probed("globex") < 0.55
    assert await probed("acme") < 0.2, "its own is there, and quicker"


def test_the_trace_is_whole_and_the_oracle_counts_what_it_can_keep() -> None:
    assert len(prefix.trace()) == 12_031
    rates = [prefix.oracle_hit_rate(n) for n in (840_000, 4_200_000, prefix.AMPLE_TOKENS)]
    assert [round(rate, 3) for rate in rates] == [0.052, 0.193, 0.373]
    ids = prefix.token_ids(prefix.trace()[0])
    assert len(ids) == 6758 and len(set(ids[:512])) == 1
