"""Calls that arrive together are processed one by one, with other work of the event loop in
between.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from baton.gateway.admission.loop_pacing import LoopPacing


async def test_who_comes_alone_does_not_wait() -> None:
    turns = LoopPacing()
    for _ in range(3):
        taking = turns.take()
        with pytest.raises(StopIteration):
            taking.send(None)
        await asyncio.sleep(0.01)


async def test_in_order_and_apart() -> None:
    turns, now = LoopPacing(), 0
    began: list[tuple[int, int]] = []

    async def call(number: int) -> None:
        await turns.take()
        began.append((number, now))

    calls = [asyncio.create_task(call(number)) for number in range(5)]
    while not all(task.done() for task in calls):
        now += 1
        await asyncio.sleep(0)
    assert [number for number, _ in began] == list(range(5))
    moments = [moment for _, moment in began]
    assert all(later - former >= 3 for former, later in pairwise(moments))


async def test_those_that_have_begun_and_those_that_come_go_on_by_turns() -> None:
    turns = LoopPacing()
    began: list[str] = []

    async def call(name: str) -> None:
        await turns.take(has_begun=name.isupper())
        began.append(name)

    await turns.take()
    await asyncio.gather(*map(call, "abcABC"))
    assert "".join(began) == "aAbBcC"


async def test_who_gave_up_has_no_turn() -> None:
    turns = LoopPacing()
    await turns.take()
    gone, stays = (asyncio.create_task(turns.take()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(stays, 1.0)
    assert gone.cancelled()
