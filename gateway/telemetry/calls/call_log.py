"""One log line for each call that is over: who, how much, how long, where, and how it ended.

Never a prompt's text unless the record carries it (--log-prompts), and never an error's message:
that may quote what the client sent.
"""

from __future__ import annotations

import logging

from ....core.errors import BatonError
from ....core.process.logs import fields
from ...security.tenancy import Caller
from .call_record import CallFigures, CallRecord, description

log = logging.getLogger(__name__)

_MAX_LABEL = 128  # a client's own name of a call
_DIGITS = 6  # of seconds


def log_refused(caller: Caller, error: BatonError) -> None:
    """Of a call that ended before it was routed."""
    values = {"tenant": caller.tenant, "front": caller.front, "outcome": error.code}
    log.info("refused", extra=fields(values))


def log_ended(record: CallRecord, figures: CallFigures) -> None:
    """Of a call that is over."""
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
