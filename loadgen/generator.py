"""One load generator: sends what is due when it is due, whatever has come back so far.

    start_s   due   sent        token token  token           all on this host's monotonic clock
       │       │ lag │   TTFT     │     │      │
Streams of the background, and the workers of a closed loop, send their next request when the one
before it ends. At the end of a run what still runs is cancelled and keeps the tokens that came.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from .driver import Content, Driver, DriverError, TokenUsage
from .records import Record

_EARLY_S = 0.002  # an event loop wakes up a millisecond late: come early and look at the clock
_FAILED_S = 0.01  # a stream that fails at once must not spin


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. `num_prompt_tokens`: as far as it is known before."""

    content: Content
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Load:
    """The requests of a run, and their records so far.

    `is_exact`: a request whose tokens are not as many as were asked for has failed.
    `on_end`: called with each record that is complete.
    """

    driver: Driver
    start_s: float
    is_exact: bool = True
    on_end: Callable[[Record], None] = lambda record: None
    records: list[Record] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.start_s

    async def send_at(self, at_s: float, request: PlannedRequest, group: str) -> None:
        await self._sleep_until(at_s)
        await self._send(group, at_s, request)

    async def one_by_one(
        self, requests: Iterator[PlannedRequest], end_s: float, group: str
    ) -> None:
        """Send the next request when the one before it ends, until `end_s` or the last."""
        await self._sleep_until(0.0)
        while self.now_s < end_s and (one := next(requests, None)) is not None:
            await self._send(group, self.now_s, one)

    async def closed_loop(
        self,
        requests: Iterator[PlannedRequest],
        concurrency: int,
        end_s: float,
        drain_s: float,
        group: str,
    ) -> None:
        """`concurrency` requests at any time until `end_s`, then up to `drain_s` for the last."""
        async with cancelled_at_the_end() as tasks:
            for _ in range(concurrency):
                tasks.append(asyncio.create_task(self.one_by_one(requests, end_s, group)))
            await wait(tasks, _until(end_s + drain_s - self.now_s))

    async def open_loop(
        self, requests: Iterator[PlannedRequest], due_s: Iterator[float], drain_s: float, group: str
    ) -> None:
        """One request at each of `due_s`, then up to `drain_s` for the last."""
        async with cancelled_at_the_end() as tasks:
            for at_s, one in zip(due_s, requests, strict=False):
                await self._sleep_until(at_s)
                tasks.append(asyncio.create_task(self._send(group, at_s, one)))
            await asyncio.sleep(0)  # the last one is sent, and has all of the time
            await wait(tasks, _until(drain_s))

    async def _send(self, group: str, due_s: float, request: PlannedRequest) -> None:
        record = Record(group, due_s, request.num_prompt_tokens, request.num_output_tokens)
        self.records.append(record)
        record.sent_s = self.now_s
        usage = None
        try:
            stream = self.driver.stream(request.content, request.num_output_tokens)
            async with aclosing(stream) as counts:
                async for count in counts:
                    if isinstance(count, TokenUsage):
                        usage = count
                    else:
                        record.token_s += [self.now_s] * count
            if usage is not None:
                record.count_as(usage.num_prompt_tokens, usage.num_output_tokens)
            if not record.token_s:
                record.error = "no tokens"
            elif self.is_exact and len(record.token_s) != request.num_output_tokens:
                record.error = f"{len(record.token_s)} of {request.num_output_tokens} tokens"
        except DriverError as error:
            record.error = str(error)
            await asyncio.sleep(_FAILED_S)
        except asyncio.CancelledError:
            record.is_cut_off = True
            raise
        self.on_end(record)

    async def _sleep_until(self, at_s: float) -> None:
        # A clock is what we wait for.
        while (left_s := at_s - self.now_s) > 0:  # noqa: ASYNC110
            await asyncio.sleep(max(0.0, left_s - _EARLY_S))


@asynccontextmanager
async def cancelled_at_the_end() -> AsyncIterator[list[asyncio.Task[None]]]:
    """Tasks that do not outlive the block. Raises what the first that failed did."""
    tasks: list[asyncio.Task[None]] = []
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError | None):
                raise outcome


async def wait(tasks: Sequence[asyncio.Task[None]], timeout_s: float | None) -> None:
    """For all of them, or one that fails."""
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)


def _until(seconds: float) -> float | None:
    return None if math.isinf(seconds) else max(0.0, seconds)
