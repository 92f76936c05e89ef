"""The schemes, each with one thing more than the one before it. What the engine has as a switch is
its switch; what no engine does any more (whole batches, memory set aside for the longest) is a
policy in front of it, which gives it a request only when the scheme would.

    static       a batch of prompts, whole, until its last one ends; then the next batch
    iteration    who ends leaves, who waits joins, at any step (Orca, OSDI'22); each takes
                 contiguous memory for the longest request there can be
    continuous   the same, with memory for its own prompt and max_tokens
    paged        blocks as tokens come (vLLM, SOSP'23); who joins is the engine's own estimate
    chunked      no step has more than a budget of prompt tokens (Sarathi-Serve, OSDI'24)
    prefix       blocks of equal prefixes are computed once (SGLang, NeurIPS'24)
    graphs, overlap   on a GPU: steps replayed from CUDA graphs, and launched one ahead
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.engine.scheduling.admission import OutputLengthEstimator

from .workload import Job


class WorstCase(OutputLengthEstimator):
    """Every output is expected to be as long as it may get."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return max(1, max_tokens - num_generated)


class Watermark(OutputLengthEstimator):
    """No output is expected to grow: whoever fits now, with one token more, is taken."""

    def estimate(self, num_generated: int, max_tokens: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Scheme:
    """`reserves`: contiguous memory of a request that runs, None: blocks. `is_batched`: nobody
    joins a batch that runs. `chunk_tokens` None: prompts are computed whole."""

    name: str
    reserves: str | None = None  # the longest, its own
    is_batched: bool = False
    is_chunked: bool = False
    has_prefix_cache: bool = False
    has_graphs: bool = False
    runs_ahead: bool = False
    estimator: type[OutputLengthEstimator] = OutputLengthEstimator

    def reserved_tokens(self, job: Job, max_len: int) -> int:
        """Slots that are set aside for it while it runs; 0 where blocks are taken as needed."""
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
