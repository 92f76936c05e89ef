"""What is recorded of one call while it runs, and its figures once it is over. Only values.

Times are of delivery at the gateway: a chunk counts when its front has written it to the client.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ....core.errors import BatonError
from ....core.request.request import SamplingParams
from ...request.output_chunk import RequestResult
from ...security.tenancy import Caller


@dataclass(slots=True)
class CallRecord:
    """One call: a prompt and its samples. The front door fills it.

    `token_times` hold, per sample, (monotonic seconds, tokens delivered then) of each delivery.
    `results` are of the samples that finished; `error` is what ended the call otherwise.
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
    ended_s: float | None = None

    @property
    def num_delivered_tokens(self) -> int:
        """Of all samples."""
        return sum(count for times in self.token_times for _, count in times)


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
    result = record.results.get(0)
    return {
        "tenant": record.caller.tenant,
        "front": record.caller.front,
        "num_samples": record.num_samples,
        "prefill_node": result.prefill_node if result else None,
        "decode_node": result.decode_node if result else None,
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
