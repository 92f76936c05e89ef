"""The named mixes: what a run sends to a system.

idle          one request after the other, of several lengths: latency without load
streams       long running streams alone: the time of a token without other load
streams+8k    the same, while prompts of 8192 tokens arrive: the effect of prefill on decode
poisson       one kind of request at a rate
sharegpt      lengths of ShareGPT's turns at a rate, without those that are too long
trace         users' requests, from a trace's time stamps, lengths and shared prefixes
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from ...floors.figures import ROOT
from .arrivals import Arrival, Background, from_trace, poisson, poisson_of

TRACE = ROOT / "bench" / "data" / "mooncake_conversation_120s.jsonl"
LENGTHS = ROOT / "bench" / "data" / "sharegpt_lengths.csv"
PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Workload:
    """A mix that is ready to be sent. Requests before `warmup_s` are not reported."""

    name: str
    duration_s: float
    warmup_s: float
    arrivals: tuple[Arrival, ...]
    background: Background | None = None


@dataclass(frozen=True, slots=True)
class LoadShape:
    """The parameters of a mix."""

    rate_per_s: float = 3.7
    duration_s: float = 60.0
    warmup_s: float = 5.0
    num_prompt_tokens: int = 8192
    num_output_tokens: int = 32
    num_streams: int = 64
    stream_prompt_tokens: int = 1024
    stream_output_tokens: int = 2048
    idle_lengths: tuple[int, ...] = (1024, 8192, 32_768)
    num_idle_requests: int = 10
    trace_speed: float = 1.0
    max_tokens: int = 131_072
    seed: int = 0


DEFAULT_SHAPE = LoadShape()
MIXES = ("idle", "streams", "streams+8k", "poisson", "sharegpt", "trace")


def make_workload(mix: str, shape: LoadShape, trace: Path = TRACE) -> Workload:
    """The mix `mix` in this shape; `idle` is not open loop: see idle.py."""
    background = Background(
        shape.num_streams, shape.stream_prompt_tokens, shape.stream_output_tokens
    )
    timing = Workload(mix, shape.duration_s, shape.warmup_s, ())
    if mix == "streams":
        return replace(timing, background=background)
    if mix == "streams+8k":
        # Probes arrive once the streams run; arrival times count from the start.
        return replace(timing, background=background, arrivals=_poisson(shape))
    if mix == "poisson":
        return replace(timing, arrivals=_poisson(shape))
    if mix == "sharegpt":
        return replace(timing, arrivals=_of_sharegpt(shape))
    if mix == "trace":
        arrivals = from_trace(
            trace, shape.duration_s, speed=shape.trace_speed, max_tokens=shape.max_tokens
        )
        return replace(timing, arrivals=tuple(arrivals))
    raise ValueError(f"no open-loop mix {mix!r}; there are {', '.join(MIXES[1:])}")


def _poisson(shape: LoadShape) -> tuple[Arrival, ...]:
    return tuple(
        poisson(
            shape.rate_per_s,
            shape.duration_s,
            num_prompt_tokens=shape.num_prompt_tokens,
            num_output_tokens=shape.num_output_tokens,
            seed=shape.seed,
            group=PROBE,
        )
    )


def sharegpt_lengths(max_tokens: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of the turns that fit."""
    with LENGTHS.open() as file:
        pairs = [(int(p), int(o)) for p, o in list(csv.reader(file))[1:]]
    return [pair for pair in pairs if sum(pair) <= max_tokens]


def _of_sharegpt(shape: LoadShape) -> tuple[Arrival, ...]:
    lengths = sharegpt_lengths(shape.max_tokens)
    rate, seconds = shape.rate_per_s, shape.duration_s
    return tuple(poisson_of(rate, seconds, lengths, seed=shape.seed, group=PROBE))
