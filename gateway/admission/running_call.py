"""A running call: the bounded queue of chunks between its sessions and its client's stream.

    Session.emit ──► [chunk chunk chunk] ──► chunks(): a sample's queued chunks, merged ──► stream
              └── queue is empty and the front can write at once ──► push(chunk) ─────────────┘
A client that keeps up gets one chunk per engine step. One that falls behind gets fewer, longer
chunks; one that falls `max_tokens` behind gets no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from ...core.errors import BatonError, public_error
from ..request.output_chunk import OutputChunk, merged
from ..telemetry.calls.call_record import CallRecord
from .loop_pacing import LoopPacing

MAX_TOKENS_BEHIND = 256
_MAX_CHUNKS = 32  # queued of a sample; more are merged, as a chunk is larger than its tokens


@dataclass(eq=False)
class RunningCall:
    """The ChunkSink of a call's samples. A sample ends with a chunk that has a result, or with a
    failure; the first failure fails the whole call. `chunks` may be iterated once.

    `push`, once set, is called with a chunk, except a sample's last, when all before it are
    delivered: True if it has written it to the client, so that no task needs to wake for it.
    `_on_fail` is called when the stream must end early; `_ends` spaces the ends of samples.
    """

    record: CallRecord
    _on_delivered: Callable[[CallRecord, OutputChunk], None]
    _on_fail: Callable[[], None]
    _ends: LoopPacing
    _max_tokens: int = MAX_TOKENS_BEHIND
    push: Callable[[OutputChunk], bool] | None = None
    error: BatonError | None = None  # the first of the call
    _waiting: dict[int, list[OutputChunk]] = field(default_factory=dict)  # by sample
    _reader: asyncio.Future[None] | None = None  # set while `chunks` waits
    _is_read: bool = False  # before that no client is too slow
    _last: OutputChunk | None = None  # the call's last chunk, once it is yielded

    def emit(self, chunk: OutputChunk) -> bool:
        """Queue or push a chunk; False if the client is too far behind. A sample's only chunk is
        always accepted, however long."""
        is_last = chunk.result is not None
        if (
            self.push is not None
            and self._reader is not None
            and not (self._waiting or is_last)
            and self.push(chunk)
        ):
            self._on_delivered(self.record, chunk)
            return True
        waiting = self._waiting.setdefault(chunk.sample_index, [])
        if waiting and self._is_read and not is_last:
            num_behind = sum(len(queued.token_ids) for queued in waiting)
            if num_behind > self._max_tokens:
                return False
        waiting.append(chunk)
        if len(waiting) > _MAX_CHUNKS:
            waiting[:] = [merged(waiting)]
        self._wake()
        return True

    def fail(self, error: BatonError) -> None:
        """Queued chunks are still delivered before the error."""
        if self.error is None:
            self.error = error
            self._wake()
            self._on_fail()

    def _wake(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None

    async def chunks(self) -> AsyncIterator[OutputChunk]:
        """Yield one sample's queued chunks, merged, until the last chunk of each sample; the sample
        that has waited longest comes first. Then raises the first error, if any, as public_error.

        A chunk counts as delivered when the next one is requested.
        """
        self._is_read = True
        num_open = self.record.request.options.n
        while num_open:
            while not self._waiting:
                if self.error is not None:
                    raise public_error(self.error) from self.error
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            waiting = self._waiting.pop(next(iter(self._waiting)))
            chunk = merged(waiting) if len(waiting) > 1 else waiting[0]
            if chunk.result is not None:
                await self._ends.take()
                num_open -= 1
                self._last = None if num_open else chunk
            yield chunk
            self._on_delivered(self.record, chunk)

    def client_left(self) -> None:
        """The client closed the stream. It may have received the call's last chunk before the front
        knows that the write is done."""
        if self._last is not None and self._last.sample_index not in self.record.results:
            self._on_delivered(self.record, self._last)
