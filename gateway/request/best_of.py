"""`best_of` without beams: more samples are generated than returned. All are kept until they have
ended; then the likeliest are sent, in that order, each as one chunk.
"""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import BatonError
from ..validation.validation import ValidatedRequest
from .output_chunk import ChunkSink, OutputChunk, merged


def best_of(request: ValidatedRequest, sink: ChunkSink) -> tuple[ValidatedRequest, ChunkSink]:
    """The request and the sink for the sessions of a call that generates spare samples."""
    sampling = request.sampling
    sink = BestOf(
        sink, request.num_samples, request.options.n, shows_logprobs=sampling.logprobs is not None
    )
    return replace(request, sampling=replace(sampling, logprobs=sampling.logprobs or 0)), sink


class BestOf:
    """Between `num_samples` sessions and the sink of their call. `shows_logprobs`: whether the
    client requested them; samples are compared by them in any case."""

    def __init__(self, sink: ChunkSink, num_samples: int, n: int, *, shows_logprobs: bool) -> None:
        self._sink = sink
        self._n = n
        self._shows_logprobs = shows_logprobs
        self._parts: list[list[OutputChunk]] = [[] for _ in range(num_samples)]
        self._num_open = num_samples

    def emit(self, chunk: OutputChunk) -> bool:
        """Keep the chunk; with the last chunk of the last sample the best are sent. Always True."""
        self._parts[chunk.sample_index].append(chunk)
        self._num_open -= chunk.result is not None
        if not self._num_open:
            self._send_best([merged(chunks) for chunks in self._parts])
        return True

    def fail(self, error: BatonError) -> None:
        """If one sample fails, all fail."""
        self._sink.fail(error)

    def _send_best(self, samples: list[OutputChunk]) -> None:
        prompt_logprobs = samples[0].prompt_logprobs
        best = sorted(samples, key=_cumulative_logprob, reverse=True)[: self._n]
        for index, sample in enumerate(best):
            sample = replace(
                sample,
                sample_index=index,
                logprobs=sample.logprobs if self._shows_logprobs else (),
                prompt_logprobs=prompt_logprobs if index == 0 else (),
            )
            self._sink.emit(sample)


def _cumulative_logprob(sample: OutputChunk) -> float:
    return sum(token.logprob for token in sample.logprobs)
