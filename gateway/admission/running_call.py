"""A call while it runs: tokens on their way from its sessions to its client, in pieces, in a queue
of those that its stream has not taken yet, bounded by tokens.

    Session.emit ──► [chunk chunk chunk] ──► chunks(): a sample's that wait, as one ──► stream
              └── nothing waits, and the front can write at once ──► push(chunk) ─────────┘
A reader that keeps up gets one chunk per engine step; one that falls behind gets fewer, longer
ones; one that falls `max_tokens` behind gets no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from ...core.errors import BatonError, public_error
from ..request.output_chunk import OutputChunk, merged
from ..telemetry.calls.call_record import CallRecord
from .loop_pacing import LoopPacing

MAX_TOKENS_BEHIND = 256
_MAX_CHUNKS = 32  # of a sample, that wait; more are put together: a chunk is larger than its tokens


class RunningCall:
    """Its samples' ChunkSink: each ends by a chunk with a result, or by a failure. The first
    failure is the call's: with one sample fail all. `chunks` may be iterated once.

    `push`, once it is set, is offered every chunk while all that came before is delivered, but for
    a sample's last: where it has written the chunk to the client it returns True, and then no task
    has to wake for it. `on_delivered` is told of each chunk that the client has; `on_fail` is
    called when the stream must end early; `ends` spaces what is to be done at a sample's end.
    """

    def __init__(
        self,
        record: CallRecord,
        on_delivered: Callable[[CallRecord, OutputChunk], None],
        on_fail: Callable[[], None],
        ends: LoopPacing,
        max_tokens: int = MAX_TOKENS_BEHIND,
    ) -> None:
        self.record = record
        self.push: Callable[[OutputChunk], bool] | None = None
        self.error: BatonError | None = None  # the call's first
        self._on_delivered = on_delivered
        self._on_fail = on_fail
        self._ends = ends
        self._max_tokens = max_tokens
        self._waiting: dict[int, list[OutputChunk]] = {}  # by sample
        self._reader: asyncio.Future[None] | None = None  # waits in `chunks`
        self._is_read = False  # until then nobody can be too slow
        self._last: OutputChunk | None = None  # of all samples, once it is given out

    def emit(self, chunk: OutputChunk) -> bool:
        """Take a chunk; False if the client is too far behind to be given any more. Never refuses a
        sample's only chunk, however long."""
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

    async def chunks(self) -> AsyncIterator[OutputChunk]:
        """What waits of one sample, a chunk at least, until each one's last; the sample that has
        waited longest comes first. Behind all, raises the first error as public_error.

        A chunk counts as delivered when the next is requested.
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
        """The client went away: it may have the call's last chunk before its front knows that it is
        written."""
        if self._last is not None and self._last.sample_index not in self.record.results:
            self._on_delivered(self.record, self._last)
