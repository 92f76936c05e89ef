"""The latency that the whole system adds to the engine alone, with one request at a time.

client ─ gateway ─ prefill node ─ hand-off ─ decode node     minus     engine.add, engine.step
"""

from __future__ import annotations

import time

from baton.cli.deployment.deployment import Deployment, running_in_background
from baton.client import Client, Result
from baton.core.config import GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.timeline import Event
from baton.engine.engine import Engine

from ..floors.figures import Figure, time_s
from .small_model import load_engine, prompt

_PROMPT_TOKENS = 128
_REQUESTS = 40
_NUM_TOKENS = 24
_WARMUPS = 4
_TARGET_MS = 8.0
_PARTS: tuple[tuple[str, Event | None, Event | None], ...] = (  # None: the client's clock
    ("sent to arrived", None, Event.ARRIVED),
    ("arrived to routed", Event.ARRIVED, Event.ROUTED),
    ("routed to prefill_started", Event.ROUTED, Event.PREFILL_STARTED),
    ("prefill_started to first_token", Event.PREFILL_STARTED, Event.FIRST_TOKEN),
    ("first_token to received", Event.FIRST_TOKEN, None),
    ("first_token to transfer_ended", Event.FIRST_TOKEN, Event.TRANSFER_ENDED),
    ("transfer_ended to decode_started", Event.TRANSFER_ENDED, Event.DECODE_STARTED),
)


def measure() -> list[Figure]:
    """Milliseconds added to TTFT and to the first gap, by stage."""
    pairs = _run_pairs()
    through = [result for result, _, _ in pairs]
    added_ttft = tuple(_ms(r.times.ttft_s) - ttft for r, ttft, _ in pairs)
    added_gap = tuple(_ms(r.times.handoff_gap_s) - gap for r, _, gap in pairs)
    shape = f"prompt of {_PROMPT_TOKENS}, idle"
    parts = [
        Figure(f"  {name}", "ms", tuple(_part_ms(r, begin, end) for r in through))
        for name, begin, end in _PARTS
    ]
    return [
        Figure(f"engine alone: TTFT, {shape}", "ms", tuple(ttft for _, ttft, _ in pairs)),
        Figure(f"engine alone: first gap, {shape}", "ms", tuple(gap for _, _, gap in pairs)),
        Figure("system minus engine: TTFT", "ms", added_ttft, 0.0, "nothing added", _TARGET_MS),
        Figure("system minus engine: first gap", "ms", added_gap, 0.0, "nothing added", _TARGET_MS),
        # The difference above has the noise of two prefills; this figure has none.
        Figure("TTFT outside the prefill step", "ms", tuple(map(_outside_ms, through))),
        *parts,
    ]


def _run_pairs() -> list[tuple[Result, float, float]]:
    """Each prompt through the system and, right after it, through the engine alone (ms)."""
    deployment = Deployment(
        UpConfig(mode="disaggregated"),
        EngineConfig(device="cpu", cpu_kv_bytes=96 << 20),
        NodeConfig(),
        GatewayConfig(grpc_port=0, http_port=0),
        lambda name, line: None,
    )
    engine = load_engine().engine
    pairs = []
    with running_in_background(deployment) as address, Client(address) as client:
        for number in range(_REQUESTS):
            result = client.generate(
                prompt_token_ids=prompt(number, _PROMPT_TOKENS),
                max_tokens=_NUM_TOKENS,
                temperature=0.0,
                ignore_eos=True,
            ).result
            pairs.append((result, *_alone(engine, number)))
    return pairs[_WARMUPS:]


def _alone(engine: Engine, number: int) -> tuple[float, float]:
    """TTFT and first gap in ms, with direct calls of the engine."""
    sampling = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    request = Request(f"{number:032x}", 0, prompt(number, _PROMPT_TOKENS), sampling)
    engine.add(request)
    times_ms = (time_s(engine.step) * 1e3, time_s(engine.step) * 1e3)
    engine.abort(request.key)
    return times_ms


def _ms(seconds: float | None) -> float:
    assert seconds is not None
    return seconds * 1e3


def _outside_ms(result: Result) -> float:
    """The part of TTFT before and after the prefill step."""
    before_ms = _part_ms(result, None, Event.PREFILL_STARTED)
    return before_ms + _part_ms(result, Event.FIRST_TOKEN, None)


def _part_ms(result: Result, begin: Event | None, end: Event | None) -> float:
    """One stage of the timeline in ms; the client's monotonic clock is that of this host."""
    stamps = {stamp.event: stamp.unix_ns for stamp in result.timeline}
    offset_ns = time.time_ns() - time.monotonic_ns()
    begin_ns = int(result.times.sent_s * 1e9) + offset_ns if begin is None else stamps[begin]
    end_ns = int(result.times.token_s[0] * 1e9) + offset_ns if end is None else stamps[end]
    return (end_ns - begin_ns) / 1e6
