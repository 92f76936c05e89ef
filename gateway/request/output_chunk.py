"""Tokens on their way from a session to its client: in pieces, in a queue of those that its stream
has not taken yet, bounded by tokens.

    Session.emit ──► [chunk chunk chunk] ──► next(): a sample's that wait, as one chunk ──► stream
              └── nothing waits, and the front can write at once ──► push(chunk) ─────────────┘
A reader that keeps up gets one chunk per engine step; one that falls behind gets fewer, longer
ones; one that falls `max_tokens` behind gets no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...core.errors import BatonError
from ...core.request.request import FinishReason, TokenLogprobs
from ...core.request.timeline import Stamp
from .engine_link import TransferSummary

OutputToken: TypeAlias = tuple[int, TokenLogprobs | None]  # the second if it was requested


MAX_TOKENS_BEHIND = 256
_MAX_CHUNKS = 32  # that wait; more are put together, since a chunk is larger than its tokens


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
    """What sessions give their chunks to; see ChunkQueue."""

    def emit(self, chunk: OutputChunk) -> bool: ...

    def fail(self, error: BatonError) -> None: ...


class ChunkQueue:
    """Of one call's samples: each ends by a chunk with a result, or by a failure. `on_fail`: called
    when the stream must end early.

    The first failure is the call's: with one sample fail all. `push`, once it is set, is offered
    every chunk while all that came before is delivered, but for a sample's last: where it takes the
    chunk it returns True, and then no task has to wake for it.
    """

    def __init__(self, on_fail: Callable[[], None], max_tokens: int = MAX_TOKENS_BEHIND) -> None:
        self.push: Callable[[OutputChunk], bool] | None = None
        self._on_fail = on_fail
        self._max_tokens = max_tokens
        self._waiting: list[OutputChunk] = []
        self.error: BatonError | None = None  # the call's first
        self._reader: asyncio.Future[None] | None = None  # waits in `next`
        self._is_read = False  # until then nobody can be too slow

    def emit(self, chunk: OutputChunk) -> bool:
        """Take a chunk; False if the client is too far behind to be given any more. Never refuses a
        sample's only chunk, however long."""
        if self._waiting:
            num_behind = sum(
                len(waiting.token_ids)
                for waiting in self._waiting
                if waiting.sample_index == chunk.sample_index
            )
            if self._is_read and num_behind > self._max_tokens and chunk.result is None:
                return False
        elif (
            self.push is not None
            and self._reader is not None
            and chunk.result is None
            and self.push(chunk)
        ):
            return True
        self._waiting.append(chunk)
        if len(self._waiting) > _MAX_CHUNKS:
            self._waiting = _by_sample(self._waiting)
        self._wake()
        return True

    def fail(self, error: BatonError) -> None:
        """What waits is still delivered before the error."""
        if self.error is None:
            self.error = error
            self._wake()
            self._on_fail()

    def _wake(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None

    async def next(self) -> OutputChunk:
        """What waits of one sample, a chunk at least; behind all, raises the first error.

        The sample that has waited longest comes first.
        """
        self._is_read = True
        while not self._waiting:
            if self.error is not None:
                raise self.error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if len(self._waiting) > 1:
            self._waiting = _by_sample(self._waiting)
        return self._waiting.pop(0)


def _by_sample(chunks: list[OutputChunk]) -> list[OutputChunk]:
    """One chunk for each sample, in the order of their first ones."""
    found: dict[int, list[OutputChunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.sample_index, []).append(chunk)
    return [merged(of_one) if len(of_one) > 1 else of_one[0] for of_one in found.values()]


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
