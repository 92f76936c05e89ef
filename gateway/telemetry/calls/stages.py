"""Where a call's time went: the stages of its timeline, each in seconds.

    arrived ─gateway_queue─ routed ─prefill_queue─ prefill_started ─prefill─ first_token
      ─kv_transfer─ transfer_ended ─decode_queue─ decode_started ─first_decode─ second token
`kv_transfer` is the part of the pull that the client waits for: a pull begins beside the prefill.
The second token counts when it is delivered.
All stamps are on the gateway's clock (engines/wire.py): no stage depends on two hosts' wall clocks.
What overtook another, and would be negative, is told as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....core.request.timeline import Event, Stamp
from .call_records import CallRecord

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
        start_ns, end_ns = self.by_event.get(first), self.by_event.get(last)
        return _seconds(start_ns, end_ns)


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


def second_token_ns(record: CallRecord, sample_index: int) -> int | None:
    """When a sample's second token was delivered, on the wall clock; None: with its first."""
    times = record.token_times[sample_index]
    if len(times) < 2 or times[0][1] > 1:
        return None
    return record.arrived_unix_ns + round((times[1][0] - record.arrived_s) * 1e9)


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    if start_ns is None or end_ns is None:
        return None
    return max(0, end_ns - start_ns) / 1e9
