"""Works out the figures of one call that is over, by the definitions of core/metrics.py.

A delivery of several tokens is one point in time: the tokens behind its first have no gap of their
own, so a client that reads slowly does not make the gaps look small.
"""

from __future__ import annotations

from operator import itemgetter, sub

from ....core.errors import Cancelled
from ....core.request.timeline import Event
from .call_records import CallRecord
from .call_values import CallFigures, TransferFigures
from .stages import second_token_ns, stage_seconds, times_of


def call_figures(record: CallRecord) -> CallFigures:
    """Of a record that is over; worked out for the first observer that asks."""
    if record.figures is None:
        record.figures = _work_out(record)
    return record.figures


def _work_out(record: CallRecord) -> CallFigures:
    assert record.ended_s is not None, "the call still runs"
    firsts = [times[0][0] for times in record.token_times if times]
    results = [record.results[index] for index in sorted(record.results)]
    is_finished = record.error is None
    first = record.results.get(0)
    stages = {}
    if first is not None:
        # After a retry the second token may be older than the decode that went on.
        second_ns = second_token_ns(record, 0) if first.attempts == 1 else None
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
