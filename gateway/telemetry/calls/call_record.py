"""What is recorded of one call while it runs, and its figures and log line once it is over.

Times are of delivery at the gateway: a chunk counts when its front has written it to the client. A
delivery of several tokens is one point in time: the tokens behind its first have no gap of their
own, so a client that reads slowly does not make the gaps look small. The stages of a call:

    arrived ─gateway_queue─ routed ─prefill_queue─ prefill_started ─prefill─ first_token
      ─kv_transfer─ transfer_ended ─decode_queue─ decode_started ─first_decode─ second token
`kv_transfer` is the part of the pull that the client waits for: a pull begins beside the prefill.
The second token counts when it is delivered. All stamps are on the gateway's clock
(engines/wire.py): no stage depends on two hosts' wall clocks. A stage that would be negative is 0.
A call that one engine serves whole has the first three. An engine that refuses it for its promise
is no attempt: `prefill_queue` has the time until others were found.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter, sub
from typing import Any

from ....core.errors import BatonError, Cancelled
from ....core.process.logs import fields
from ....core.request.request import SamplingParams
from ....core.request.timeline import Event, Stamp
from ...request.output_chunk import RequestResult, UnfinishedRun
from ...security.tenancy import Caller


@dataclass(slots=True)
class CallRecord:
    """One call: a prompt and its samples. The front door fills it.

    `token_times` hold, per sample, (monotonic seconds, tokens delivered then) of each delivery.
    `results` are of the samples that finished; `error` is what ended the call otherwise, and
    `unfinished_run` where its first sample was then.
    `num_computed_tokens` are of all samples, those that `best_of` left out too.
    `lookup_s` is what the look-up in the prefix index took. `prompt` is kept with --log-prompts
    alone.
    """

    call_id: str
    label: str
    caller: Caller
    model: str
    num_samples: int
    prompt_tokens: int
    arrived_s: float
    arrived_unix_ns: int
    traceparent: str = ""
    tracestate: str = ""
    lookup_s: float = 0.0
    sampling: SamplingParams | None = None
    prompt: str | None = None
    token_times: list[list[tuple[float, int]]] = field(default_factory=list)
    results: dict[int, RequestResult] = field(default_factory=dict)
    error: BatonError | None = None
    unfinished_run: UnfinishedRun | None = None
    num_computed_tokens: int = 0
    ended_s: float | None = None

    @property
    def run(self) -> RequestResult | UnfinishedRun | None:
        """Of the first sample; None: no engine had it."""
        return self.results.get(0) or self.unfinished_run

    @property
    def num_delivered_tokens(self) -> int:
        """Of all samples."""
        return sum(map(_num_tokens, self.token_times))


@dataclass(frozen=True, slots=True)
class TransferFigures:
    """One hand-off. `seconds` from the first reserved block to the last pulled one."""

    source: str
    puller: str
    transport: str
    num_bytes: int
    seconds: float
    puller_cached_tokens: int


@dataclass(frozen=True, slots=True)
class CallFigures:
    """`outcome`: "stop" or "length" of the first sample, or the error's code.

    `ttft_s` is of the sample that was first, `last_ttft_s` of the one that was last; `tpot_s` one
    value a sample. `stages` and `transfer` are of the first sample: its prefill serves all.
    """

    outcome: str
    is_finished: bool
    is_cancelled: bool
    ttft_s: float | None
    last_ttft_s: float | None
    max_gap_s: float
    tpot_s: tuple[float, ...]
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    attempts: int
    stages: dict[str, float]
    transfer: TransferFigures | None

    @property
    def judged(self) -> JudgedCall:
        """What SLOs are judged by."""
        worst_s = math.inf if self.last_ttft_s is None else self.last_ttft_s
        return self.is_finished, worst_s, self.max_gap_s


_DESCRIBED = (
    *("outcome", "is_finished", "prompt_tokens", "cached_tokens", "output_tokens", "attempts"),
    *("ttft_s", "max_gap_s", "e2e_s"),
)


def description(record: CallRecord, figures: CallFigures) -> dict[str, Any]:
    """What log lines and the live page both have of a call that is over; times of one sample."""
    run = record.run
    return {
        "tenant": record.caller.tenant,
        "front": record.caller.front,
        "num_samples": record.num_samples,
        "prefill_node": run.prefill_node if run else None,
        "decode_node": run.decode_node if run else None,
        "tpot_s": figures.tpot_s[0] if figures.tpot_s else None,
        **{name: getattr(figures, name) for name in _DESCRIBED},
    }


JudgedCall = tuple[bool, float, float]  # has finished; its worst TTFT and longest gap, in seconds


@dataclass(frozen=True, slots=True)
class SloTargets:
    """The longest TTFT, and the longest gap between two tokens, of a good call."""

    ttft_slo_s: float
    tbt_slo_s: float

    def are_met(self, call: JudgedCall) -> bool:
        """Whether the call finished with every sample's TTFT and gaps within the targets."""
        is_finished, ttft_s, gap_s = call
        return is_finished and ttft_s <= self.ttft_slo_s and gap_s <= self.tbt_slo_s


