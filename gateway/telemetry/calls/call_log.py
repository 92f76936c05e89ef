"""A log line for each call, with --log-json."""

from __future__ import annotations

import logging

from ....core.errors import BatonError
from ....core.process.logs import fields
from ...security.tenancy import Caller
from .call_record import CallRecord
from .ended_call import EndedCall

log = logging.getLogger(__name__)

_MAX_LABEL = 128  # a client's own name of a call
_DIGITS = 6  # of seconds


def log_refused(caller: Caller, error: BatonError) -> None:
    """Of a call that ended before it was routed."""
    values = {"tenant": caller.tenant, "front": caller.front, "outcome": error.code}
    log.info("refused", extra=fields(values))


_LOGGED = (
    *("tenant", "front", "num_samples", "prefill_node", "decode_node"),
    *("outcome", "is_finished", "prompt_tokens", "cached_tokens", "output_tokens", "attempts"),
)
_LOGGED_S = ("ttft_s", "tpot_s", "max_gap_s", "e2e_s")


def log_ended(record: CallRecord, call: EndedCall) -> None:
    """Of a call that is over: who, how much, how long, where, and how it ended. Its prompt's text
    only if the record carries it, and never an error's: that may quote what the client sent."""
    spans = {name: getattr(call, name) for name in _LOGGED_S}
    values = {name: getattr(call, name) for name in _LOGGED} | {
        "request_id": record.call_id,
        "label": record.label[:_MAX_LABEL],
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
