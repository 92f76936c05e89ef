"""One HTTP request as calls of the front door: one for each prompt, at the same time.

    prompt 0 ── generate ─┐ all accepted? ─► chunks ─┐
    prompt 1 ── generate ─┤   (else none)   chunks ──┼─► on_chunk(prompt, chunk), one at a time
    prompt 2 ── generate ─┘                 chunks ─┘
The first failure ends all. Knows nothing of JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager

from ...admission.front_door import RunningCall
from ...request.output_chunk import OutputChunk

Generate = Callable[[int], AbstractAsyncContextManager[RunningCall]]
OnStart = Callable[[Sequence[RunningCall]], Awaitable[None]]
OnChunk = Callable[[int, OutputChunk], Awaitable[None]]
Push = Callable[[OutputChunk], bool]


async def run_prompts(
    generate: Generate, num_prompts: int, on_start: OnStart, on_chunk: OnChunk, push: Push | None
) -> None:
    """Run all to their ends; raises the first error.

    `generate`: FrontDoor.generate of the prompt with this index. `push`: see RunningCall.push_to,
    for the chunks of a single prompt.
    """
    if num_prompts == 1:
        async with generate(0) as call:
            await on_start([call])
            if push is not None:
                call.push_to(push)
            async for chunk in call.chunks():
                await on_chunk(0, chunk)
        return
    started: dict[int, RunningCall] = {}
    all_accepted = asyncio.Event()
    one_at_a_time = asyncio.Lock()

    async def run(index: int) -> None:
        async with generate(index) as call:
            started[index] = call
            if len(started) == num_prompts:
                await on_start([started[i] for i in range(num_prompts)])
                all_accepted.set()
            await all_accepted.wait()
            async for chunk in call.chunks():
                async with one_at_a_time:
                    await on_chunk(index, chunk)

    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(num_prompts):
                tasks.create_task(run(index))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
