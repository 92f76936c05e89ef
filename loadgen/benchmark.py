"""`baton bench`: a load on any server of OpenAI's API, and the figures of what came back.

    first request ── warm-up ──► 0 s ── the load ──► its end ── up to drain_s ──► figures
Ctrl-C ends the load; what was measured until then is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..core.errors import StartupFailed
from ..core.metrics import Slo, TokenTimes
from ..core.version import version
from . import plots, prompts
from .driver import TokenUsage
from .figures import ReportWindow, row, spread, targets, tbt_samples
from .generator import Load, PlannedRequest
from .prompts import PromptShape
from .records import Record
from .target import Reached, Target, reached

SOME_FAILED = 3
INTERRUPTED = 130
_GROUP = "requests"
_LATE_MS = 10.0  # a generator that is later than this at p99 is what is measured


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """`rate_per_s` None: a closed loop of `concurrency`. The load ends by `num_requests` or
    `duration_s`, whichever comes first; one of them may be infinite."""

    target: Target
    shape: PromptShape
    slo: Slo
    rate_per_s: float | None = None
    concurrency: int = 1
    num_requests: float = math.inf
    duration_s: float = math.inf
    drain_s: float = math.inf
    num_warmups: int = 0
    is_exact: bool = True
    result: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a load left. `duration_s`: to the last token or the end of the load; `ended_s`: when
    what still ran was cut off."""

    records: Sequence[Record]
    duration_s: float
    ended_s: float
    is_interrupted: bool


async def run(plan: BenchmarkPlan) -> int:
    """Measure, print, write. Returns 0, SOME_FAILED or INTERRUPTED; raises StartupFailed."""
    requests = prompts.requests(plan.shape)
    if plan.target.endpoint == "completions" and plan.shape.dataset == "jsonl":
        requests = _texts_alone(requests)
    first = next(requests)
    if plan.shape.dataset == "token-ids" and plan.target.endpoint != "completions":
        raise StartupFailed("token ids are no chat", hint="--endpoint completions, or words")
    async with reached(plan.target, first) as target:
        if target.usage is None:
            print(
                "warning: the target counts no tokens (no usage): each piece of text counts as one",
                file=sys.stderr,
            )
        await _warm_up(plan, target, requests)
        outcome = await _load(plan, target, requests)
    summary = summarise(plan, outcome, target.model, target.usage)
    text = table(summary)
    print(text)
    _write(plan, outcome, summary, text)
    if outcome.is_interrupted:
        return INTERRUPTED
    return SOME_FAILED if summary["num_failed"] else 0


def _texts_alone(requests: Iterator[PlannedRequest]) -> Iterator[PlannedRequest]:
    for one in requests:
        if not isinstance(one.content, str):
            raise StartupFailed("messages are no prompt of /v1/completions", hint="--endpoint chat")
        yield one


async def _warm_up(
    plan: BenchmarkPlan, target: Reached, requests: Iterator[PlannedRequest]
) -> None:
    load = Load(target.driver, time.monotonic(), is_exact=False)
    many = islice(requests, plan.num_warmups)
    await load.closed_loop(many, _concurrency(plan), math.inf, math.inf, _GROUP)
    failed = [record.error for record in load.records if record.error]
    if failed and len(failed) == len(load.records):
        raise StartupFailed(f"every request of the warm-up failed: {failed[0]}")


def _concurrency(plan: BenchmarkPlan) -> int:
    """As few workers as there are requests."""
    return int(min(plan.concurrency, plan.num_requests))


