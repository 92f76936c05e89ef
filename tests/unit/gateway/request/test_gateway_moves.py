"""A running request that moves from one engine to another: by hand, and in every order of both
engines' messages. In all cases the client receives the tokens of one engine, each once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.clock import FakeClock, FakeEntropy
from fakes.gateway.engine_link import FakeLink, FakeRouter, FakeSink, Letters, Work
from fakes.gateway.step_outputs import give
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import EngineFailed, PromiseRefused
from baton.core.request.request import FinishReason, TokenLogprobs
from baton.core.request.sampling_params import RequestOptions, SamplingParams
from baton.gateway.moves.mover import begin_move, movable_from
from baton.gateway.request.engine_link import EngineOutput, Route
from baton.gateway.request.move import (
    CATCH_UP_S,
    LIMIT_S,
    MOST_BEHIND,
    MOVE_EVERY_S,
)
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.setbacks import SessionLimits, engine_lost
from baton.gateway.validation.validation import ValidatedRequest

TEXT = "abcdefghijklmnopqrstuvwxyz"
PROMPT = (1, 2, 3)


class Rig:
    """One session on engine `a`; its engines send the next letters of TEXT."""

    def __init__(self, num_streamed: int = 4, max_tokens: int = 20, **sampling: Any) -> None:
        self.clock = FakeClock()
        self.sink = FakeSink()
        self.links = {name: FakeLink(name) for name in "abc"}
        self.router = FakeRouter([self.links["a"]], [self.links["a"]])
        self.max_tokens = max_tokens
        params = SamplingParams(max_tokens=max_tokens, seed=9, **sampling)
        self.session = Session(
            SessionOutput(
                "r",
                ValidatedRequest(PROMPT, params, "label"),
                Letters().step,
                self.sink,
                self.clock,
                self.clock.unix_ns(),
            ),
            deadline_s=60.0,
            router=self.router,
            entropy=FakeEntropy(),
            limits=SessionLimits(max_attempts=3, settle_s=0.0),
        )
        self.session.try_dispatch()
        self.sent = {("a", 0): 0}  # tokens sent by each attempt
        self.ends: list[str] = []
        for _ in range(num_streamed):
            self.step("a")

    def attempt_at(self, name: str) -> tuple[str, int]:
        """The newest dispatch to this engine."""
        request = self.links[name].dispatched[-1][0]
        key = name, request.attempt
        self.sent.setdefault(key, len(request.output_token_ids))
        return key

    def step(self, name: str, wrong: str = "") -> None:
        """Send the engine's next token, with the finish reason if it is the last."""
        key = self.attempt_at(name)
        index = self.sent[key]
        if index < self.max_tokens:
            self.sent[key] += 1
            is_last = index + 1 == self.max_tokens
            reason = FinishReason.LENGTH if is_last else None
            token_ids = (ord(wrong or TEXT[index]),)
            output = EngineOutput("r", key[1], index, token_ids, reason)
            give(self.session, name, output)

    def fail(self, name: str, error: Exception) -> None:
        give(self.session, name, EngineOutput("r", self.attempt_at(name)[1], error=error))

    def move(self, to: str = "b") -> None:
        route = Route(self.links[to], self.links[to])
        begin_move(self.session, route, self.clock.monotonic_s(), self.ends.append)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.session.tick()

    @property
    def movable_from(self) -> str | None:
        return movable_from(self.session, self.clock.monotonic_s())

    @property
    def is_on(self) -> str | None:
        attempt = self.session.attempt
        return None if attempt is None else attempt.pair[1]


