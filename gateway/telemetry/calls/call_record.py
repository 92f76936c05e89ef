"""What is recorded of one call while it runs; ended_call.py has what is known once it is over.

Times are of delivery at the gateway: a chunk counts when its front has written it to the client. A
delivery of several tokens is one point in time: the tokens behind its first have no gap of their
own, so a client that reads slowly does not make the gaps look small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

from ....core.errors import BatonError
from ....core.request.request import SamplingParams
from ...request.output_chunk import RequestResult, UnfinishedRun
from ...security.tenancy import Caller


@dataclass(slots=True)
class CallRecord:
    """One call: a prompt and its samples. The front door fills it.

    `token_times` hold, per sample, (monotonic seconds, tokens delivered then) of each delivery.
    `results` are of the samples that finished; `error` is what ended the call otherwise, and
    `unfinished_run` where its first sample was then.
    `num_computed_tokens` are of all samples, those that `best_of` left out too.
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
    unfinished_run: UnfinishedRun | None = None
    num_computed_tokens: int = 0
    ended_s: float | None = None

    @property
    def run(self) -> RequestResult | UnfinishedRun | None:
        """Of the first sample; None: no engine had it."""
        return self.results.get(0) or self.unfinished_run

    @property
    def num_delivered_tokens(self) -> int:
        """Of all samples."""
        return sum(map(_num_tokens, self.token_times))

    @property
    def first_tokens_s(self) -> list[float]:
        """When each sample's first token was delivered, of those that had one."""
        return [times[0][0] for times in self.token_times if times]

    @property
    def tpots_s(self) -> list[float]:
        """Of each sample with two tokens at least."""
        return [tpot_s for tpot_s in map(_tpot_s, self.token_times) if tpot_s is not None]

    @property
    def end_s(self) -> float:
        """Of a call that is over."""
        assert self.ended_s is not None, "the call still runs"
        return self.ended_s

    def unix_ns(self, at_s: float) -> int:
        """A moment of the monotonic clock on the wall clock."""
        return self.arrived_unix_ns + round((at_s - self.arrived_s) * 1e9)


def _num_tokens(times: list[tuple[float, int]]) -> int:
    return sum(map(itemgetter(1), times))


def _tpot_s(times: list[tuple[float, int]]) -> float | None:
    """(last - first token) / (tokens - 1), as core/metrics.py has it; None below two tokens."""
    num_tokens = _num_tokens(times)
    return (times[-1][0] - times[0][0]) / (num_tokens - 1) if num_tokens > 1 else None