async def _load(
    plan: BenchmarkPlan, target: Reached, requests: Iterator[PlannedRequest]
) -> Outcome:
    most = None if math.isinf(plan.num_requests) else int(plan.num_requests)
    with tqdm(total=most, desc="Requests", unit="req", disable=None) as bar:

        def ended(record: Record) -> None:
            bar.update()

        load = Load(target.driver, time.monotonic(), is_exact=plan.is_exact, on_end=ended)
        many = islice(requests, most)
        if plan.rate_per_s is None:
            work = load.closed_loop(many, _concurrency(plan), plan.duration_s, plan.drain_s, _GROUP)
        else:
            due_s = _poisson(plan.rate_per_s, plan.duration_s, plan.shape.seed)
            work = load.open_loop(many, due_s, plan.drain_s, _GROUP)
        task = asyncio.create_task(work)
        with _cancelled_by_sigint(task), contextlib.suppress(asyncio.CancelledError):
            await task
        is_interrupted = task.cancelled()
    last_s = max((r.token_s[-1] for r in load.records if r.token_s), default=load.now_s)
    ended_s = load.now_s
    # The time that was given counts whole, also where nobody came at its end.
    is_by_time = not is_interrupted and len(load.records) < plan.num_requests
    end_s = plan.duration_s if is_by_time else min(plan.duration_s, ended_s)
    return Outcome(load.records, max(last_s, end_s), ended_s, is_interrupted)


def _poisson(rate_per_s: float, duration_s: float, seed: int) -> Iterator[float]:
    """When requests are due: exponential gaps with mean 1 / rate, the first at once."""
    rng, at_s = random.Random(seed), 0.0
    while at_s < duration_s:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


