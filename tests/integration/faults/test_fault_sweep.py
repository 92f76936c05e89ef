"""Thousands of streams on a cluster with continuous faults, each compared with the reference.

In every scene several streams run at once and two cards are played, one per role (fault_deck.py): a
kill at each chunk of a prefill and each token of an output, pauses, hangs; some clients disconnect.
Then `Scene.check` checks every stream and ledger. Options: `--fault-streams`, `--fault-seed`, and
`--fault-out` for the figures.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fault_scenes.breakages import DECODES, PREFILLS
from fault_scenes.fault_cluster import Cluster, cluster, write_model
from fault_scenes.fault_deck import DECODE_CARDS, PREFILL_CARDS, Card, Striker, dealt, leave
from fault_scenes.faults import Reference, Scene, Stream

from baton.bench.floors.figures import commit, machine
from baton.core.errors import Cancelled
from baton.core.metrics import percentile

STREAMS_A_SCENE = 44  # in addition to the victims
LEAVERS_A_SCENE = 2
POOL_BLOCKS = 600  # one node's pool suffices for all
MAX_GAP_P99_S = 2.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def system(reference: Reference) -> Iterator[Cluster]:
    flags = {
        "gateway_0": ("--recovery-wait-s", "30"),
        "node": ("--num-kv-blocks", str(POOL_BLOCKS)),
    }
    with cluster(reference.model_dir, "gateway-0", *PREFILLS, *DECODES, **flags) as running:
        yield running


@dataclass
class Tally:
    """Totals of the run. Samples are in seconds; a stream counts as hit if it was dispatched
    again."""

    num_scenes: int = 0
    num_left: int = 0
    num_near_ties: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {"hit": [], "not hit": []})
    gap_s: dict[str, list[float]] = field(default_factory=lambda: {"hit": [], "not hit": []})

    @property
    def num_streams(self) -> int:
        return self.num_left + sum(map(len, self.gap_s.values()))

    def add(self, scene: Scene, faults: list[str | None]) -> None:
        """Count a scene whose checks have passed."""
        self.num_scenes += 1
        self.num_near_ties += scene.num_near_ties
        self.faults.update(fault or "missed its moment" for fault in faults)
        for stream in scene.streams:
            if stream.error is not None:
                self.num_left += 1
                continue
            times = stream.result.times
            hit = "hit" if stream.result.attempts > 1 else "not hit"
            assert times.ttft_s is not None
            self.ttft_s[hit].append(times.ttft_s)
            self.gap_s[hit].append(max(times.gaps_s))

    def figures(self) -> dict[str, Any]:
        return {
            "scenes": self.num_scenes,
            "streams": self.num_streams,
            "streams_hit": len(self.gap_s["hit"]),
            "streams_left_by_their_client": self.num_left,
            "near_ties": self.num_near_ties,  # any other difference fails the run
            "kills": sum(n for what, n in self.faults.items() if what.endswith("killed")),
            "faults": dict(sorted(self.faults.items())),
            "ttft_s": {hit: _spread(samples) for hit, samples in self.ttft_s.items()},
            "longest_gap_s": {hit: _spread(samples) for hit, samples in self.gap_s.items()},
        }


def _spread(samples: list[float]) -> dict[str, float | None]:
    return {name: percentile(samples, q) for name, q in (("p50", 50), ("p99", 99), ("max", 100))}


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
async def test_sweep(system: Cluster, reference: Reference, pytestconfig: pytest.Config) -> None:
    """No stream has a wrong, lost or repeated token, no pool loses a block, and gaps are short."""
    num_streams, seed = (pytestconfig.getoption(f"--fault-{n}") for n in ("streams", "seed"))
    where, began_s = machine(), time.monotonic()
    chance, striker, tally = random.Random(seed), Striker(), Tally()
    decks = dealt(PREFILL_CARDS, chance), dealt(DECODE_CARDS, chance)
    while tally.num_streams < num_streams:
        async with Scene(system, reference) as scene:
            cards = [next(deck) for deck in decks]
            faults = await _play(scene, cards, striker, chance, engine_of=tally.num_scenes % 2)
            await scene.check()
            tally.add(scene, faults)
        if tally.num_scenes % 10 == 0:
            took_s = time.monotonic() - began_s
            print(f"sweep: {tally.num_streams} streams in {took_s:.0f} s", file=sys.__stderr__)
    figures = tally.figures()
    result = {
        "commit": commit(),
        "command": f"pytest {' '.join(sys.argv[1:])}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": where,
        "seed": seed,
        "seconds": round(time.monotonic() - began_s, 1),
        **figures,
    }
    print(json.dumps(result, indent=1))
    if out := pytestconfig.getoption("--fault-out"):
        out.write_text(json.dumps(result, indent=1) + "\n")
    assert figures["streams_hit"] > 0 and figures["kills"] > 0
    assert figures["longest_gap_s"]["hit"]["p99"] <= MAX_GAP_P99_S


async def _play(
    scene: Scene, cards: list[Card], striker: Striker, chance: random.Random, *, engine_of: int
) -> list[str | None]:
    """Run streams of all lengths, clients that leave, and the cards. At most one engine dies alone:
    a request that loses two engines is failed, since it may be what kills them."""
    for _ in range(STREAMS_A_SCENE):
        _ask(scene, chance)
    leaving = [
        leave(scene.ask(60, 200, expected_error=Cancelled), chance.randrange(1, 20))
        for _ in range(LEAVERS_A_SCENE)
    ]
    strikes = [
        striker.strike(scene, card, may_kill_engine=number == engine_of and chance.random() < 0.4)
        for number, card in enumerate(cards)
    ]
    *faults, _ = await asyncio.gather(*strikes, asyncio.gather(*leaving))
    return faults


def _ask(scene: Scene, chance: random.Random) -> Stream:
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 5} if chance.random() < 0.3 else {}
    return scene.ask(chance.randrange(5, 200), chance.randrange(2, 60), **sampling)
