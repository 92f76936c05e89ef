"""The measured load of the last seconds: the window's length, and how queued prompts count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.clock import FakeClock
from fakes.gateway.engine_link import FakeLink

from baton.core.membership import Member, Role
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.promises.promise_decider import SPAN_S, LoadMeter, Mix
from baton.proto.v1.node_pb2 import Counters

PERIOD_S = 0.5


class Played:
    """One engine, polled repeatedly; `look` adds that many prompts since the last poll."""

    def __init__(self) -> None:
        member = Member("d", Role.DECODE, "d", "h:1", "demo", "fp", 1 << 17, 16, 1 << 15)
        load = ReportedLoad(0, 0, 0, 1 << 15, 1 << 14, False, frozenset())
        self.engine = LinkedEngine(member, FakeLink("d"), load)
        self.clock, self.meter, self.counters = FakeClock(), LoadMeter(), Counters()

    def look(self, prompts: int, tokens_each: int, outputs: int, waiting: int = 0) -> None:
        self.clock.advance(PERIOD_S)
        self.counters.num_prompts += prompts
        self.counters.num_prompt_tokens += prompts * tokens_each
        self.counters.num_decode_tokens += outputs
        counters = Counters()
        counters.CopyFrom(self.counters)
        self.engine.load = replace(self.engine.load, counters=counters, waiting_tokens=waiting)
        self.meter.look([self.engine], self.clock.monotonic_s())

    def mix(self, queued_tokens: int = 0, ttft_s: float = 1.0) -> Mix:
        found = self.meter.mix([self.engine], queued_tokens, ttft_s)
        assert found is not None
        return found


def test_a_load_that_stays_is_the_mean_of_many_seconds() -> None:
    played = Played()
    for number in range(80):
        played.look(2 if number % 2 else 1, 8000, 500)
    for _ in range(8):  # four seconds of more prompts, within chance
        played.look(2, 8000, 500)
    mix = played.mix()
    assert mix.num_prompts == 52  # over 16 s: 24 polls with 1.5 each, 8 with 2
    assert mix.prompt_tokens_per_s == pytest.approx(52 / 16 * 8000)
    assert mix.output_tokens_per_s == pytest.approx(1000)


def test_decodes_are_as_many_as_now() -> None:
    """The decode rate is that of the last seconds only: decodes last long, so a change in it is not
    due to random arrivals."""
    played = Played()
    for number in range(40):
        played.look(2, 8000, 500 if number < 32 else 400)
    mix = played.mix()
    assert mix.num_prompts == 64 and mix.output_tokens_per_s == pytest.approx(800)


@pytest.mark.parametrize(
    "changed",
    [(8, 256, 500), (2, 1000, 500), (0, 0, 500), (1, 22_000, 500), (2, 8000, 4000)],
    ids=str,
)
def test_a_load_that_changes_is_that_of_the_last_seconds(changed: tuple[int, int, int]) -> None:
    """A significant change resets the window: more prompts, shorter ones, none, fewer longer ones,
    or longer outputs."""
    played = Played()
    for _ in range(40):
        played.look(2, 8000, 500)
    for _ in range(round(SPAN_S / PERIOD_S)):
        played.look(*changed)
    prompts, tokens_each, outputs = changed
    if not prompts:
        assert played.meter.mix([played.engine], 0, 1.0) is None
        return
    mix = played.mix()
    assert mix.num_prompts == prompts * SPAN_S / PERIOD_S
    assert mix.prompt_tokens_per_s == pytest.approx(prompts * tokens_each / PERIOD_S)
    assert mix.output_tokens_per_s == pytest.approx(outputs / PERIOD_S)


def test_what_waits_counts_by_how_it_grows_and_by_what_would_be_late() -> None:
    """Queued tokens count by the queue's growth and by those that would miss the TTFT; a queue that
    comes and goes adds nothing."""
    played = Played()
    for number in range(40):
        played.look(2, 8000, 500, waiting=16_000 if number % 2 else 0)
    per_s = 2 * 8000 / PERIOD_S
    assert played.mix().prompt_tokens_per_s == pytest.approx(per_s, rel=0.05)
    growing = Played()
    for number in range(40):
        growing.look(2, 8000, 500, waiting=500 * number)
    assert growing.mix().prompt_tokens_per_s == pytest.approx(per_s + 1000)
    late = growing.mix(queued_tokens=200_000).prompt_tokens_per_s
    waiting = 500 * 39 + 200_000
    assert late == pytest.approx(per_s + 1000 + (waiting - per_s) / 5.0)
    assert growing.mix(200_000, ttft_s=10.0).prompt_tokens_per_s == pytest.approx(per_s + 1000)
