"""What a session has for its client: tokens in pieces, the last one with the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...core.errors import BatonError
from ...core.request.logprobs import TokenLogprobs
from ...core.request.request import FinishReason
from ...core.request.timeline import Stamp
from .engine_link import TransferSummary


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What is known of a finished request. `decode_node` is None if the prefill node ended it."""

    finish_reason: FinishReason
    matched_stop: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_node: str
    decode_node: str | None
    transfer: TransferSummary | None
    attempts: int
    seed: int
    timeline: tuple[Stamp, ...]


@dataclass(slots=True)  # one a token, and a frozen one takes thrice the time: change none
class OutputChunk:
    """Tokens for the client, from position `index` on; the last one carries the result.

    `logprobs` are parallel to the tokens, if they were asked for. `prompt_logprobs`, of the
    prompt's second token and all behind it, come with the first sample's first chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int
    result: RequestResult | None = None
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Sink(Protocol):
    """Where the client's stream begins. It ends by a chunk with a result, or by a failure."""

    def emit(self, chunk: OutputChunk) -> bool:
        """Take a chunk; False if the client is too far behind to be given any more."""
        ...

    def fail(self, error: BatonError) -> None: ...
