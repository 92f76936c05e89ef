"""The outputs of LLM, compatible with vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..core.request.request import TokenLogprobs
from ..gateway.request.output_chunk import OutputChunk
from ..gateway.text.token_text import TokenText
from ..gateway.validation.validation import ValidatedRequest

TokenOf = Callable[[int], TokenText]


@dataclass(frozen=True, slots=True)
class Logprob:
    """`rank` counts from 1; None: the token is not among the likeliest that were requested."""

    logprob: float
    rank: int | None
    decoded_token: str


LogprobsByToken = dict[int, Logprob]  # by token id: the chosen token and the likeliest ones


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. `token_ids` include the EOS or stop token that ended it, `text` does not, except
    for a stop token with `include_stop_str_in_output`.

    `stop_reason`: the stop string or id that matched; None for EOS and for a length.
    `logprobs` and `cumulative_logprob` are None unless log-probabilities were requested.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: list[LogprobsByToken] | None
    finish_reason: str
    stop_reason: int | str | None
    seed: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its samples. `prompt` is None if token ids were given.

    `prompt_logprobs`, if they were requested: None for the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsByToken | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


def request_output(
    call_id: str,
    prompt: str | None,
    request: ValidatedRequest,
    samples: Sequence[OutputChunk],
    token_of: TokenOf,
) -> RequestOutput:
    """`samples`: one chunk per sample, with its whole output and its result."""
    ordered = sorted(samples, key=lambda chunk: chunk.sample_index)
    prompt_ids = request.prompt_token_ids.tolist()
    prompt_logprobs: list[LogprobsByToken | None] | None = None
    if request.sampling.prompt_logprobs is not None:
        scores = zip(prompt_ids[1:], ordered[0].prompt_logprobs, strict=True)
        prompt_logprobs = [None, *(_by_token(i, score, token_of) for i, score in scores)]
    results = [chunk.result for chunk in ordered if chunk.result is not None]
    return RequestOutput(
        call_id,
        prompt,
        prompt_ids,
        prompt_logprobs,
        [_completion(request, chunk, token_of) for chunk in ordered],
        max(result.cached_tokens for result in results),
    )


def _completion(
    request: ValidatedRequest, chunk: OutputChunk, token_of: TokenOf
) -> CompletionOutput:
    result = chunk.result
    assert result is not None, "a sample that ended"
    logprobs = None
    if request.sampling.logprobs is not None:
        pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
        logprobs = [_by_token(token_id, score, token_of) for token_id, score in pairs]
    return CompletionOutput(
        index=chunk.sample_index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        cumulative_logprob=None
        if logprobs is None
        else sum(score.logprob for score in chunk.logprobs),
        logprobs=logprobs,
        finish_reason=result.finish_reason.value,
        stop_reason=result.matched_stop,
        seed=result.seed,
    )


def _by_token(token_id: int, score: TokenLogprobs, token_of: TokenOf) -> LogprobsByToken:
    ranks = {other: rank for rank, (other, _) in enumerate(score.top, 1)}
    logprobs = {token_id: score.logprob} | dict(score.top)
    return {
        other: Logprob(logprob, ranks.get(other), token_of(other).text)
        for other, logprob in logprobs.items()
    }
