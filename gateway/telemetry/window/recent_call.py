"""A call that is over, as the live page lists it: typed, since other gateways send theirs."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from ..calls.call_record import CallFigures, CallRecord, description

_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
UnixSeconds: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
_MAX_EVENTS = 100
_MAX_CHARS = 256


class RecentTransfer(msgspec.Struct, frozen=True):
    """Its hand-off; fields as in TransferFigures."""

    source: _Text
    puller: _Text
    transport: _Text
    num_bytes: _Count
    seconds: _Seconds
    puller_cached_tokens: _Count


class RecentCall(msgspec.Struct, frozen=True):
    """docs/dashboard.md has the fields; `timeline` in seconds since it arrived, of its first
    sample."""

    call_id: _Text
    tenant: _Text
    front: _Text
    outcome: _Text
    is_finished: bool
    num_samples: _Count
    prompt_tokens: _Count
    cached_tokens: _Count
    output_tokens: _Count
    attempts: _Count
    max_gap_s: _Seconds
    e2e_s: _Seconds
    arrived_unix_s: UnixSeconds
    ended_unix_s: UnixSeconds
    ttft_s: _Seconds | None
    tpot_s: _Seconds | None
    prefill_node: _Text | None
    decode_node: _Text | None
    transfer: RecentTransfer | None
    stages: Annotated[dict[_Text, _Seconds], msgspec.Meta(max_length=16)]
    timeline: Annotated[list[tuple[_Text, _Seconds, _Text]], msgspec.Meta(max_length=_MAX_EVENTS)]

    def moved(self, by_s: float) -> RecentCall:
        """On a clock that is ahead of its own by this much."""
        return msgspec.structs.replace(
            self, arrived_unix_s=self.arrived_unix_s + by_s, ended_unix_s=self.ended_unix_s + by_s
        )


def recent_call(record: CallRecord, figures: CallFigures, offset_s: float) -> RecentCall:
    """Of a call that is over; `offset_s`: the unix time of the monotonic clock's zero."""
    result = record.results.get(0)
    assert record.ended_s is not None, "it is over"
    moved = figures.transfer
    transfer = None
    if moved is not None:
        names = (_cut(moved.source), _cut(moved.puller), _cut(moved.transport))
        transfer = RecentTransfer(
            *names, moved.num_bytes, moved.seconds, moved.puller_cached_tokens
        )
    described: dict[str, Any] = {
        name: _cut(value) if isinstance(value, str) else value
        for name, value in description(record, figures).items()
    }
    return RecentCall(
        call_id=record.call_id,
        arrived_unix_s=record.arrived_unix_ns / 1e9,
        ended_unix_s=record.ended_s + offset_s,
        transfer=transfer,
        stages=figures.stages,
        timeline=[
            (stamp.event.value, (stamp.unix_ns - record.arrived_unix_ns) / 1e9, _cut(stamp.node))
            for stamp in (result.timeline if result else ())[:_MAX_EVENTS]
        ],
        **described,
    )


def _cut(text: str) -> str:
    return text[:_MAX_CHARS]
