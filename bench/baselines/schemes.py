"""The schemes, each with one feature more than the one before. Features that the engine can switch
are its switches; those that no modern engine has (static batches, memory reserved for the longest
output) are a policy in front of it, which adds a request only when the scheme would admit it.

    static       a batch of whole prompts runs until its last request ends; then the next batch
    iteration    requests join and leave at any step (Orca, OSDI'22); each reserves contiguous
                 memory for the longest possible request
    continuous   the same, with memory for its own prompt and max_tokens
    paged        blocks as tokens arrive (vLLM, SOSP'23); admission by the engine's own estimate
    chunked      no step exceeds a budget of prompt tokens (Sarathi-Serve, OSDI'24)
    prefix       blocks of equal prefixes are computed once (SGLang, NeurIPS'24)
    graphs, overlap   on a GPU: steps replayed from CUDA graphs, and launched one ahead
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.engine.scheduling.admission import OutputLengthEstimator

from .workload import Job


class WorstCase(OutputLengthEstimator):
    """Expects every output to reach its max_tokens."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return max(1, max_tokens - num_generated)


class Watermark(OutputLengthEstimator):
    """Expects no output to grow: admits a request that fits now with one token more."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Scheme:
    """`reserves`: the contiguous memory of a running request, None: blocks on demand. `is_batched`:
    no request joins a running batch. `is_chunked` False: prompts are computed whole."""

    name: str
    reserves: str | None = None  # "longest" or "own"
    is_batched: bool = False
    is_chunked: bool = False
    has_prefix_cache: bool = False
    has_graphs: bool = False
    runs_ahead: bool = False
    estimator: type[OutputLengthEstimator] = OutputLengthEstimator

    def reserved_tokens(self, job: Job, max_len: int) -> int:
        """Slots reserved for the job while it runs; 0 if blocks are allocated on demand."""
        if self.reserves is None:
            return 0
        return max_len if self.reserves == "longest" else job.num_prompt + _max_tokens(job)


def _max_tokens(job: Job) -> int:
    return job.request.sampling.max_tokens


SCHEMES: Sequence[Scheme] = (
    Scheme("static batches", reserves="longest", is_batched=True),
    Scheme("iteration-level", reserves="longest"),
    Scheme("continuous, own length", reserves="own"),
    Scheme("+ paging"),
    Scheme("+ chunked prefill", is_chunked=True),
    Scheme("+ prefix cache", is_chunked=True, has_prefix_cache=True),
)
ON_GPUS: Sequence[Scheme] = (
    Scheme("+ CUDA graphs", is_chunked=True, has_prefix_cache=True, has_graphs=True),
    Scheme("+ overlap", is_chunked=True, has_prefix_cache=True, has_graphs=True, runs_ahead=True),
)
ADMISSIONS: Sequence[Scheme] = tuple(
    replace(ON_GPUS[-1], name=name, estimator=estimator)
    for name, estimator in (
        ("worst case", WorstCase),
        ("watermark", Watermark),
        ("estimated peak", OutputLengthEstimator),
    )
)