STAGES = (
    "gateway_queue",
    "prefill_queue",
    "prefill",
    "kv_transfer",
    "decode_queue",
    "first_decode",
)
_BOUNDS = (
    Event.ARRIVED,
    Event.ROUTED,
    Event.PREFILL_STARTED,
    Event.FIRST_TOKEN,
    Event.TRANSFER_ENDED,
    Event.DECODE_STARTED,
)


@dataclass(frozen=True, slots=True)
class Times:
    """When what happened, in unix nanoseconds, of a sample's last attempt.

    `routed_ns`: of its first: until then the gateway looked for engines.
    """

    routed_ns: int | None
    by_event: dict[Event, int]

    def between_s(self, first: Event, last: Event) -> float | None:
        """Seconds from one event to another; None if one of them is not there."""
        return _seconds(self.by_event.get(first), self.by_event.get(last))


def times_of(timeline: Sequence[Stamp]) -> Times:
    """Sort a timeline out."""
    routed = [stamp.unix_ns for stamp in timeline if stamp.event is Event.ROUTED]
    by_event: dict[Event, int] = {}
    for stamp in timeline:
        if stamp.event is Event.ROUTED:
            arrived_ns = by_event.get(Event.ARRIVED)
            by_event = {} if arrived_ns is None else {Event.ARRIVED: arrived_ns}
        by_event[stamp.event] = stamp.unix_ns
    return Times(routed[0] if routed else None, by_event)


def stage_seconds(
    times: Times, second_token_ns: int | None, *, attempts: int = 1
) -> dict[str, float]:
    """Stages by name, those of which both ends are known; of several attempts, the last one's."""
    bounds_ns = [times.by_event.get(event) for event in _BOUNDS] + [second_token_ns]
    if attempts == 1:
        bounds_ns[_BOUNDS.index(Event.ROUTED)] = times.routed_ns
    found = {
        name: _seconds(start_ns, end_ns)
        for name, start_ns, end_ns in zip(STAGES, bounds_ns[:-1], bounds_ns[1:], strict=True)
    }
    found["gateway_queue"] = _seconds(times.by_event.get(Event.ARRIVED), times.routed_ns)
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def call_figures(record: CallRecord) -> CallFigures:
    """Of a record that is over."""
    assert record.ended_s is not None, "the call still runs"
    firsts = [times[0][0] for times in record.token_times if times]
    results = [record.results[index] for index in sorted(record.results)]
    is_finished = record.error is None
    first = record.results.get(0)
    stages = {}
    if first is not None:
        # After a retry the second token may be older than the decode that went on.
        second_ns = _second_token_ns(record, 0) if first.attempts == 1 else None
        stages = stage_seconds(times_of(first.timeline), second_ns, attempts=first.attempts)
    return CallFigures(
        outcome=results[0].finish_reason.value if record.error is None else record.error.code,
        is_finished=is_finished,
        is_cancelled=isinstance(record.error, Cancelled),
        ttft_s=min(firsts) - record.arrived_s if firsts else None,
        last_ttft_s=max(firsts) - record.arrived_s if firsts else None,
        max_gap_s=max((_max_gap_s(times) for times in record.token_times), default=0.0),
        tpot_s=tuple(tpot for times in record.token_times if (tpot := _tpot_s(times)) is not None),
        e2e_s=record.ended_s - record.arrived_s,
        prompt_tokens=record.prompt_tokens,
        output_tokens=sum(map(_num_tokens, record.token_times)),
        cached_tokens=first.cached_tokens if first else 0,
        attempts=max((result.attempts for result in results), default=0),
        stages=stages,
        transfer=_transfer(record),
    )


