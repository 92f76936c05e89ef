"""What sessions give a call: tokens as chunks of text, and each sample's result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...core.errors import BatonError
from ...core.request.request import FinishReason, TokenLogprobs
from ...core.request.timeline import Stamp
from .engine_link import TransferSummary

OutputToken: TypeAlias = tuple[int, TokenLogprobs | None]  # the second if it was requested


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What is known of a finished request. `decode_node` is None if the prefill node ended it.

    `matched_stop`: the stop string, or the one of `stop_token_ids`, that ended it.
    """

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
    """Where a request that ended badly was last, by what its engines had sent. `is_decoding`: the
    hand-off was over."""

    prefill_node: str
    decode_node: str
    is_decoding: bool
    transfer: TransferSummary | None
    completion_tokens: int
    timeline: tuple[Stamp, ...]


@dataclass(slots=True)  # one a token, and a frozen one takes thrice the time: change none
class OutputChunk:
    """Tokens for the client, from position `index` on; the last one carries the result.

    `logprobs` are parallel to the tokens, if they were requested. `prompt_logprobs`, of the
    prompt's second token and all behind it, come with the first sample's first chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int
    result: RequestResult | None = None
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class ChunkSink(Protocol):
    """What sessions give their chunks to: a call, as admission/running_call.py has it."""

    def emit(self, chunk: OutputChunk) -> bool:
        """False: the client is too far behind to be given any more."""
        ...

    def fail(self, error: BatonError) -> None:
        """Behind what was given before."""


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
