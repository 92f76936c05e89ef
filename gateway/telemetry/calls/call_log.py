"""One log line for each call that is over: who, how much, how long, where, and how it ended.

Never a prompt's text unless the record carries it (--log-prompts), and never an error's message:
that may quote what the client sent.
"""

from __future__ import annotations

import logging

from ....core.errors import BatonError
from ....core.process.logs import fields
from ...request.output_chunk import OutputChunk
from ...security.tenancy import Caller
from .call_figures import call_figures
from .call_records import CallRecord

log = logging.getLogger(__name__)

_MAX_LABEL = 128  # a client's own name of a call
_DIGITS = 6  # of seconds


class CallLog:
    """`CallObserver`."""

    def call_refused(self, caller: Caller, error: BatonError) -> None:
        values = {"tenant": caller.tenant, "front": caller.front, "outcome": error.code}
        log.info("refused", extra=fields(values))

    def call_began(self, record: CallRecord) -> None:
        pass

    def chunk_delivered(self, record: CallRecord, chunk: OutputChunk, now_s: float) -> None:
        pass

    def call_ended(self, record: CallRecord) -> None:
        values = _values(record)
        if record.prompt is not None:
            values["prompt"] = record.prompt
        log.info("call %s", record.call_id, extra=fields(values, is_unlimited=True))


def _values(record: CallRecord) -> dict[str, object]:
    figures = call_figures(record)
    result, transfer = record.results.get(0), figures.transfer
    return {
        "request_id": record.call_id,
        "label": record.label[:_MAX_LABEL],
        "tenant": record.caller.tenant,
        "front": record.caller.front,
        "model": record.model,
        "traceparent": record.traceparent[:_MAX_LABEL],
        "outcome": figures.outcome,
        "is_finished": figures.is_finished,
        "num_samples": record.num_samples,
        "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.cached_tokens,
        "output_tokens": figures.output_tokens,
        "attempts": figures.attempts,
        "prefill_node": result.prefill_node if result else None,
        "decode_node": result.decode_node if result else None,
        "transport": transfer.transport if transfer else None,
        "transfer_bytes": transfer.num_bytes if transfer else 0,
        "ttft_s": _rounded(figures.ttft_s),
        "tpot_s": _rounded(figures.tpot_s[0]) if figures.tpot_s else None,
        "max_gap_s": _rounded(figures.max_gap_s),
        "e2e_s": _rounded(figures.e2e_s),
        "stages_s": {name: _rounded(seconds) for name, seconds in figures.stages.items()},
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)