@contextmanager
def _cancelled_by_sigint(task: asyncio.Task[None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# --- figures --------------------------------------------------------------------------------------


def summarise(
    plan: BenchmarkPlan, outcome: Outcome, model: str, usage: TokenUsage | None
) -> dict[str, Any]:
    """All figures as JSON: times in ms. Requests that were cut off at the end count for tokens and
    TBT, and where they were late by then as missed targets; they are neither completed nor failed.
    """
    ended = [record for record in outcome.records if not record.is_cut_off]
    completed = [record for record in ended if not record.error]
    # The last token is inside: the window's end is open.
    window = ReportWindow(0.0, math.nextafter(outcome.duration_s, math.inf))
    served = [record.times for record in ended if record.token_s]
    samples_s: dict[str, list[float | None]] = {
        "ttft": [times.ttft_s for times in served],
        "tbt": [*tbt_samples(outcome.records, window)],
        "tpot": [times.tpot_s for times in served],
        "e2e": [record.times.e2e_s for record in completed],
    }
    num_output = sum(len(record.token_s) for record in outcome.records)
    num_prompt = sum(record.num_prompt_tokens for record in completed)
    seconds = outcome.duration_s or 1.0
    errors = Counter(record.error for record in ended if record.error)
    has_usage = usage is not None and usage.num_output_tokens is not None
    return {
        "baton": version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "target": plan.target.root,
        "endpoint": plan.target.endpoint,
        "model": model,
        "load": _shown(plan),
        "is_interrupted": outcome.is_interrupted,
        "duration_s": outcome.duration_s,
        "num_sent": len(outcome.records),
        "num_completed": len(completed),
        "num_failed": len(ended) - len(completed),
        "num_cut_off": len(outcome.records) - len(ended),
        "errors": dict(errors.most_common(10)),
        "tokens_counted_by": "usage" if has_usage else "pieces",
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "requests_per_s": len(completed) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_output + num_prompt) / seconds,
        **{f"{name}_ms": spread(s) | {"mean": _mean_ms(s)} for name, s in samples_s.items()},
        "generator_lag_ms": spread(record.lag_s for record in outcome.records),
        **_attainment(plan.slo, [*ended, *_late(plan, outcome)], seconds),
    }


def _mean_ms(seconds: Iterable[float | None]) -> float | None:
    samples = [value for value in seconds if value is not None]
    return sum(samples) / len(samples) * 1e3 if samples else None


def _late(plan: BenchmarkPlan, outcome: Outcome) -> list[Record]:
    """Those that were cut off and would have missed a target even if a token had come just then.
    Without one for TTFT the first is expected within the time for the last."""
    ttft_s = plan.drain_s or None if plan.slo.ttft_s is None else plan.slo.ttft_s
    slo = replace(plan.slo, ttft_s=ttft_s, tpot_s=None)
    return [
        record
        for record in outcome.records
        if record.is_cut_off
        and not slo.is_met_by(TokenTimes(record.sent_s, (*record.token_s, outcome.ended_s)))
    ]


def _attainment(slo: Slo, judged: Sequence[Record], seconds: float) -> dict[str, Any]:
    """Shares of the requests that ended or were late; nothing without a target. Those that failed
    or were cut off keep none."""
    wanted = targets(slo)
    if not wanted:
        return {}

    def share(one: Slo) -> float | None:
        ended = (record for record in judged if not record.error and not record.is_cut_off)
        good = sum(one.is_met_by(record.times) for record in ended)
        return good / len(judged) if judged else None

    each = {name: share(replace(Slo(), **{f"{name}_s": value})) for name, value in wanted.items()}
    whole = share(slo)
    return {
        "slo_ms": {name: value * 1e3 for name, value in wanted.items()},
        "slo_attainment": {**each, "all": whole},
        "goodput_rps": (whole or 0.0) * len(judged) / seconds,
    }


def _shown(plan: BenchmarkPlan) -> dict[str, Any]:
    shape = plan.shape
    loop = "concurrency" if plan.rate_per_s is None else "rate_per_s"
    of_plan = (loop, "num_requests", "duration_s", "num_warmups")
    of_shape = ("input_len", "output_len", "range_ratio", "shared_prefix_len", "seed")
    found = {
        **{name: getattr(plan, name) for name in of_plan},
        "dataset": shape.dataset if shape.path is None else f"{shape.dataset} {shape.path.name}",
        **{name: getattr(shape, name) for name in of_shape},
    }
    return {name: None if value == math.inf else value for name, value in found.items()}


def table(summary: Mapping[str, Any]) -> str:
    lines = [
        f"{summary['model']} at {summary['target']}, {summary['endpoint']}",
        f"{summary['num_completed']} completed, {summary['num_failed']} failed, "
        f"{summary['num_cut_off']} cut off at the end, in {summary['duration_s']:.1f} s",
        f"{summary['requests_per_s']:.2f} requests/s, "
        f"{summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['total_tokens_per_s']:.1f} with prompts",
        f"{'':34}{'n':>8}{'p50':>10}{'p90':>10}{'p99':>10}{'p99.9':>10}{'max':>10}   ms",
        *(row(name, summary[f"{name.lower()}_ms"]) for name in ("TTFT", "TBT", "TPOT", "E2E")),
    ]
    if "slo_ms" in summary:
        shares = {k: v for k, v in summary["slo_attainment"].items() if v is not None}
        kept = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        lines.append(f"SLO kept: {kept or '-'}; goodput {summary['goodput_rps']:.2f} requests/s")
    lines += [f"failed, {count} times: {error}" for error, count in summary["errors"].items()]
    if (summary["generator_lag_ms"]["p99"] or 0.0) > _LATE_MS:
        late = summary["generator_lag_ms"]["p99"]
        lines.append(
            f"warning: this program sent requests up to {late:.0f} ms late (p99): it is too slow "
            "for this load, run several of it"
        )
    return "\n".join(lines)


def _write(plan: BenchmarkPlan, outcome: Outcome, summary: Mapping[str, Any], text: str) -> None:
    try:
        if plan.result is not None:
            plan.result.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            print(f"written: {plan.result}")
        if plan.plot is not None:
            window = ReportWindow(0.0, math.nextafter(outcome.duration_s, math.inf))
            runs = {summary["model"]: (outcome.records, window)}
            plots.write(plan.plot, f"baton bench: {plan.target.root}", runs, text)
            print(f"written: {plan.plot}")
    except OSError as error:
        raise StartupFailed(f"the result cannot be written: {error}") from error
