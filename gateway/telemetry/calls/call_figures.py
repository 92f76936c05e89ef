"""The figures of one call that is over, by the definitions of core/metrics.py, and its stages.

    arrived ─gateway_queue─ routed ─prefill_queue─ prefill_started ─prefill─ first_token
      ─kv_transfer─ transfer_ended ─decode_queue─ decode_started ─first_decode─ second token
`kv_transfer` is the part of the pull that the client waits for: a pull begins beside the prefill.
The second token counts when it is delivered. All stamps are on the gateway's clock
(engines/wire.py): no stage depends on two hosts' wall clocks. A stage that would be negative is 0.

A delivery of several tokens is one point in time: the tokens behind its first have no gap of their
own, so a client that reads slowly does not make the gaps look small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter, sub

from ....core.errors import Cancelled
from ....core.request.timeline import Event, Stamp
from .call_record import CallFigures, CallRecord, TransferFigures

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

    def between_ns(self, first: Event, last: Event) -> tuple[int, int] | None:
        """From one event to another; None if one of them is not there."""
        start_ns, end_ns = self.by_event.get(first), self.by_event.get(last)
        if start_ns is None or end_ns is None:
            return None
        return start_ns, max(start_ns, end_ns)

    def between_s(self, first: Event, last: Event) -> float | None:
        """The same in seconds."""
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


def stage_seconds(times: Times, second_token_ns: int | None) -> dict[str, float]:
    """Stages by name, those of which both ends are known."""
    bounds_ns = [times.by_event.get(event) for event in _BOUNDS] + [second_token_ns]
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
        stages = stage_seconds(times_of(first.timeline), second_ns)
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
