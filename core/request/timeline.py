"""The life of a request as timestamped events.

    arrived -> routed -> prefill_queued -> prefill_started -> first_token
                 └-> handoff_queued -> transfer_started -> transfer_ended -> decode_started
                       -> first_decode_ended -> finished | failed | cancelled

`prefill_queued` and `handoff_queued` are when the engine received the request. A request that ends
at its first token has no transfer. Exactly one terminal event, always.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Event(enum.Enum):
    """The steps of a request; a retry repeats those from `routed` on."""

    ARRIVED = "arrived"
    ROUTED = "routed"
    PREFILL_QUEUED = "prefill_queued"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    HANDOFF_QUEUED = "handoff_queued"
    TRANSFER_STARTED = "transfer_started"
    TRANSFER_ENDED = "transfer_ended"
    DECODE_STARTED = "decode_started"
    FIRST_DECODE_ENDED = "first_decode_ended"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({Event.FINISHED, Event.FAILED, Event.CANCELLED})


@dataclass(frozen=True, slots=True)
class Stamp:
    """One event. All stamps of a request use the clock of its gateway."""

    event: Event
    unix_ns: int
    node: str
