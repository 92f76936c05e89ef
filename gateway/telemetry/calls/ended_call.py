"""The summary of an ended call, and its log lines. The stages of a call:

    arrived ─gateway_queue─ routed ─prefill_queue─ prefill_started ─prefill─ first_token
      ─kv_transfer─ transfer_ended ─decode_queue─ decode_started ─first_decode─ second token
`kv_transfer` is the part of the pull that the client waits for: a pull begins beside the prefill.
The second token counts when it is delivered. All stamps are on the gateway's clock
(engines/engine_connection.py): no stage depends on two hosts' wall clocks. A stage that would be
negative is 0. A call that one engine serves alone has the first three. An engine that refuses it
because of its promise is no attempt: `prefill_queue` includes the time until another was found.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import sub
from typing import Annotated, TypeAlias

import msgspec

from ....core.errors import BatonError
from ....core.process.logs import fields
from ....core.request.timeline import Event, Stamp
from ...request.output_chunk import RequestResult
from ...security.caller import Caller
from .call_record import CallRecord

log = logging.getLogger(__name__)

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
MAX_COUNT = 1 << 53
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
UnixSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
_MAX_EVENTS = 100


class TransferRecord(msgspec.Struct, frozen=True):
    """One hand-off. `seconds`: from the first reserved block to the last pulled one."""

    source: Text
    puller: Text
    transport: Text
    num_bytes: Count
    seconds: _Seconds
    puller_cached_tokens: Count


class EndedCall(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of an ended call for log lines, metrics and the live page (fields:
    docs/dashboard.md). Typed and bounded, since other gateways send theirs.

    `outcome`: "stop" or "length" of the first sample, or the error's code. `ttft_s`: of whichever
    sample had a token first. `tpot_s`, `stages`, `transfer` and `timeline` (in seconds since the
    arrival): of the first sample, whose prefill serves all.
    """

    call_id: Text
    tenant: Text
    front: Text
    outcome: Text
    is_finished: bool
    num_samples: Count
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    attempts: Count
    max_gap_s: _Seconds
    e2e_s: _Seconds
    arrived_unix_s: UnixSeconds
    ended_unix_s: UnixSeconds
    ttft_s: _Seconds | None
    tpot_s: _Seconds | None
    prefill_node: Text | None
    decode_node: Text | None
    transfer: TransferRecord | None
    stages: Annotated[dict[Text, _Seconds], msgspec.Meta(max_length=16)]
    timeline: Annotated[list[tuple[Text, _Seconds, Text]], msgspec.Meta(max_length=_MAX_EVENTS)]

    def moved(self, by_s: float) -> EndedCall:
        """The same on a clock that is ahead by this much."""
        return msgspec.structs.replace(
            self, arrived_unix_s=self.arrived_unix_s + by_s, ended_unix_s=self.ended_unix_s + by_s
        )


_BEGINS = {  # the stages by the event that begins them
    "gateway_queue": Event.ARRIVED,
    "prefill_queue": Event.ROUTED,
    "prefill": Event.PREFILL_STARTED,
    "kv_transfer": Event.FIRST_TOKEN,
    "decode_queue": Event.TRANSFER_ENDED,
    "first_decode": Event.DECODE_STARTED,
}
STAGES = tuple(_BEGINS)


def times_of(timeline: Sequence[Stamp]) -> dict[Event, int]:
    """The time of each event of a sample's last attempt, in unix nanoseconds."""
    times: dict[Event, int] = {}
    for stamp in timeline:
        if stamp.event is Event.ROUTED:
            times = {event: at for event, at in times.items() if event is Event.ARRIVED}
        times[stamp.event] = stamp.unix_ns
    return times


def between_s(times: Mapping[Event, int], first: Event, last: Event) -> float | None:
    """Seconds from one event to another; None if one of them is missing."""
    return _seconds(times.get(first), times.get(last))


