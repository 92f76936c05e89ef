"""What is known of one call while it runs and when it is over, and who is told: the observers.

Times are of delivery at the gateway: a chunk counts when its front has written it to the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ....core.errors import BatonError
from ....core.request.request import SamplingParams
from ...request.output_chunk import OutputChunk, RequestResult
from ...security.tenancy import Caller
from .call_values import CallFigures


@dataclass(slots=True)
class CallRecord:
    """One call: a prompt and its samples. Its front fills it; observers only read.

    `token_times` hold, per sample, (monotonic seconds, tokens delivered then) of each delivery.
    `results` are of the samples that finished; `error` is what ended the call otherwise.
    `figures` are what call_figures.py made of it, once. `lookup_s` is what asking the prefix index
    took. `prompt` is kept with --log-prompts alone.
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
    figures: CallFigures | None = None

    @property
    def num_delivered_tokens(self) -> int:
        """Of all samples."""
        return sum(count for times in self.token_times for _, count in times)


class CallObserver(Protocol):
    """Told on the gateway's event loop, so it must be quick. observers.py bears what it raises."""

    def call_refused(self, caller: Caller, error: BatonError) -> None:
        """A call that ended before it was routed: bad, unauthorised, over a limit."""
        ...

    def call_began(self, record: CallRecord) -> None: ...

    def chunk_delivered(self, record: CallRecord, chunk: OutputChunk, now_s: float) -> None:
        """The record's `token_times` have it already. See Observers for who tells of most."""
        ...

    def call_ended(self, record: CallRecord) -> None:
        """Once for each call that began, whatever ended it."""
        ...