def test_the_stream_goes_on_where_the_new_engine_has_confirmed_it() -> None:
    rig = Rig()
    rig.move()
    ((request, work, ticket, _),) = rig.links["b"].dispatched
    assert (work, ticket, request.attempt, request.may_refuse) == (Work.LOCAL, None, 1, True)
    assert bytes(request.output_token_ids) == b"abcd"
    rig.step("a")
    rig.step("a")
    rig.step("b")  # e is confirmed
    rig.step("a")  # g is held back
    assert (rig.sink.text, rig.is_on) == ("abcdef", "a")
    rig.step("b")  # f is confirmed: `b` leads from here on
    assert (rig.is_on, rig.links["a"].cancelled, rig.ends) == ("b", [0], ["moved"])
    rig.step("a")  # late
    assert rig.sink.text == "abcdef"
    while not rig.sink.is_over:
        rig.step("b")
    assert rig.sink.text == TEXT[:20]
    assert rig.sink.last is not None and rig.sink.last.result is not None
    result = rig.sink.last.result
    assert (result.attempts, result.decode_node, result.completion_tokens) == (1, "node-b", 20)
    assert not rig.links["b"].cancelled


def test_its_first_token_may_be_new() -> None:
    rig = Rig()
    rig.move()
    rig.step("b")
    assert (rig.sink.text, rig.is_on, rig.ends) == ("abcde", "b", ["moved"])


def test_far_behind_there_is_another_round_and_no_fourth() -> None:
    rig = Rig()
    rig.move()
    for num_rounds in (1, 2, 3):
        assert len(rig.links["b"].dispatched) == num_rounds
        for _ in range(MOST_BEHIND + 2):
            rig.step("a")
        rig.step("b")
    assert rig.links["b"].cancelled == [1, 2, 3]
    assert (rig.is_on, rig.ends, rig.sink.text) == ("a", ["late"], TEXT[:16])
    dispatched = [len(one[0].output_token_ids) for one in rig.links["b"].dispatched]
    assert dispatched == [4, 8, 12]


@pytest.mark.parametrize(
    ("error", "how"), [(PromiseRefused("no"), "refused"), (EngineFailed("oh"), "failed")]
)
def test_a_move_that_fails_changes_nothing(error: Exception, how: str) -> None:
    rig = Rig()
    rig.move()
    rig.step("a")
    rig.fail("b", error)
    assert (rig.is_on, rig.ends, rig.links["a"].cancelled) == ("a", [how], [])
    assert rig.movable_from is None
    rig.clock.advance(MOVE_EVERY_S)
    assert rig.movable_from is None, "after a failure the pause is twice as long"
    rig.clock.advance(MOVE_EVERY_S)
    assert rig.movable_from == "a"


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_was_kept_back_is_streamed_if_the_new_engine_hangs_or_differs(is_wrong: bool) -> None:
    rig = Rig()
    rig.move()
    for name in "aaba":
        rig.step(name)
    assert rig.sink.text == "abcdef"
    rig.step("b", wrong="?") if is_wrong else rig.wait(CATCH_UP_S)
    assert (rig.sink.text, rig.is_on) == ("abcdefg", "a")
    assert rig.ends == ([] if is_wrong else ["late"])
    assert rig.links["b"].cancelled == [1]


@pytest.mark.parametrize("num_wrong", [1, 2, 3])
def test_where_a_token_differs_there_is_another_round_and_no_fourth(num_wrong: int) -> None:
    rig = Rig()
    rig.move()
    for _ in range(num_wrong):
        rig.step("a")
        rig.step("b", wrong="?")
    is_over = num_wrong == 3
    dispatched = [len(one[0].output_token_ids) for one in rig.links["b"].dispatched]
    assert dispatched == [4, 5, 6, 7][: 3 if is_over else num_wrong + 1]
    assert rig.session.next_wakeup_s == (60.0 if is_over else LIMIT_S)
    if is_over:
        assert (rig.is_on, rig.ends) == ("a", ["differs"])
    else:
        rig.step("b")
        assert (rig.is_on, rig.ends) == ("b", ["moved"])
    while not rig.sink.is_over:
        rig.step(rig.is_on or "")
    assert rig.sink.text == TEXT[:20]


