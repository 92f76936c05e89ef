"""What sessions have for their client and the client's stream has not taken yet: bounded by tokens.

    Session.emit ──► [chunk chunk chunk] ──► next(): a sample's that wait, as one chunk ──► stream
A reader that keeps up gets one chunk per engine step; one that falls behind gets fewer, longer
ones; one that falls `max_tokens` behind gets no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.errors import BatonError
from .session import Chunk

MAX_TOKENS_BEHIND = 256


class ChunkQueue:
    """The `Sink` of one call's samples. `on_fail`: called when the stream must end early.

    The first failure is the call's: with one sample fail all.
    """

    def __init__(self, on_fail: Callable[[], None], max_tokens: int = MAX_TOKENS_BEHIND) -> None:
        self._on_fail = on_fail
        self._max_tokens = max_tokens
        self._waiting: list[Chunk] = []
        self._error: BatonError | None = None
        self._has_news = asyncio.Event()

    def emit(self, chunk: Chunk) -> bool:
        """See session.Sink. Never refuses a sample's only chunk, however long."""
        num_behind = sum(
            len(waiting.token_ids)
            for waiting in self._waiting
            if waiting.sample_index == chunk.sample_index
        )
        if num_behind > self._max_tokens and chunk.result is None:
            return False
        self._waiting.append(chunk)
        self._has_news.set()
        return True

    def fail(self, error: BatonError) -> None:
        """See session.Sink. What waits is still delivered before the error."""
        if self._error is None:
            self._error = error
            self._has_news.set()
            self._on_fail()

    async def next(self) -> Chunk:
        """What waits of one sample, a chunk at least; behind all, raises the first error.

        The sample that has waited longest comes first.
        """
        if not self._waiting:
            if self._error is not None:
                raise self._error
            self._has_news.clear()
            await self._has_news.wait()
            return await self.next()
        first = self._waiting[0].sample_index
        chunks = [chunk for chunk in self._waiting if chunk.sample_index == first]
        self._waiting = [chunk for chunk in self._waiting if chunk.sample_index != first]
        return chunks[0] if len(chunks) == 1 else _merged(chunks)

    @property
    def error(self) -> BatonError | None:
        return self._error


def _merged(chunks: list[Chunk]) -> Chunk:
    """Consecutive chunks of one sample as one."""
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        index=chunks[0].index,
        result=chunks[-1].result,
        sample_index=chunks[0].sample_index,
        logprobs=tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
        prompt_logprobs=chunks[0].prompt_logprobs,
    )
