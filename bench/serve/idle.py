"""One request at a time through a whole system, and the same through an engine alone: the
difference is the latency that the system adds, and the timeline shows where.

    sent ─ arrived ─ routed ─ prefill_started ─ first_token ─ received
                                                  └─ transfer_ended ─ decode_started ─ second token
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from baton.client import AsyncClient, Result
from baton.core.engine_config import EngineConfig
from baton.core.metrics import percentile
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.timeline import Event
from baton.engine.engine import Engine
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine

from .clients.arrivals import Prompt

_NUM_TOKENS = 8
_STAGES: tuple[tuple[str, Event | None, Event | None], ...] = (  # None: the client's clock
    ("sent to arrived", None, Event.ARRIVED),
    ("arrived to routed", Event.ARRIVED, Event.ROUTED),
    ("routed to prefill_started", Event.ROUTED, Event.PREFILL_STARTED),
    ("prefill_started to first_token", Event.PREFILL_STARTED, Event.FIRST_TOKEN),
    ("first_token to received", Event.FIRST_TOKEN, None),
    ("first_token to transfer_ended", Event.FIRST_TOKEN, Event.TRANSFER_ENDED),
    ("transfer_ended to decode_started", Event.TRANSFER_ENDED, Event.DECODE_STARTED),
)


@dataclass(frozen=True, slots=True)
class IdleRequests:
    """One request on an idle engine: seconds to its first token, and from there to its second."""

    ttft_s: float
    gap_s: float


def measure_engine(
    config: EngineConfig, lengths: Sequence[int], repeats: int, queued_length: int, num_queued: int
) -> tuple[dict[int, list[IdleRequests]], list[float]]:
    """An engine in this process: each length `repeats` times, after one that does not count, and
    the seconds per prompt in a queue. The queue is measured first, as it warms up the card."""
    runner = ModelRunner(config)
    engine = LocalEngine(config, runner).engine
    vocab_size = runner.model_config.vocab_size
    for number in range(num_queued):
        engine.add(_request(queued_length, 9000 + number, vocab_size, 1))
    queued_s = [after - before for before, after in pairwise(_token_times(engine))]
    found: dict[int, list[IdleRequests]] = {}
    for length in lengths:
        samples = []
        for repeat in range(repeats + 1):
            engine.add(_request(length, repeat, vocab_size, _NUM_TOKENS))
            sent_s, token_s = time.perf_counter(), _token_times(engine)
            samples.append(IdleRequests(token_s[0] - sent_s, token_s[1] - token_s[0]))
        found[length] = samples[1:]
    runner.close()
    return found, queued_s


def _request(length: int, number: int, vocab_size: int, max_tokens: int) -> Request:
    prompt = tuple(_prompt(length, number).token_ids(vocab_size))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(f"{length:016x}{number:016x}", 0, prompt, sampling)


def _token_times(engine: Engine) -> list[float]:
    """Run until no work is left; returns the time of each token."""
    token_s: list[float] = []
    while engine.has_work:
        num_tokens = len(engine.step().tokens)
        token_s += [time.perf_counter()] * num_tokens
    return token_s


def measure_system(
    address: str, lengths: Sequence[int], repeats: int, vocab_size: int
) -> dict[int, list[Result]]:
    """The same through a gateway."""
    prompts = {
        length: [_prompt(length, 1000 + i).token_ids(vocab_size) for i in range(repeats + 2)]
        for length in lengths
    }
    return asyncio.run(_ask_all(address, prompts))


def measure_again(address: str, length: int, repeats: int, vocab_size: int) -> list[Result]:
    """One prompt repeatedly: every node has its blocks cached."""
    prompt = _prompt(length, 5000).token_ids(vocab_size)
    return asyncio.run(_ask_all(address, {length: [prompt] * (repeats + 2)}))[length]


async def _ask_all(
    address: str, prompts: Mapping[int, Sequence[Sequence[int]]]
) -> dict[int, list[Result]]:
    """Send one after the other; the first two of each length do not count."""
    async with AsyncClient(address, api_key=os.environ.get("BATON_API_KEY")) as client:
        return {
            length: [await _ask(client, prompt) for prompt in of_length][2:]
            for length, of_length in prompts.items()
        }


async def _ask(client: AsyncClient, prompt_ids: Sequence[int]) -> Result:
    return await client.generate(
        prompt_token_ids=prompt_ids, max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True
    ).finish()


def _prompt(length: int, number: int) -> Prompt:
    """Every prompt has a different beginning, so that none hits the prefix cache."""
    return Prompt.drawn(length, length * 10_000 + number)


def compare(
    alone: dict[int, list[IdleRequests]], through: dict[int, list[Result]]
) -> dict[str, dict[str, Any]]:
    """By length: both, their difference, and the stages, as medians in ms."""
    return {
        str(length): _compare(alone.get(length, []), results) for length, results in through.items()
    }


def _compare(alone: Sequence[IdleRequests], through: Sequence[Result]) -> dict[str, Any]:
    ttft = _median_ms([r.times.ttft_s for r in through])
    gap = _median_ms([r.times.handoff_gap_s for r in through])
    steps = [gap_s for r in through for gap_s in r.times.gaps_s[2:]]
    figures: dict[str, Any] = {
        "n": len(through),
        "ttft_ms": ttft,
        "ttft_max_ms": max(r.times.ttft_s or 0.0 for r in through) * 1e3,
        "outside_prefill_ms": _median_ms([_outside_s(r) for r in through]),
        "prefill_ms": _median_ms(
            [_stage_s(r, Event.PREFILL_STARTED, Event.FIRST_TOKEN) for r in through]
        ),
        "handoff_gap_ms": gap,
        "decode_step_ms": _median_ms(steps),
        "gap_over_step_ms": gap - _median_ms(steps),
        "transports": sorted({str(r.transport) for r in through}),
        "transfer_bytes": through[0].transfer_bytes,
        "stages_ms": {
            name: _median_ms([_stage_s(r, begin, end) for r in through])
            for name, begin, end in _STAGES
        },
    }
    if alone:
        figures["engine_ttft_ms"] = _median_ms([one.ttft_s for one in alone])
        figures["engine_gap_ms"] = _median_ms([one.gap_s for one in alone])
        figures["ttft_added_ms"] = ttft - figures["engine_ttft_ms"]
    return figures


def _outside_s(result: Result) -> float | None:
    """The part of TTFT before and after the prefill: the prefills of two engines always differ."""
    before_s = _stage_s(result, None, Event.PREFILL_STARTED)
    after_s = _stage_s(result, Event.FIRST_TOKEN, None)
    return None if before_s is None or after_s is None else before_s + after_s


def _stage_s(result: Result, begin: Event | None, end: Event | None) -> float | None:
    """One stage of the timeline; the client's monotonic clock is that of this host."""
    stamps = {stamp.event: stamp.unix_ns for stamp in result.timeline}
    offset_ns = time.time_ns() - time.monotonic_ns()
    stamps_ns = [
        stamps.get(event)
        if event is not None
        else offset_ns + int((result.times.sent_s if first else result.times.token_s[0]) * 1e9)
        for event, first in ((begin, True), (end, False))
    ]
    begin_ns, end_ns = stamps_ns
    return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) / 1e9


def _median_ms(seconds: Sequence[float | None]) -> float:
    known = [value for value in seconds if value is not None]
    median = percentile(known, 50)
    return float("nan") if median is None else median * 1e3