def test_what_was_kept_back_may_end_the_request() -> None:
    rig = Rig(stop=("g",))
    rig.move()
    for name in "aaba":
        rig.step(name)
    rig.step("b", wrong="?")
    assert (rig.sink.text, rig.sink.finish_reason) == ("abcdef", FinishReason.STOP)
    assert (rig.ends, len(rig.links["b"].dispatched)) == (["ended"], 1)


def test_a_new_engine_that_is_silent_is_given_up() -> None:
    rig = Rig()
    rig.move()
    assert rig.session.next_wakeup_s <= LIMIT_S
    rig.wait(LIMIT_S)
    assert (rig.is_on, rig.ends, rig.links["b"].cancelled) == ("a", ["late"], [1])


@pytest.mark.parametrize("steps", ["", "a", "aab", "aaba"])
def test_the_old_engine_is_lost_and_the_new_one_goes_on(steps: str) -> None:
    rig = Rig()
    rig.move()
    for name in steps:
        rig.step(name)
    num_streamed = len(rig.sink.token_ids)
    engine_lost(rig.session, "a")
    assert (rig.is_on, len(rig.sink.token_ids)) == ("b", num_streamed)
    while not rig.sink.is_over:
        rig.step("b")
    assert (rig.sink.text, rig.ends) == (TEXT[:20], ["moved"])
    assert rig.sink.last is not None and rig.sink.last.result is not None
    assert rig.sink.last.result.attempts == 2, "it counts as the retry"


def test_an_engine_that_died_under_it_makes_it_a_suspect_that_is_tried_alone() -> None:
    rig = Rig()
    rig.move()
    rig.router.prefill = rig.router.decode = [rig.links["c"]]
    engine_lost(rig.session, "a", has_died=True)
    rig.wait(0.01)
    assert (rig.is_on, rig.ends, rig.links["b"].cancelled) == ("c", ["lost"], [1])


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_both_are_lost(order: str) -> None:
    rig = Rig()
    rig.move()
    rig.step("a")
    rig.router.prefill = rig.router.decode = [rig.links["c"]]
    for name in order:
        engine_lost(rig.session, name)
    rig.wait(0.01)
    assert (rig.is_on, rig.ends) == ("c", ["lost"])
    while not rig.sink.is_over:
        rig.step("c")
    assert rig.sink.text == TEXT[:20]


def test_the_old_engine_ends_it_first() -> None:
    rig = Rig(max_tokens=7)
    rig.move()
    for name in "aaba":
        rig.step(name)
    assert (rig.sink.text, rig.ends, rig.links["b"].cancelled) == (TEXT[:7], ["ended"], [1])


def test_a_stop_string_across_the_move() -> None:
    rig = Rig(stop=("efg",))
    rig.move()
    for name in "ab":
        rig.step(name)
    for _ in range(3):
        rig.step("b")
    assert (rig.sink.text, rig.sink.finish_reason) == ("abcd", FinishReason.STOP)
    assert (rig.ends, rig.links["b"].cancelled) == (["moved"], [1])


def test_log_probabilities_are_of_whose_token_was_streamed() -> None:
    rig = Rig(num_streamed=0, logprobs=0)

    def send(name: str, attempt: int, index: int, logprob: float) -> None:
        logprobs = (TokenLogprobs(logprob),)
        output = EngineOutput("r", attempt, index, (ord(TEXT[index]),), logprobs=logprobs)
        give(rig.session, name, output)

    send("a", 0, 0, -1.0)
    rig.move()
    send("a", 0, 1, -1.0)
    send("b", 1, 1, -2.0)
    send("b", 1, 2, -2.0)
    assert rig.sink.text == "abc"


def test_who_may_move() -> None:
    assert Rig(num_streamed=0).movable_from is None, "its prompt is not computed"
    rig = Rig(num_streamed=1)
    assert rig.movable_from == "a"
    rig.move()
    assert rig.movable_from is None
    rig.step("b")
    assert rig.movable_from is None
    rig.clock.advance(MOVE_EVERY_S)
    assert rig.movable_from == "b"
    rig.session.request = replace(rig.session.request, options=RequestOptions(n=2))
    assert rig.movable_from is None, "one of several samples"


