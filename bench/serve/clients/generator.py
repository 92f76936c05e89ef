"""One load generator of a mix: sends each request when it is due, and keeps background streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence

from baton.core.process.collector import settle
from baton.loadgen.driver import Driver
from baton.loadgen.generator import Load, PlannedRequest, cancelled_at_the_end, wait
from baton.loadgen.records import Record

from .arrivals import BACKGROUND, Arrival, Background


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
    """Send `arrivals` and keep the background's `streams` running; returns the records of all.

    `start_s` is on the monotonic clock. Requests that were due get up to `drain_s` after the end.
    """
    load = Load(driver, start_s)
    asked = [_of_prompt(arrival, vocab_size) for arrival in arrivals]
    unsettle = settle()  # collecting all drawn prompts as garbage would be a pause in the samples
    try:
        async with cancelled_at_the_end() as tasks:
            tasks += [
                asyncio.create_task(load.send_at(arrival.at_s, one, arrival.group))
                for arrival, one in zip(arrivals, asked, strict=True)
            ]
            due = list(tasks)
            if background is not None:
                again = (_of_stream(background, stream, vocab_size) for stream in streams)
                tasks += [
                    asyncio.create_task(load.one_by_one(one, duration_s, BACKGROUND))
                    for one in again
                ]
            await asyncio.sleep(max(0.0, start_s + duration_s - time.monotonic()))
            await wait(due, drain_s)
    finally:
        unsettle()
    return load.records


def _of_prompt(arrival: Arrival, vocab_size: int) -> PlannedRequest:
    token_ids = arrival.prompt.token_ids(vocab_size)
    return PlannedRequest(token_ids, len(token_ids), arrival.num_output_tokens)


def _of_stream(background: Background, stream: int, vocab_size: int) -> Iterator[PlannedRequest]:
    token_ids = background.prompt(stream).token_ids(vocab_size)
    num_tokens = background.first_output_tokens(stream)
    while True:
        yield PlannedRequest(token_ids, len(token_ids), num_tokens)
        num_tokens = background.num_output_tokens
