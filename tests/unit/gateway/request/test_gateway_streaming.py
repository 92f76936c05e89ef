"""Between session and client: a call's bounded queue, and the table of sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from fakes.clock import FakeEntropy
from fakes.gateway.calls import RanCall
from fakes.gateway.engine_link import FakeLink, FakeRouter, FakeSink, Letters

from baton.core.errors import BatonError, Cancelled, Overloaded
from baton.core.ports import Clock
from baton.core.request.request import FinishReason
from baton.core.request.sampling_params import SamplingParams
from baton.gateway.request.engine_link import EngineOutput
from baton.gateway.request.output_chunk import OutputChunk, RequestResult
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.session_table import SessionTable
from baton.gateway.request.setbacks import SessionLimits
from baton.gateway.validation.validation import ValidatedRequest

RESULT = RequestResult(FinishReason.STOP, None, 1, 2, 0, "p", None, None, 1, 0, ())


async def test_a_reader_that_keeps_up_gets_every_chunk() -> None:
    chunks = RanCall()
    reading = asyncio.create_task(chunks.next())
    await asyncio.sleep(0)
    assert chunks.emit(OutputChunk("a", (1,), 0))
    assert await reading == OutputChunk("a", (1,), 0)


async def test_what_waits_comes_as_one() -> None:
    chunks = RanCall()
    for index in range(3):
        chunks.emit(OutputChunk("abc"[index], (index,), index))
    chunks.emit(OutputChunk("d", (), 3, RESULT))
    assert await chunks.next() == OutputChunk("abcd", (0, 1, 2), 0, RESULT)


async def test_a_chunk_is_pushed_only_while_all_before_is_delivered() -> None:
    chunks = RanCall()
    pushed: list[str] = []
    takes = True

    def push(chunk: OutputChunk) -> bool:
        if takes:
            pushed.append(chunk.text)
        return takes

    chunks.push = push
    chunks.emit(OutputChunk("a", (1,), 0))  # no reader yet: it is queued
    assert (await chunks.next()).text == "a"
    chunks.emit(OutputChunk("b", (2,), 1))  # "a" is being written
    reading = asyncio.create_task(chunks.next())
    await asyncio.sleep(0)
    assert (await reading).text == "b" and not pushed
    reading = asyncio.create_task(chunks.next())
    await asyncio.sleep(0)
    chunks.emit(OutputChunk("c", (3,), 2))
    chunks.emit(OutputChunk("d", (4,), 3))
    assert pushed == ["c", "d"] and not reading.done()
    assert [one.text for one in chunks.delivered] == ["a", "b", *pushed]
    takes = False
    chunks.emit(OutputChunk("e", (5,), 4))
    takes = True
    chunks.emit(OutputChunk("f", (6,), 5))  # after a queued chunk
    assert (await reading).text == "ef"
    reading = asyncio.create_task(chunks.next())
    await asyncio.sleep(0)
    chunks.emit(OutputChunk("g", (7,), 6, RESULT))  # the last chunk is never pushed
    assert (await reading).text == "g" and pushed == ["c", "d"]


async def test_what_waits_long_is_kept_together() -> None:
    chunks = RanCall(num_samples=2, max_tokens=1000)
    for index in range(500):
        for sample in (1, 0):
            assert chunks.emit(OutputChunk(str(index % 10), (index,), index, sample_index=sample))
    assert all(len(waiting) < 40 for waiting in chunks._waiting.values())
    for sample in (1, 0):
        found = await chunks.next()
        assert found.sample_index == sample and found.index == 0
        assert found.token_ids == tuple(range(500))


async def test_a_reader_too_far_behind_gets_no_more() -> None:
    chunks = RanCall(max_tokens=4)
    assert chunks.emit(OutputChunk("", tuple(range(100)), 0)), "one chunk may be of any size"
    assert chunks.emit(OutputChunk("", (1,), 100)), "nobody was asked to read yet"
    await chunks.next()
    assert chunks.emit(OutputChunk("", tuple(range(5)), 101))
    assert not chunks.emit(OutputChunk("", (1,), 106))
    assert chunks.emit(OutputChunk("", (), 106, RESULT)), "the end is never refused"


async def test_the_error_comes_after_what_waits() -> None:
    chunks = RanCall()
    chunks.emit(OutputChunk("a", (1,), 0))
    chunks.fail(Overloaded("x"))
    assert chunks.num_failures == 1
    assert (await chunks.next()).text == "a"
    with pytest.raises(Overloaded):
        await chunks.next()


async def test_a_chunk_is_delivered_when_the_next_is_asked_for() -> None:
    call = RanCall(num_samples=2)
    for sample in (1, 0):
        call.emit(OutputChunk("a", (1,), 0, RESULT, sample))
    found = []
    async for chunk in call.chunks():
        assert call.delivered == found
        found.append(chunk)
        call.client_left()
    assert [one.sample_index for one in found] == [1, 0]
    assert call.delivered == [*found, found[-1]], "a client that leaves has the last, as it may"


class BrokenDetokenizer(Letters):
    is_broken = True

    def step(self, token_id: int) -> str:
        if self.is_broken:
            raise ZeroDivisionError
        return super().step(token_id)


def session(
    name: str,
    step: Callable[[int], str],
    sink: FakeSink,
    deadline_s: float = 60.0,
    max_tokens: int = 2,
    engines: tuple[str, str] = ("p", "d"),
) -> Session:
    clock = Clock()
    prefill, decode = map(FakeLink, engines)
    return Session(
        SessionOutput(
            name,
            ValidatedRequest((1,), SamplingParams(max_tokens=max_tokens), "label"),
            step,
            sink,
            clock,
            0,
        ),
        deadline_s=clock.monotonic_s() + deadline_s,
        router=FakeRouter([prefill], [decode]),
        entropy=FakeEntropy(),
        limits=SessionLimits(),
    )


async def test_a_bug_in_one_session_fails_that_one(caplog: pytest.LogCaptureFixture) -> None:
    table = SessionTable(Clock(), 10)
    sinks = FakeSink(), FakeSink()
    table.start(session("bad", BrokenDetokenizer().step, sinks[0]))
    table.start(session("good", Letters().step, sinks[1]))
    with caplog.at_level(logging.CRITICAL, "baton.gateway.request.session_table"):
        table.engine_step("p", [EngineOutput(name, 0, 0, (97,)) for name in ("bad", "good")])
    assert type(sinks[0].error) is BatonError and "Zero" not in sinks[0].error.message
    assert (sinks[1].text, len(table)) == ("a", 1)


async def test_the_short_way_is_as_careful(caplog: pytest.LogCaptureFixture) -> None:
    table = SessionTable(Clock(), 10)
    sinks = {name: FakeSink() for name in ("bad", "slow", "good")}
    letters = BrokenDetokenizer()
    letters.is_broken = False  # still intact
    for name, sink in sinks.items():
        step = (letters if name == "bad" else Letters()).step
        table.start(session(name, step, sink, max_tokens=9))
    for engine, index in (("p", 0), ("d", 1)):
        table.engine_step(engine, [EngineOutput(name, 0, index, (97,)) for name in sinks])
    letters.is_broken = True
    sinks["slow"].is_full = True
    with caplog.at_level(logging.CRITICAL, "baton.gateway.request.session_table"):
        table.engine_step("d", (), [(name, 0, 2, 98) for name in (*sinks, "nobody's")])
    assert type(sinks["bad"].error) is BatonError
    assert isinstance(sinks["slow"].error, Overloaded)
    assert (sinks["good"].text, len(table)) == ("aab", 1)


async def test_first_tokens_do_not_wait_for_those_of_decodes() -> None:
    """First tokens overtake tokens of decodes: a step has the decodes of many requests, and the end
    of a prompt."""
    table, order = SessionTable(Clock(), 10), list[str]()

    class NotingSink(FakeSink):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def emit(self, chunk: OutputChunk) -> bool:
            order.append(self.name)
            return super().emit(chunk)

    for name in ("decode", "prompt"):
        step = Letters().step
        table.start(session(name, step, NotingSink(name), max_tokens=9, engines=("both", "both")))
    table.engine_step("both", [EngineOutput("decode", 0, 0, (97,))])
    table.engine_step("both", [EngineOutput("prompt", 0, 0, (97,))], [("decode", 0, 1, 98)])
    assert order == ["decode", "prompt", "decode"]


async def test_deadlines_come_by_themselves() -> None:
    table, sink = SessionTable(Clock(), 10), FakeSink()
    table.start(session("r", Letters().step, sink, deadline_s=0.02))
    await asyncio.sleep(0.04)
    assert sink.error is not None and sink.error.code == "deadline_exceeded"
    assert len(table) == 0


async def test_abort_by_id_and_label() -> None:
    table = SessionTable(Clock(), 10)
    sinks = [FakeSink() for _ in range(3)]
    for number, sink in enumerate(sinks):
        table.start(session(f"r{number}", Letters().step, sink))
    assert table.abort(["r0", "", "nobody"]) == 1
    assert table.abort(["label"]) == 2
    assert table.abort(["label", "r0"]) == 0
    assert all(isinstance(sink.error, Cancelled) for sink in sinks)


async def test_admission_is_bounded() -> None:
    table = SessionTable(Clock(), 1)
    await table.is_idle.wait()
    table.admit()
    with pytest.raises(Overloaded):
        table.admit()
    waiting = asyncio.create_task(table.is_idle.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    table.leave()
    await waiting
    table.admit()
