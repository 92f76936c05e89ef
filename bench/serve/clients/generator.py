"""One load generator: sends what is due when it is due, whatever has come back so far.

    start_s   due   sent        token token  token           all on this host's monotonic clock
       │       │ lag │   TTFT     │     │      │
Streams of the background begin anew when they end, until the run is over. At its end what still
runs is cancelled and keeps the tokens that came.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from .arrivals import Arrival, Prompt
from .driver import Driver, DriverError
from .records import Record
from .workloads import BACKGROUND, Background

_EARLY_S = 0.002  # an event loop wakes up a millisecond late: come early and look at the clock


async def run(
    driver: Driver,
    arrivals: Sequence[Arrival],
    streams: Iterable[int],
    background: Background | None,
    *,
    start_s: float,
    duration_s: float,
    drain_s: float,
    vocab_size: int,
) -> list[Record]:
    """Send `arrivals` and keep the background's `streams` running; the records of all.

    `start_s` is on the monotonic clock. Requests that were due get up to `drain_s` behind the end.
    """
    run = _Run(driver, start_s, start_s + duration_s)
    prompts = [arrival.prompt.token_ids(vocab_size) for arrival in arrivals]
    gc.collect()
    gc.freeze()  # a collection of all that was drawn would be a pause among the samples
    tasks = [
        asyncio.create_task(run.arrival(arrival, prompt))
        for arrival, prompt in zip(arrivals, prompts, strict=True)
    ]
    around = []
    if background is not None:
        around = [
            asyncio.create_task(run.keep_running(background, stream, vocab_size))
            for stream in streams
        ]
    await asyncio.sleep(max(0.0, start_s + duration_s - time.monotonic()))
    if tasks:
        await asyncio.wait(tasks, timeout=drain_s)
    for task in (*tasks, *around):
        task.cancel()
    await asyncio.gather(*tasks, *around, return_exceptions=True)
    gc.unfreeze()
    return run.records


class _Run:
    """The records so far, and the clock that they are on."""

    def __init__(self, driver: Driver, start_s: float, end_s: float) -> None:
        self._driver = driver
        self._start_s = start_s
        self._end_s = end_s
        self.records: list[Record] = []

    async def arrival(self, arrival: Arrival, prompt_ids: Sequence[int]) -> None:
        due_s = self._start_s + arrival.at_s
        await _sleep_until(due_s)
        await self._request(arrival.group, due_s, prompt_ids, arrival.num_output_tokens)

    async def keep_running(self, background: Background, stream: int, vocab_size: int) -> None:
        prompt: Prompt = background.prompt(stream)
        prompt_ids = prompt.token_ids(vocab_size)
        num_tokens = background.first_output_tokens(stream)
        await _sleep_until(self._start_s)
        while time.monotonic() < self._end_s:
            await self._request(BACKGROUND, time.monotonic(), prompt_ids, num_tokens)
            num_tokens = background.num_output_tokens

    async def _request(
        self, group: str, due_s: float, prompt_ids: Sequence[int], num_tokens: int
    ) -> None:
        record = Record(group, due_s - self._start_s, len(prompt_ids), num_tokens)
        self.records.append(record)
        record.sent_s = time.monotonic() - self._start_s
        try:
            async with aclosing(self._driver.stream(prompt_ids, num_tokens)) as counts:
                async for count in counts:
                    now_s = time.monotonic() - self._start_s
                    record.token_s += [now_s] * count
            if len(record.token_s) != num_tokens:
                record.error = f"{len(record.token_s)} of {num_tokens} tokens"
        except DriverError as error:
            record.error = str(error)
            await asyncio.sleep(0.01)  # a stream that fails at once must not spin


async def _sleep_until(at_s: float) -> None:
    # A clock is what we wait for.
    while (left_s := at_s - time.monotonic()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(max(0.0, left_s - _EARLY_S))
