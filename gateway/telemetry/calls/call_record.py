"""The record of one call while it runs.

Times are those of delivery at the gateway: when its front has written a chunk to the client. A
delivery of several tokens is one point in time: only its first token has a gap, so that a client
that reads slowly does not make the gaps look small. What follows from them once the call has ended
is in ended_call.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

from ....core.errors import BatonError
from ...request.output_chunk import RequestResult, UnfinishedRun
from ...security.caller import Caller
from ...validation.validation import ValidatedRequest


@dataclass(slots=True)
class CallRecord:
    """One call: a prompt and its samples. The front door and the feed fill it in.

    `token_times`: per sample, (monotonic seconds, tokens) of each delivery. `results`: by index, of
    the samples that finished; else `error` is what ended the call, and `unfinished_run` the state
    of its first sample then. `num_computed_tokens`: of all samples, including those that `best_of`
    left out. `lookup_s`: duration of the look-up in the prefix index. `prompt`: only with
    --log-prompts. `ended_s`: set when it has ended.
    """

    call_id: str
    request: ValidatedRequest
    caller: Caller
    model: str
    arrived_s: float
    arrived_unix_ns: int
    traceparent: str = ""
    tracestate: str = ""
    lookup_s: float = 0.0
    prompt: str | None = None
    token_times: list[list[tuple[float, int]]] = field(default_factory=list)
    results: dict[int, RequestResult] = field(default_factory=dict)
    error: BatonError | None = None
    unfinished_run: UnfinishedRun | None = None
    num_computed_tokens: int = 0
    ended_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def run(self) -> RequestResult | UnfinishedRun | None:
        """The run of the first sample; None: it was never dispatched."""
        return self.results.get(0) or self.unfinished_run

    @property
    def num_delivered_tokens(self) -> int:
        """Tokens of all samples that the client has."""
        return sum(map(_num_tokens, self.token_times))

    @property
    def first_tokens_s(self) -> list[float]:
        """When the first token of each sample was delivered, without samples that had none."""
        return [times[0][0] for times in self.token_times if times]

    @property
    def tpots_s(self) -> list[float]:
        """Time per output token, of each sample with at least two tokens."""
        return [tpot_s for tpot_s in map(_tpot_s, self.token_times) if tpot_s is not None]

    def unix_ns(self, at_s: float) -> int:
        """Converts a time of the monotonic clock to the wall clock."""
        return self.arrived_unix_ns + round((at_s - self.arrived_s) * 1e9)


def _num_tokens(times: list[tuple[float, int]]) -> int:
    return sum(map(itemgetter(1), times))


def _tpot_s(times: list[tuple[float, int]]) -> float | None:
    """(last - first token) / (tokens - 1), as in core/metrics.py; None below two tokens."""
    num_tokens = _num_tokens(times)
    return (times[-1][0] - times[0][0]) / (num_tokens - 1) if num_tokens > 1 else None