def _num_tokens(times: list[tuple[float, int]]) -> int:
    return sum(map(itemgetter(1), times))


def _max_gap_s(times: list[tuple[float, int]]) -> float:
    moments = [at_s for at_s, _ in times]
    return max(map(sub, moments[1:], moments), default=0.0)


def _tpot_s(times: list[tuple[float, int]]) -> float | None:
    """(last - first token) / (tokens - 1), as core/metrics.py has it; None below two tokens."""
    num_tokens = _num_tokens(times)
    return (times[-1][0] - times[0][0]) / (num_tokens - 1) if num_tokens > 1 else None


def _transfer(record: CallRecord) -> TransferFigures | None:
    for result in record.results.values():
        if result.transfer is not None and result.decode_node is not None:
            spent_s = times_of(result.timeline).between_s(
                Event.TRANSFER_STARTED, Event.TRANSFER_ENDED
            )
            return TransferFigures(
                result.prefill_node,
                result.decode_node,
                result.transfer.transport,
                result.transfer.num_bytes,
                spent_s or 0.0,
                result.transfer.cached_tokens,
            )
    return None


def _second_token_ns(record: CallRecord, sample_index: int) -> int | None:
    """When a sample's second token was delivered, on the wall clock; None: with its first."""
    times = record.token_times[sample_index]
    if len(times) < 2 or times[0][1] > 1:
        return None
    return record.arrived_unix_ns + round((times[1][0] - record.arrived_s) * 1e9)


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    if start_ns is None or end_ns is None:
        return None
    return max(0, end_ns - start_ns) / 1e9


log = logging.getLogger(__name__)

_MAX_LABEL = 128  # a client's own name of a call
_DIGITS = 6  # of seconds


def log_refused(caller: Caller, error: BatonError) -> None:
    """Of a call that ended before it was routed."""
    values = {"tenant": caller.tenant, "front": caller.front, "outcome": error.code}
    log.info("refused", extra=fields(values))


def log_ended(record: CallRecord, figures: CallFigures) -> None:
    """Of a call that is over: who, how much, how long, where, and how it ended. Its prompt's text
    only if the record carries it, and never an error's: that may quote what the client sent."""
    transfer = figures.transfer
    values = description(record, figures) | {
        "request_id": record.call_id,
        "label": record.label[:_MAX_LABEL],
        "model": record.model,
        "traceparent": record.traceparent[:_MAX_LABEL],
        "transport": transfer.transport if transfer else None,
        "transfer_bytes": transfer.num_bytes if transfer else 0,
        "stages_s": {name: round(seconds, _DIGITS) for name, seconds in figures.stages.items()},
    }
    for name in ("ttft_s", "tpot_s", "max_gap_s", "e2e_s"):
        if values[name] is not None:
            values[name] = round(values[name], _DIGITS)
    if record.prompt is not None:
        values["prompt"] = record.prompt
    log.info("call %s", record.call_id, extra=fields(values, is_unlimited=True))
