"""What sessions send to their call: tokens as chunks of text, and the result of each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...core.errors import BatonError
from ...core.request.request import FinishReason, TokenLogprobs
from ...core.request.timeline import Stamp
from .engine_link import TransferSummary

OutputToken: TypeAlias = tuple[int, TokenLogprobs | None]  # the logprobs if requested


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of a finished request. `decode_node` is None if the prefill node finished it;
    `matched_stop`: the stop string, or the one of `stop_token_ids`, that ended it."""

    finish_reason: FinishReason
    matched_stop: int | str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_node: str
    decode_node: str | None
    transfer: TransferSummary | None
    attempts: int
    seed: int
    timeline: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True)
class UnfinishedRun:
    """The last known state of a request that was cancelled or failed. `is_decoding`: the hand-off
    was over."""

    prefill_node: str
    decode_node: str
    is_decoding: bool
    transfer: TransferSummary | None
    completion_tokens: int
    timeline: tuple[Stamp, ...]


@dataclass(slots=True)  # one a token; a frozen one takes three times as long: do not change it
class OutputChunk:
    """Tokens for the client, from position `index` on; the last chunk has the result.

    `logprobs` are parallel to the tokens, if requested. `prompt_logprobs`, of the prompt's tokens
    from the second on, are in the first chunk of the first sample.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int
    result: RequestResult | None = None
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class ChunkSink(Protocol):
    """Where sessions send their chunks: a call (admission/running_call.py)."""

    def emit(self, chunk: OutputChunk) -> bool:
        """False: the client is too far behind to get any more."""
        ...

    def fail(self, error: BatonError) -> None:
        """End with an error, behind the chunks sent before."""


def merged(chunks: list[OutputChunk]) -> OutputChunk:
    """Consecutive chunks of one sample as one."""
    return OutputChunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        index=chunks[0].index,
        result=chunks[-1].result,
        sample_index=chunks[0].sample_index,
        logprobs=tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
        prompt_logprobs=chunks[0].prompt_logprobs,
    )
