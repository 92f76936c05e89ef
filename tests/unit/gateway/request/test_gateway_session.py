"""A session with fake links: every path of a request, one at a time."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from fakes.clock import FakeClock, FakeEntropy
from fakes.gateway.engine_link import FakeLink, FakeRouter, FakeSink, Letters, Work
from fakes.gateway.step_outputs import give
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    HandoffFailed,
    NodeLost,
    Overloaded,
    PromiseRefused,
    PromptTooLarge,
    Unavailable,
)
from baton.core.request.request import FinishReason
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.timeline import TERMINAL, Event, Stamp
from baton.gateway.request.engine_link import Blocked, EngineOutput, TransferSummary
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.setbacks import SessionLimits, engine_lost, unfinished_run
from baton.gateway.validation.validation import ValidatedRequest

PROMPT = (1, 2, 3)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


LIMITS = SessionLimits(max_attempts=3, recovery_wait_s=2.0, avoid_s=0.3, settle_s=0.0)


class Rig:
    """One session, two prefill and two decode engines, and short names for their actions."""

    def __init__(
        self, max_tokens: int = 5, stop: tuple[str, ...] = (), limits: SessionLimits = LIMITS
    ) -> None:
        self.clock = FakeClock()
        self.sink = FakeSink()
        self.links = {name: FakeLink(name) for name in ("p1", "p2", "d1", "d2")}
        self.router = FakeRouter(
            [self.links["p1"], self.links["p2"]], [self.links["d1"], self.links["d2"]]
        )
        sampling = SamplingParams(max_tokens=max_tokens, seed=9, stop=stop)
        self.session = Session(
            SessionOutput(
                "r",
                ValidatedRequest(PROMPT, sampling, "label"),
                Letters().step,
                self.sink,
                self.clock,
                self.clock.unix_ns(),
            ),
            deadline_s=60.0,
            router=self.router,
            entropy=FakeEntropy(),
            limits=limits,
        )

    def started(self) -> Rig:
        self.session.try_dispatch()
        return self

    def send(
        self, link: str, index: int = 0, text: str = "", attempt: int = 0, **fields: Any
    ) -> None:
        ids = tuple(map(ord, text))
        output = EngineOutput("r", attempt, first_index=index, token_ids=ids, **fields)
        give(self.session, link, output)

    def lose(self, link: str, *, has_died: bool = False) -> None:
        self.router.prefill = [e for e in self.router.prefill if e.incarnation != link]
        self.router.decode = [e for e in self.router.decode if e.incarnation != link]
        engine_lost(self.session, link, has_died=has_died)

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.session.tick()

    def cancels(self) -> dict[str, list[int]]:
        return {name: link.cancelled for name, link in self.links.items() if link.cancelled}

    def events(self) -> list[Event]:
        return [stamp.event for stamp in self.session.answer.timeline]


def holding() -> Rig:
    """Engines that decode under a promise."""
    rig = Rig()
    rig.router.holds_first = True
    return rig.started()


def test_a_first_token_waits_until_its_decode_engine_goes_on() -> None:
    rig = holding()
    rig.send("p1", 0, "a")
    assert rig.sink.text == ""
    rig.send("d1", stamps=(Stamp(Event.DECODE_STARTED, rig.clock.unix_ns(), "d"),))
    assert rig.sink.text == "a"
    rig.send("d1", 1, "bcde", finish_reason=LENGTH)
    assert rig.sink.text == "abcde" and rig.session.is_over


def test_a_first_token_that_waited_comes_with_the_second_at_the_latest() -> None:
    rig = holding()
    rig.send("d1", 1, "b")
    assert rig.sink.text == ""
    rig.send("p1", 0, "a")
    assert rig.sink.text == "ab"


def test_a_first_token_that_is_the_last_waits_for_nobody() -> None:
    rig = holding()
    rig.send("p1", 0, "a", finish_reason=LENGTH)
    assert rig.sink.text == "a" and rig.session.is_over


def test_a_first_token_that_waits_is_computed_again_where_the_decode_engine_is_lost() -> None:
    rig = holding()
    rig.send("p1", 0, "a")
    rig.lose("d1")
    rig.session.try_dispatch()
    (again, *_) = rig.links["p1"].dispatched[-1]
    assert (again.attempt, again.output_token_ids, rig.sink.text) == (1, (), "")


def test_a_suspect_whose_first_token_waits_is_past_the_prefill() -> None:
    rig = holding()
    rig.lose("p1", has_died=True)
    rig.session.try_dispatch()
    assert rig.session.setbacks and rig.session.setbacks.is_suspect
    rig.send("p2", 0, "a", attempt=1)
    assert not rig.session.setbacks.is_suspect
    rig.lose("d1", has_died=True)
    rig.session.try_dispatch()
    rig.send("p2", 0, "a", attempt=2)
    rig.send("d2", 1, "bcde", attempt=2, finish_reason=LENGTH)
    assert rig.sink.text == "abcde"


def test_the_usual_way() -> None:
    rig = Rig().started()
    (request, work, ticket, remaining_s) = rig.links["p1"].dispatched[0]
    assert (work, remaining_s) == (Work.PREFILL, 60.0)
    assert rig.links["d1"].dispatched == [(request, Work.DECODE, ticket, 60.0)]
    assert ticket is not None
    assert (ticket.source_incarnation, ticket.puller_incarnation) == ("p1", "d1")
    assert (request.key, request.prompt_token_ids, request.output_token_ids) == ("r/0", PROMPT, ())
    now = rig.clock.unix_ns()
    rig.send("p1", 0, "a", stamps=(Stamp(Event.FIRST_TOKEN, now, "p"),), cached_tokens=2)
    assert rig.sink.text == "a"
    transfer = TransferSummary(4096, 1, "shm")
    rig.send("d1", stamps=(Stamp(Event.TRANSFER_ENDED, now, "d"),), transfer=transfer)
    rig.send("d1", 1, "bc")
    rig.send("d1", 3, "de", finish_reason=LENGTH)
    assert rig.sink.text == "abcde"
    assert rig.sink.last is not None and rig.sink.last.result is not None
    result = rig.sink.last.result
    assert (result.finish_reason, result.prompt_tokens, result.completion_tokens) == (LENGTH, 3, 5)
    assert (result.prefill_node, result.decode_node) == ("node-p1", "node-d1")
    assert (result.cached_tokens, result.transfer, result.attempts) == (2, transfer, 1)
    assert rig.events() == [
        Event.ARRIVED,
        Event.ROUTED,
        Event.FIRST_TOKEN,
        Event.TRANSFER_ENDED,
        Event.FINISHED,
    ]
    assert rig.cancels() == {}, "nobody holds anything any more"


def test_where_a_request_failed_is_known() -> None:
    """The stamps that came with the engine's error name the stage of the last attempt that
    failed."""
    assert unfinished_run(Rig().session) is None
    rig = Rig().started()
    assert (run := unfinished_run(rig.session)) is not None and not run.is_decoding
    now = rig.clock.unix_ns()
    error = EngineFailed("words")
    rig.send("p1", error=error, stamps=(Stamp(Event.PREFILL_STARTED, now, "p"),))
    rig.send("p2", 0, "a", attempt=1)
    rig.send("d1", 1, "b", attempt=1, stamps=(Stamp(Event.TRANSFER_ENDED, now, "d"),))
    rig.session.cancel(Cancelled("gone"))
    run = unfinished_run(rig.session)
    assert run is not None and run.is_decoding
    assert (run.prefill_node, run.decode_node, run.completion_tokens) == ("node-p2", "node-d1", 2)
    assert [stamp.event for stamp in run.timeline] == [
        Event.ARRIVED,
        Event.ROUTED,
        Event.PREFILL_STARTED,
        Event.ROUTED,
        Event.TRANSFER_ENDED,
        Event.CANCELLED,
    ]


def one_engine(**fields: Any) -> Rig:
    """A rig in which one engine computes the whole request."""
    rig = Rig(**fields)
    rig.router.prefill = rig.router.decode = [rig.links["d1"]]
    return rig.started()


def test_one_engine_for_all() -> None:
    rig = one_engine()
    (request, work, ticket, _) = rig.links["d1"].dispatched[0]
    assert (work, ticket, request.key) == (Work.LOCAL, None, "r/0")
    now = rig.clock.unix_ns()
    rig.send("d1", 0, "a", stamps=(Stamp(Event.FIRST_TOKEN, now, "d"),), cached_tokens=2)
    assert rig.session.next_token("d1", 0, 1, ord("b"))
    rig.send("d1", 2, "cde", finish_reason=LENGTH)
    assert rig.sink.text == "abcde"
    assert rig.sink.last is not None and rig.sink.last.result is not None
    result = rig.sink.last.result
    assert (result.prefill_node, result.decode_node) == ("node-d1", "node-d1")
    assert (result.cached_tokens, result.transfer, result.attempts) == (2, None, 1)
    assert rig.cancels() == {}


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_the_one_engine_is_lost(num_tokens: int) -> None:
    rig = one_engine()
    rig.router.prefill = [rig.links["p1"]]
    rig.router.decode = [rig.links["d1"], rig.links["d2"]]
    if num_tokens:
        rig.send("d1", 0, "abc"[:num_tokens])
    rig.lose("d1")
    rig.wait(0.01)
    ((request, work, _, _),) = rig.links["p1"].dispatched
    assert (work, len(request.output_token_ids)) == (Work.PREFILL, num_tokens)


def test_a_cancel_reaches_the_one_engine() -> None:
    rig = one_engine()
    rig.send("d1", 0, "ab")
    rig.session.cancel(Cancelled("enough"))
    assert rig.cancels() == {"d1": [0]}


def test_the_short_way_takes_the_usual_token_alone() -> None:
    rig = Rig(max_tokens=6).started()
    take = rig.session.next_token
    assert not take("d1", 0, 1, ord("b")), "the first one is out neither"
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "b")
    assert not take("p1", 0, 2, ord("x")), "of the engine that prefills"
    assert not take("d2", 0, 2, ord("x")), "of another engine"
    assert not take("d1", 1, 2, ord("x")), "of another attempt"
    assert not take("d1", 0, 3, ord("x")), "too early"
    assert not take("d1", 0, 1, ord("x")), "a double"
    assert take("d1", 0, 2, ord("c")) and take("d1", 0, 3, ord("d"))
    rig.send("d1", 5, "f", finish_reason=LENGTH)  # token 4 is still under way
    assert not take("d1", 0, 4, ord("e"))
    rig.send("d1", 4, "e")
    assert (rig.sink.text, rig.sink.finish_reason) == ("abcdef", LENGTH)


def test_stop_strings_are_looked_for_in_plain_tokens() -> None:
    rig = Rig(stop=("cd",)).started()
    rig.send("p1", 0, "a")
    for index, letter in enumerate("bcd", 1):
        rig.send("d1", index, letter)
    assert (rig.sink.text, rig.sink.finish_reason) == ("ab", FinishReason.STOP)


def test_the_decode_node_may_overtake() -> None:
    rig = Rig(max_tokens=3).started()
    rig.send("d1", 1, "b")
    assert rig.sink.text == ""
    rig.send("d1", 2, "c", finish_reason=LENGTH)
    assert not rig.sink.is_over
    rig.send("p1", 0, "a")
    assert (rig.sink.text, rig.sink.finish_reason) == ("abc", LENGTH)


def test_a_decode_node_that_is_done_may_go() -> None:
    rig = Rig(max_tokens=2).started()
    rig.send("d1", 1, "b", finish_reason=LENGTH)
    rig.lose("d1")
    rig.send("p1", 0, "a")
    assert (rig.sink.text, rig.sink.finish_reason) == ("ab", LENGTH)
    assert rig.links["d2"].dispatched == []


def test_doubles_are_dropped_and_never_change_a_token() -> None:
    rig = Rig().started()
    rig.send("p1", 0, "a")
    rig.send("p1", 0, "x")
    rig.send("d1", 0, "yb")
    rig.send("d1", 1, "zc")
    assert rig.sink.text == "abc"


@given(st.permutations(range(12)), st.integers(1, 4), st.booleans())
def test_tokens_in_any_order_are_put_in_order(order: list[int], width: int, is_one: bool) -> None:
    rig = Rig(max_tokens=20)
    rig.links["d1"].incarnation = "p1" if is_one else "d1"
    rig.started()
    letters = "abcdefghijklmnop"
    for index in order:
        link = "p1" if index == 0 else rig.links["d1"].incarnation
        rig.send(link, index, letters[index : index + width])
    assert rig.sink.text == letters[: 11 + width]


def test_a_request_that_the_prefill_node_ends() -> None:
    rig = Rig().started()
    rig.send("p1", 0, "a", finish_reason=STOP)
    assert (rig.sink.text, rig.sink.finish_reason) == ("a", STOP)
    assert rig.cancels() == {"d1": [0]}
    assert rig.sink.last is not None and rig.sink.last.result is not None
    assert rig.sink.last.result.decode_node is None


@pytest.mark.parametrize("decode_first", [True, False])
def test_the_decode_node_hears_that_there_is_no_handoff(decode_first: bool) -> None:
    """The decode node's `cancelled` may arrive before the prefill node's finish, and is no
    failure."""
    rig = Rig().started()
    if decode_first:
        rig.send("d1", error=Cancelled("no hand-off"))
    rig.send("p1", 0, "a", finish_reason=STOP)
    if not decode_first:
        rig.send("d1", error=Cancelled("no hand-off"))
    assert (rig.sink.text, rig.sink.finish_reason) == ("a", STOP)


def test_a_decode_node_that_bows_out_for_no_reason_is_a_failure() -> None:
    rig = Rig().started()
    rig.send("d1", error=Cancelled("no hand-off"))
    rig.send("p1", 0, "a")
    assert rig.session.next_wakeup_s == pytest.approx(0.25)
    rig.wait(0.25)
    assert rig.cancels() == {"p1": [0]}
    assert rig.links["d2"].dispatched[0][0].output_token_ids == (ord("a"),)


def test_stop_strings_cancel_whoever_goes_on() -> None:
    rig = Rig(max_tokens=50, stop=("bcd",)).started()
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "bcxbc")
    assert rig.sink.text == "abcx"
    rig.send("d1", 6, "dEF")
    assert rig.sink.text == "abcx"
    assert rig.sink.token_ids == list(map(ord, "abcxbcd")), "tokens up to the stop string's end"
    assert rig.sink.finish_reason is STOP
    assert rig.sink.last is not None and rig.sink.last.result is not None
    assert rig.sink.last.result.matched_stop == "bcd"
    assert rig.cancels() == {"d1": [0]}


def test_held_back_text_comes_at_the_end() -> None:
    rig = Rig(max_tokens=3, stop=("bcd",)).started()
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "bc", finish_reason=LENGTH)
    assert rig.sink.text == "abc"


def test_a_lost_decode_node_is_replaced() -> None:
    rig = Rig().started()
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "b")
    rig.lose("d1")
    request, _, ticket, _ = rig.links["d2"].dispatched[0]
    assert (request.attempt, request.output_token_ids) == (1, (ord("a"), ord("b")))
    assert ticket.transfer_id != rig.links["d1"].dispatched[0][2].transfer_id
    rig.send("d1", 2, "X")
    rig.send("p1", 2, "X", attempt=0)
    rig.send("p1", 2, "c", attempt=1)
    rig.send("d2", 3, "de", attempt=1, finish_reason=LENGTH)
    assert rig.sink.text == "abcde"
    assert rig.events().count(Event.ROUTED) == 2
    assert sum(event in TERMINAL for event in rig.events()) == 1


def test_a_prefill_node_lost_before_its_token() -> None:
    rig = Rig().started()
    rig.send("d1", 1, "b")  # tokens before token 0 are discarded
    rig.lose("p1")
    assert rig.cancels() == {"d1": [0]}
    rig.send("p2", 0, "a", attempt=1)
    rig.send("d1", 1, "bcde", attempt=1, finish_reason=LENGTH)
    assert rig.sink.text == "abcde"


def test_a_prefill_node_lost_after_the_handoff_is_not_missed() -> None:
    rig = Rig().started()
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "b")
    rig.lose("p1")
    rig.send("d1", 2, "cde", finish_reason=LENGTH)
    assert (rig.sink.text, rig.sink.finish_reason) == ("abcde", LENGTH)
    assert len(rig.links["p2"].dispatched) == 0


def test_a_prefill_node_lost_in_between_leaves_the_word_to_the_decode_node() -> None:
    rig = Rig().started()
    rig.send("p1", 0, "a")
    rig.lose("p1")
    assert rig.cancels() == {}
    rig.clock.advance(0.2)
    rig.send("d1", 1, "b")  # its pull had already completed
    rig.wait(1.0)
    rig.send("d1", 2, "cde", finish_reason=LENGTH)
    assert rig.sink.text == "abcde"


def test_a_prefill_node_lost_in_between_and_no_word() -> None:
    rig = Rig().started()
    rig.send("p1", 0, "a")
    rig.lose("p1")
    rig.wait(0.25)
    assert rig.cancels() == {"d1": [0]}
    assert rig.links["p2"].dispatched[0][0].attempt == 1


def test_a_failed_handoff_avoids_the_pair_for_a_while() -> None:
    rig = Rig().started()
    rig.send("d1", error=HandoffFailed("cut"))
    assert rig.cancels() == {"p1": [0]}
    assert len(rig.links["d2"].dispatched) == 1
    assert rig.links["p1"].dispatched[1][0].attempt == 1, "another pair, not other nodes"


def test_the_only_pair_is_tried_again_after_a_pause() -> None:
    rig = Rig()
    rig.router.prefill.pop()
    rig.router.decode.pop()
    rig.started().send("d1", error=HandoffFailed("cut"))
    rig.session.try_dispatch()
    assert len(rig.links["d1"].dispatched) == 1
    assert rig.session.next_wakeup_s == pytest.approx(0.3)
    rig.wait(0.3)
    assert len(rig.links["d1"].dispatched) == 2


def test_attempts_are_bounded_and_the_last_error_is_told() -> None:
    rig = Rig().started()
    for attempt, decode in enumerate(("d1", "d2", "d1")):
        rig.send(decode, attempt=attempt, error=Overloaded(f"full {attempt}"))
        rig.wait(0.3)
    assert isinstance(rig.sink.error, Overloaded) and rig.sink.error.message == "full 2"
    assert rig.events()[-1] is Event.FAILED


def test_a_request_that_kills_engines_is_stopped_after_the_second() -> None:
    rig = Rig().started()
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "b")
    rig.lose("d1", has_died=True)
    assert rig.links["d2"].dispatched[0][0].attempt == 1
    rig.lose("d2", has_died=True)
    assert isinstance(rig.sink.error, EngineFailed) and "node-d2" in rig.sink.error.message


def test_nodes_that_vanish_are_no_fault_of_the_request() -> None:
    rig = Rig().started()
    rig.lose("d1")
    rig.lose("p1")
    rig.send("p2", 0, "a", attempt=2)
    rig.send("d2", 1, "bcde", attempt=2, finish_reason=LENGTH)
    assert rig.sink.text == "abcde"


def test_a_retry_waits_until_all_streams_of_a_lost_node_have_ended() -> None:
    """A retry waits for the end of all streams of the lost node, since the decode node may detect
    the loss before the gateway does."""
    rig = Rig(limits=SessionLimits(settle_s=0.02))
    rig.started().send("d1", error=NodeLost("the stream to the source ended"))
    assert rig.session.next_wakeup_s == pytest.approx(0.02)
    rig.lose("p1")
    rig.session.try_dispatch()
    assert rig.links["d2"].dispatched == []
    rig.wait(0.02)
    assert [r.attempt for r, *_ in rig.links["p2"].dispatched] == [1]
    assert [r.attempt for r, *_ in rig.links["d1"].dispatched] == [0, 1], "it did nothing wrong"


@pytest.mark.parametrize("link", ["p1", "d1"])
def test_errors_that_no_retry_can_help(link: str) -> None:
    rig = Rig().started()
    rig.send(link, error=PromptTooLarge("too large"))
    assert isinstance(rig.sink.error, PromptTooLarge)
    assert rig.cancels() == {"d1" if link == "p1" else "p1": [0]}


def test_a_gap_is_a_failure_of_the_attempt() -> None:
    rig = Rig().started()
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "b")
    rig.send("d1", 3, "de", finish_reason=LENGTH)
    assert rig.sink.text == "ab"
    rig.wait(0.25)
    retried = rig.links["p1"].dispatched[1][0]
    assert retried.output_token_ids == (ord("a"), ord("b"))


def test_more_tokens_than_asked_for_are_a_failure_of_the_engine() -> None:
    rig = Rig(max_tokens=2).started()
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "bc")
    assert rig.sink.text == "a"
    assert rig.links["d2"].dispatched[0][0].attempt == 1


def test_only_the_last_word_was_lost() -> None:
    rig = Rig(max_tokens=2).started()
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "b")
    rig.lose("d1")
    assert (rig.sink.text, rig.sink.finish_reason) == ("ab", LENGTH)


def test_no_engine_waits_then_says_what_is_missing() -> None:
    rig = Rig()
    rig.router.decode.clear()
    rig.started()
    rig.wait(1.9)
    assert not rig.sink.is_over
    assert rig.session.next_wakeup_s == pytest.approx(2.0)
    rig.wait(0.2)
    assert isinstance(rig.sink.error, Unavailable)


def test_a_waiting_request_takes_the_first_chance() -> None:
    rig = Rig(max_tokens=2)
    decode, rig.router.decode = rig.router.decode, []
    rig.started()
    rig.wait(1.0)
    rig.router.decode = decode
    rig.session.try_dispatch()
    assert len(rig.links["d1"].dispatched) == 1
    assert rig.links["d1"].dispatched[0][3] == pytest.approx(59.0), "what is left of the deadline"
    rig.send("p1", 0, "a")
    rig.send("d1", 1, "b", finish_reason=LENGTH)
    assert rig.sink.text == "ab"


def test_tokens_of_another_model_never_follow() -> None:
    rig = Rig()
    rig.links["p2"].fingerprint = "other"
    rig.started().send("p1", 0, "a")
    rig.lose("p1")
    rig.wait(0.25)
    rig.wait(2.5)
    assert rig.links["p2"].dispatched == []
    assert isinstance(rig.sink.error, Unavailable)


@pytest.mark.parametrize("phase", ["waiting", "dispatched", "streaming"])
@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_ending_early_in_any_phase(phase: str, end: str) -> None:
    rig = Rig()
    if phase == "waiting":
        rig.router.prefill.clear()
    rig.started()
    if phase == "streaming":
        rig.send("p1", 0, "a")
        rig.send("d1", 1, "b")
    if end == "cancel":
        rig.session.cancel(Cancelled("aborted"))
    else:
        rig.clock.advance(60.0)
        rig.session.tick()
    assert type(rig.sink.error) is {"cancel": Cancelled, "deadline": DeadlineExceeded}[end]
    expected = {"waiting": {}, "dispatched": {"p1": [0], "d1": [0]}, "streaming": {"d1": [0]}}
    assert rig.cancels() == expected[phase]
    rig.send("d1", 2, "c")
    rig.session.try_dispatch()
    engine_lost(rig.session, "d1")
    rig.session.tick()
    rig.session.cancel(Cancelled("again"))
    assert sum(event in TERMINAL for event in rig.events()) == 1


def test_a_reader_that_is_too_slow() -> None:
    rig = Rig().started()
    rig.sink.is_full = True
    rig.send("p1", 0, "a")
    assert isinstance(rig.sink.error, Overloaded)
    assert rig.cancels() == {"p1": [0], "d1": [0]}


def test_terminal_events_of_nodes_are_not_ours() -> None:
    rig = Rig(max_tokens=1).started()
    done = Stamp(Event.FINISHED, rig.clock.unix_ns(), "p")
    rig.send("p1", 0, "a", finish_reason=LENGTH, stamps=(done,))
    assert rig.events() == [Event.ARRIVED, Event.ROUTED, Event.FINISHED]
    assert rig.session.answer.timeline[-1].node == "gateway"


def test_messages_of_strangers_are_dropped() -> None:
    rig = Rig().started()
    rig.send("p2", 0, "x")
    rig.send("p1", 0, "x", attempt=7)
    engine_lost(rig.session, "p2")
    assert (rig.sink.text, rig.cancels()) == ("", {})


def test_a_lost_node_says_so_when_nothing_is_left() -> None:
    rig = Rig(limits=SessionLimits(max_attempts=1, settle_s=0.0))
    rig.started().lose("d1")
    error: BatonError | None = rig.sink.error
    assert isinstance(error, NodeLost) and "node-d1" in error.message


REFUSED = PromiseRefused("a step of 9 decodes takes longer than 25.0 ms")


def may_refuse(rig: Rig, link: str) -> list[bool]:
    return [request.may_refuse for request, *_ in rig.links[link].dispatched]


def test_a_refusal_is_planned_anew_without_that_engine() -> None:
    rig = Rig().started()
    rig.send("d1", error=REFUSED)
    assert rig.cancels() == {"p1": [0]}
    assert (may_refuse(rig, "d1"), may_refuse(rig, "d2")) == ([True], [True])
    assert not rig.router.demands[-1].is_retry, "its turn and its samples are as at first"
    rig.send("p1", 0, "a", attempt=1)
    rig.send("d2", 1, "bcde", attempt=1, finish_reason=LENGTH)
    assert rig.sink.text == "abcde" and rig.sink.last and rig.sink.last.result
    assert rig.sink.last.result.attempts == 1


def test_a_second_refusal_waits_in_the_queue_and_the_third_engine_takes_it() -> None:
    rig = Rig().started()
    rig.send("d1", error=REFUSED)
    rig.send("d2", attempt=1, error=REFUSED)
    assert rig.session.is_waiting and rig.session.blocked is Blocked.PLACE
    rig.wait(1.0)
    assert rig.session.is_waiting, "its owner says when it tries"
    rig.session.try_dispatch()
    assert may_refuse(rig, "d1") == [True, False]
    rig.lose("d1")
    assert rig.session.is_retry and may_refuse(rig, "d2") == [True, False]
    rig.send("p1", 0, "abcde", attempt=3, finish_reason=LENGTH)
    assert rig.sink.text == "abcde"


def test_where_the_only_engine_refuses_it_waits_for_a_place_there() -> None:
    rig = one_engine()
    rig.send("d1", error=REFUSED)
    assert rig.session.is_waiting and rig.session.blocked is Blocked.PLACE
    assert rig.session.next_wakeup_s > rig.clock.monotonic_s()
    rig.session.try_dispatch()
    assert may_refuse(rig, "d1") == [True, True]
    rig.send("d1", attempt=1, error=REFUSED)
    rig.session.try_dispatch()
    rig.send("d1", 0, "abcde", attempt=2, finish_reason=LENGTH)
    assert rig.sink.text == "abcde"


def test_a_cancel_while_it_waits_after_a_refusal() -> None:
    rig = one_engine()
    rig.send("d1", error=REFUSED)
    rig.session.cancel(Cancelled("no more"))
    assert isinstance(rig.sink.error, Cancelled) and rig.events()[-1] is Event.CANCELLED


def test_one_that_kills_the_one_engine_by_its_decode_is_stopped_after_the_second() -> None:
    """A request that kills two engines after their first tokens fails: the second token does not
    clear the suspicion."""
    rig = one_engine()
    rig.send("d1", 0, "a")
    rig.router.prefill = rig.router.decode = [rig.links["d2"]]
    engine_lost(rig.session, "d1", has_died=True)
    assert rig.links["d2"].dispatched[0][0].is_on_trial
    rig.send("d2", 1, "b", attempt=1)
    assert rig.session.setbacks.is_suspect
    engine_lost(rig.session, "d2", has_died=True)
    assert isinstance(rig.sink.error, EngineFailed)


@pytest.mark.parametrize("error", [EngineFailed("no"), PromiseRefused("no")], ids=str)
def test_what_a_failed_request_had_is_free_once_it_has_ended(error: BatonError) -> None:
    """A failed request's memory is freed by reference counts, not by the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        rig = Rig(max_tokens=1).started()
        rig.send("p1", error=error)
        rig.session.tick()
        rig.send("p2", 0, "a", attempt=1, finish_reason=LENGTH)
        assert rig.sink.text == "a"
        session = weakref.ref(rig.session)
        del rig
        assert session() is None
    finally:
        gc.enable()


def test_a_request_that_streams_is_no_new_one_once_it_is_sent_back() -> None:
    """`max_queue_s` applies only to requests without a first token."""
    rig = Rig(limits=replace(LIMITS, max_queue_s=1.0)).started()
    rig.send("p1", 0, "a")
    rig.router.decode = []
    rig.send("d1", error=PromiseRefused("no"))
    rig.wait(2.0)
    assert (rig.sink.text, rig.sink.error) == ("a", None)
    assert rig.session.demand.is_retry
