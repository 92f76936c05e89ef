"""Many requests of all kinds on a real cluster, some cancelled, while its nodes are killed.

Every stream that ends without an error is compared with one process of the same model; a token that
differs must be a near-tie of the reference's top two, and is counted. Afterwards all ledgers
balance and `baton fsck` finds nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines.generation import outputs_of
from fault_scenes.fault_cluster import Cluster
from fault_scenes.faults import Ledger, Scene, Stream
from node_driver import CLUSTER, SECRET

from baton.cli.cluster.fsck import examine
from baton.cli.cluster.survey import survey
from baton.cli.host.finding import Level
from baton.core.config import ClusterConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import Cancelled
from baton.core.metrics import percentile
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

NEAR_TIE = 1e-3  # of the two best logits: float32 differs by about 1e-5 between batches
IN_FLIGHT = 40
_REFERENCE_BATCH = 200
_ENTRIES_RUN_OUT_S = 15.0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the mix; `cancel_at`: cancel it after that many tokens."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    cancel_at: int | None


@dataclass
class Outcome:
    """The results of a run."""

    ended: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    near_ties: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    ttft_p99_s: float = 0.0


def draw(num_requests: int, seed: int, *, max_prompt_tokens: int) -> list[PlannedRequest]:
    """Long and short prompts, some with a common prefix; greedy and sampled; some to be
    cancelled."""
    rng = random.Random(seed)
    beginnings = [tuple(rng.choices(range(3, 320), k=k)) for k in (40, 100)]
    requested = []
    for _ in range(num_requests):
        own = tuple(rng.choices(range(3, 320), k=rng.randint(1, max_prompt_tokens)))
        prompt = (rng.choice(beginnings) if rng.random() < 0.3 else ()) + own
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, 17, 30)),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            seed=rng.getrandbits(32),
            ignore_eos=True,
        )
        cancel_at = rng.randint(0, 8) if rng.random() < 0.1 else None
        requested.append(PlannedRequest(prompt, sampling, cancel_at))
    return requested


def decodes(ledger: Ledger) -> bool:
    """Whether the engine decodes a request; if it has the prefill role, one that it serves
    whole."""
    requests = ledger.get("requests", {}).values()
    return any(0 < one["num_computed_tokens"] == one["num_tokens"] - 1 for one in requests)


async def run(
    cluster: Cluster,
    scene: Scene,
    requested: list[PlannedRequest],
    kills: dict[int, str],
    is_due: Callable[[Ledger], bool] | None = None,
) -> Outcome:
    """Send all requests, a bounded number at a time. `kills`: the node to kill by request number,
    then or as soon as `is_due` holds for its ledger.

    A killed node is restarted at once, as an operator's service manager does.
    """
    places = asyncio.Semaphore(IN_FLIGHT)
    outcome = Outcome()
    followers: list[asyncio.Task[None]] = []
    due: list[str] = []
    for number, one in enumerate(requested):
        await places.acquire()
        due += [kills[number]] if number in kills else []
        if due and (is_due is None or is_due(await scene.ledger(due[0]))):
            name = due.pop(0)
            cluster.kill(name)
            await asyncio.to_thread(cluster.processes[name].process.wait)
            cluster.restart_dead()
        params = one.sampling
        stream = scene.ask(
            prompt=one.prompt,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=params.seed,
        )
        followers.append(asyncio.create_task(_follow(stream, one, places, outcome)))
    await asyncio.gather(*followers)
    assert not due, f"{due} were never as they are to be killed"
    finished = [stream for stream in scene.streams if stream.error is None]
    gaps = [gap for stream in finished for gap in stream.result.times.gaps_s]
    ttfts = [stream.result.times.ttft_s or 0.0 for stream in finished]
    outcome.longest_gap_s = max(gaps, default=0.0)
    outcome.ttft_p99_s = percentile(ttfts, 99) or 0.0
    return outcome


async def _follow(
    stream: Stream, one: PlannedRequest, places: asyncio.Semaphore, outcome: Outcome
) -> None:
    """Read a stream to its end, or cancel it at its `cancel_at`."""
    assert stream.reading is not None
    try:
        if one.cancel_at is not None and one.cancel_at < one.sampling.max_tokens:
            while len(stream.tokens) < one.cancel_at and not stream.is_over:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            stream.generation.cancel()
        await stream.reading
    finally:
        places.release()
    if stream.error is None:
        outcome.ended["finished"] += 1
        outcome.num_tokens += len(stream.tokens)
    elif isinstance(stream.error, Cancelled):
        outcome.ended["cancelled"] += 1
    else:
        outcome.ended[f"failed: {stream.error.code}"] += 1


class Reference:
    """One process of the same model, on the same kind of device."""

    def __init__(self, config: EngineConfig) -> None:
        self._local = LocalEngine(config, ModelRunner(config))

    def generate(self, prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
        """One request's tokens."""
        request = Request(f"{random.getrandbits(128):032x}", 0, prompt, sampling)
        return outputs_of(self._local, [request])[request.key]

    def compare(self, streams: list[Stream], outcome: Outcome) -> None:
        """Assert that each stream has this process's tokens, except near-ties."""
        compared = [stream for stream in streams if stream.tokens]
        for start in range(0, len(compared), _REFERENCE_BATCH):
            batch = compared[start : start + _REFERENCE_BATCH]
            requests = [_request(stream) for stream in batch]
            outputs = outputs_of(self._local, requests)
            for stream, request in zip(batch, requests, strict=True):
                self._compare(stream, outputs[request.key], outcome)

    def _compare(self, stream: Stream, expected: list[int], outcome: Outcome) -> None:
        if stream.error is None:
            assert len(stream.tokens) == stream.sampling.max_tokens
        for index, (token, wanted) in enumerate(zip(stream.tokens, expected, strict=False)):
            if token != wanted:
                gap = self._gap(stream, index, token, wanted)
                assert gap < NEAR_TIE, f"token {index} of {len(stream.prompt)}: {gap} below"
                outcome.near_ties.append(f"{gap:.1e} at token {index}")
                return  # after a near-tie the outputs diverge

    def _gap(self, stream: Stream, index: int, token: int, wanted: int) -> float:
        """The distance of the two tokens' log-probabilities at that place, by this process.

        A sampled token adds its noise, which is the same on both sides.
        """
        prompt = (*stream.prompt, *stream.tokens[:index])
        how = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=20)
        request = Request(f"{random.getrandbits(128):032x}", 0, prompt, how)
        engine = self._local.engine
        engine.add(request)
        tops: dict[int, float] = {}
        while engine.has_work:
            for output in engine.step().tokens:
                tops = dict(output.top)
        if stream.sampling.temperature:
            return 0.0 if {token, wanted} <= tops.keys() else 1.0
        return abs(tops.get(token, -99.0) - tops.get(wanted, 99.0))


def _request(stream: Stream) -> Request:
    return Request(f"{random.getrandbits(128):032x}", 0, stream.prompt, stream.sampling)


async def assert_fsck_is_clean(cluster: Cluster) -> None:
    """`baton fsck` finds no problem, once the entries of killed nodes have expired."""
    config = ClusterConfig(redis_url=cluster.redis.url, cluster=CLUSTER, cluster_secret=SECRET)
    deadline_s = time.monotonic() + _ENTRIES_RUN_OUT_S
    while True:
        findings = await examine(lambda: survey(config), 1.0)
        problems = [finding for finding in findings if finding.level is Level.PROBLEM]
        if not problems or time.monotonic() > deadline_s:
            break
    assert findings and not problems, problems


def describe(outcome: Outcome, **more: Any) -> str:
    """One line for people."""
    facts = {**outcome.ended, "tokens": outcome.num_tokens, "near-ties": outcome.near_ties, **more}
    times = f"TTFT p99 {outcome.ttft_p99_s:.2f} s, longest gap {outcome.longest_gap_s:.2f} s"
    return f"{facts}, {times}"