def stage_seconds(
    timeline: Sequence[Stamp], second_token_ns: int | None, *, attempts: int = 1
) -> dict[str, float]:
    """Seconds by stage, where both ends are known; of several attempts, the last one's stages.
    `gateway_queue` ends when the call is routed for the first time."""
    times = times_of(timeline)
    routed_ns = next((stamp.unix_ns for stamp in timeline if stamp.event is Event.ROUTED), None)
    begins_ns = {name: times.get(event) for name, event in _BEGINS.items()}
    if attempts == 1:
        begins_ns["prefill_queue"] = routed_ns
    ends_ns = [*begins_ns.values(), second_token_ns][1:]
    found = dict(zip(STAGES, map(_seconds, begins_ns.values(), ends_ns), strict=True))
    found["gateway_queue"] = _seconds(times.get(Event.ARRIVED), routed_ns)
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def ended_call(record: CallRecord) -> EndedCall:
    """Summarises the record of an ended call."""
    first, run = record.results.get(0), record.run
    firsts, tpots_s = record.first_tokens_s, record.tpots_s
    results = [record.results[index] for index in sorted(record.results)]
    return EndedCall(
        call_id=record.call_id,
        tenant=record.caller.tenant,
        front=record.caller.front,
        outcome=results[0].finish_reason.value if record.error is None else record.error.code,
        is_finished=record.error is None,
        num_samples=record.request.options.n,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=first.cached_tokens if first else 0,
        output_tokens=record.num_delivered_tokens,
        attempts=max((result.attempts for result in results), default=0),
        max_gap_s=max(map(_max_gap_s, record.token_times), default=0.0),
        e2e_s=record.ended_s - record.arrived_s,
        arrived_unix_s=record.arrived_unix_ns / 1e9,
        ended_unix_s=record.unix_ns(record.ended_s) / 1e9,
        ttft_s=min(firsts) - record.arrived_s if firsts else None,
        tpot_s=tpots_s[0] if tpots_s else None,
        prefill_node=run.prefill_node if run else None,
        decode_node=run.decode_node if run else None,
        transfer=_transfer(record),
        stages=_stages(record, first) if first else {},
        timeline=[
            (stamp.event.value, (stamp.unix_ns - record.arrived_unix_ns) / 1e9, stamp.node)
            for stamp in (first.timeline if first else ())[:_MAX_EVENTS]
        ],
    )


def _max_gap_s(times: list[tuple[float, int]]) -> float:
    moments = [at_s for at_s, _ in times]
    return max(map(sub, moments[1:], moments), default=0.0)


def _transfer(record: CallRecord) -> TransferRecord | None:
    for result in record.results.values():
        if result.transfer is not None and result.decode_node is not None:
            times = times_of(result.timeline)
            spent_s = between_s(times, Event.TRANSFER_STARTED, Event.TRANSFER_ENDED)
            return TransferRecord(
                result.prefill_node,
                result.decode_node,
                result.transfer.transport,
                result.transfer.num_bytes,
                spent_s or 0.0,
                result.transfer.cached_tokens,
            )
    return None


def _stages(record: CallRecord, first: RequestResult) -> dict[str, float]:
    times, second_ns = record.token_times[0], None
    # After a retry the second token may be older than the last decode; it may also have been
    # delivered with the first.
    if first.attempts == 1 and len(times) > 1 and times[0][1] == 1:
        second_ns = record.unix_ns(times[1][0])
    return stage_seconds(first.timeline, second_ns, attempts=first.attempts)


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    if start_ns is None or end_ns is None:
        return None
    return max(0, end_ns - start_ns) / 1e9


_MAX_LABEL = 128  # a client's own name of a call
_DIGITS = 6  # of seconds


def log_refused(caller: Caller, error: BatonError) -> None:
    """Logs a call that ended before it was routed."""
    values = {"tenant": caller.tenant, "front": caller.front, "outcome": error.code}
    log.info("refused", extra=fields(values))


_LOGGED = (
    *("tenant", "front", "num_samples", "prefill_node", "decode_node"),
    *("outcome", "is_finished", "prompt_tokens", "cached_tokens", "output_tokens", "attempts"),
)
_LOGGED_S = ("ttft_s", "tpot_s", "max_gap_s", "e2e_s")


def log_ended(record: CallRecord, call: EndedCall) -> None:
    """Logs an ended call: its caller, sizes, times, nodes and outcome. The prompt's text only if
    the record has it, and never an error's text: that may quote what the client sent."""
    spans = {name: getattr(call, name) for name in _LOGGED_S}
    values = {name: getattr(call, name) for name in _LOGGED} | {
        "request_id": record.call_id,
        "label": record.request.label[:_MAX_LABEL],
        "model": record.model,
        "traceparent": record.traceparent[:_MAX_LABEL],
        "transport": call.transfer.transport if call.transfer else None,
        "transfer_bytes": call.transfer.num_bytes if call.transfer else 0,
        "stages_s": {name: round(s, _DIGITS) for name, s in call.stages.items()},
        **{name: s if s is None else round(s, _DIGITS) for name, s in spans.items()},
    }
    if record.prompt is not None:
        values["prompt"] = record.prompt
    log.info("call %s", record.call_id, extra=fields(values, is_unlimited=True))