def test_a_retry_may_move_from_its_first_token_on() -> None:
    rig = Rig()
    rig.router.prefill = rig.router.decode = [rig.links["b"]]
    engine_lost(rig.session, "a")
    rig.wait(0.5)
    assert (rig.is_on, rig.movable_from) == ("b", None), "there is no KV to fetch from it yet"
    rig.step("b")
    assert rig.movable_from == "b"


events = st.lists(
    st.sampled_from(["a", "a", "b", "b", "b", "lose a", "lose b", "fail b", "wait", "wrong"]),
    max_size=40,
)


@given(events)
def test_every_order_gives_the_tokens_of_one_engine(story: list[str]) -> None:
    rig = Rig(max_tokens=16)
    rig.move()
    rig.router.prefill = rig.router.decode = [rig.links["c"]]
    lost: set[str] = set()
    for what in story:
        if rig.sink.is_over:
            break
        name = what[-1]
        if what in ("a", "b"):
            if name not in lost:
                rig.step(name)
        elif what == "wrong":
            if rig.is_on == "a" and "b" not in lost:
                rig.step("b", wrong="?")
                assert "?" not in rig.sink.text or rig.is_on == "b"
                if "?" in rig.sink.text:
                    return  # cannot be known
        elif what == "wait":
            rig.wait(0.1)
        elif name not in lost:
            if what.startswith("lose"):
                lost.add(name)
                engine_lost(rig.session, name)
            else:
                rig.fail(name, EngineFailed("oh"))
                lost.add(name)
        assert rig.sink.text == TEXT[: len(rig.sink.text)]
    for _ in range(60):
        if rig.sink.is_over:
            break
        rig.wait(0.01)
        for name in "abc":
            if rig.links[name].dispatched and name not in lost:
                rig.step(name)
    assert rig.sink.text == TEXT[:16]
    assert len(rig.ends) == 1


def test_an_engine_that_took_over_and_refuses_is_no_engine_of_a_later_attempt() -> None:
    rig = Rig()
    rig.move()
    rig.step("a")
    rig.router.prefill = rig.router.decode = [rig.links["c"]]
    engine_lost(rig.session, "a")
    assert rig.is_on == "b"
    rig.fail("b", PromiseRefused("no"))
    rig.wait(0.01)
    assert (rig.is_on, rig.ends) == ("c", ["refused"])
    rig.step("c")
    rig.router.prefill = rig.router.decode = [rig.links["b"]]
    engine_lost(rig.session, "c")
    rig.wait(0.5)
    while not rig.sink.is_over:
        rig.step("b")
    assert rig.sink.text == TEXT[:20]


def test_a_move_under_which_the_new_engine_died_is_the_last() -> None:
    rig = Rig()
    rig.move()
    engine_lost(rig.session, "b", has_died=True)
    assert (rig.is_on, rig.ends) == ("a", ["lost"])
    rig.clock.advance(1e6)
    assert rig.movable_from is None
    rig.step("a")
    assert rig.sink.text == TEXT[:5]


def test_a_target_that_fails_and_then_dies_is_the_last_too() -> None:
    rig = Rig()
    rig.move()
    rig.fail("b", EngineFailed("a step broke"))
    engine_lost(rig.session, "b", has_died=True)
    rig.clock.advance(1e6)
    assert rig.movable_from is None


def test_an_engine_that_took_over_and_died_in_its_prompt_is_suspected_for_that() -> None:
    rig = Rig()
    rig.move()
    rig.router.prefill = rig.router.decode = [rig.links["c"]]
    engine_lost(rig.session, "a")
    engine_lost(rig.session, "b", has_died=True)
    assert rig.session.setbacks.suspicion.side == 0
