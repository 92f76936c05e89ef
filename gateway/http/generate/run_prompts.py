"""One HTTP request as calls of the front door: one for each prompt, at the same time.

    prompt 0 ── generate ─┐ all accepted? ─► chunks ─┐
    prompt 1 ── generate ─┤   (else none)   chunks ──┼─► on_chunk(prompt, chunk), one at a time
    prompt 2 ── generate ─┘                 chunks ─┘
The first failure ends all. Knows nothing of JSON.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ....core.errors import BatonError
from ....proto.v1 import inference_pb2
from ...admission.front_door import FrontDoor, RunningCall
from ...request.caller import Caller
from ...request.output_chunk import OutputChunk
from ...text.special_tokens import Spans

OnStart = Callable[[Sequence[RunningCall]], Awaitable[None]]
OnChunk = Callable[[int, OutputChunk], Awaitable[None]]
Push = Callable[[OutputChunk], bool]


@dataclass(frozen=True, slots=True)
class PromptsCall:
    """`names`: our names of fields as this client wrote them; `special_at`: see FrontDoor."""

    wire: inference_pb2.GenerateRequest
    names: Mapping[str, str] = field(default_factory=dict)
    special_at: Spans | None = None


@dataclass(frozen=True, slots=True)
class Sender:
    """Who calls, under which name and trace."""

    caller: Caller
    traceparent: str
    tracestate: str


async def run_calls(
    door: FrontDoor,
    calls: Sequence[PromptsCall],
    sender: Sender,
    on_start: OnStart,
    on_chunk: OnChunk,
    push: Push | None = None,
) -> None:
    """Run all to their ends; raises the first error, in the client's words.

    `push`: see front_door.Generation.push_to; of a single prompt's chunks.
    """
    if len(calls) == 1:
        await _run_one(door, calls[0], sender, on_start, on_chunk, push)
        return
    started: dict[int, RunningCall] = {}
    all_accepted = asyncio.Event()
    one_at_a_time = asyncio.Lock()

    async def run(index: int) -> None:
        async def wait_for_all(generations: Sequence[RunningCall]) -> None:
            started[index] = generations[0]
            if len(started) == len(calls):
                await on_start([started[i] for i in range(len(calls))])
                all_accepted.set()
            await all_accepted.wait()

        async def pass_on(_: int, chunk: OutputChunk) -> None:
            async with one_at_a_time:
                await on_chunk(index, chunk)

        await _run_one(door, calls[index], sender, wait_for_all, pass_on)

    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(calls)):
                tasks.create_task(run(index))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _run_one(
    door: FrontDoor,
    call: PromptsCall,
    sender: Sender,
    on_start: OnStart,
    on_chunk: OnChunk,
    push: Push | None = None,
) -> None:
    try:
        async with door.generate(
            call.wire,
            sender.caller,
            traceparent=sender.traceparent,
            tracestate=sender.tracestate,
            special_at=call.special_at,
        ) as generation:
            await on_start([generation])
            if push is not None:
                generation.push_to(push)
            async for chunk in generation.chunks():
                await on_chunk(0, chunk)
    except BatonError as error:
        _rename(error, call.names)
        raise


def _rename(error: BatonError, names: Mapping[str, str]) -> None:
    """Say the field as the client wrote it."""
    for ours, theirs in names.items():
        if error.param is not None and re.match(rf"{re.escape(ours)}(?=\[|\Z)", error.param):
            error.message = re.sub(rf"\b{re.escape(ours)}(?!\w)", theirs, error.message)
            error.param = theirs + error.param.removeprefix(ours)
            return
