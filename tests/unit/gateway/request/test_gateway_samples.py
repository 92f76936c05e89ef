"""Several samples of one prompt at the gateway, and log-probabilities that come with tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from fakes.clock import FakeClock, FakeEntropy
from fakes.gateway.calls import RanCall
from fakes.gateway.engine_link import FakeLink, FakeRouter, Letters, Work
from fakes.gateway.step_outputs import give

from baton.core.errors import BatonError, Cancelled, EngineFailed, NodeLost, Unavailable
from baton.core.request.request import FinishReason, TokenLogprobs
from baton.core.request.sampling_params import RequestOptions, SamplingParams
from baton.gateway.request.engine_link import Demand, EngineOutput
from baton.gateway.request.output_chunk import OutputChunk, RequestResult
from baton.gateway.request.prompt_scores import PromptScores
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.setbacks import SessionLimits, engine_lost
from baton.gateway.text.text_stream import TextStream
from baton.gateway.validation.validation import ValidatedRequest

PROMPT = (1, 2, 3)
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
SCORES = tuple(TokenLogprobs(-float(i), ((i, -0.5),)) for i in range(6))


class Rig:
    """`n` sessions of one call over two prefill and two decode engines."""

    def __init__(self, n: int = 3, **sampling: Any) -> None:
        self.clock = FakeClock()
        self.chunks: list[OutputChunk] = []
        self.error: BatonError | None = None
        self.links = {name: FakeLink(name) for name in ("p1", "p2", "d1", "d2")}
        self.router = FakeRouter(
            [self.links["p1"], self.links["p2"]], [self.links["d1"], self.links["d2"]]
        )
        self.params = SamplingParams(max_tokens=3, seed=9, **sampling)
        siblings = [self._session(index) for index in range(1, n)]
        self.sessions = [self._session(0, siblings), *siblings]
        for session in reversed(self.sessions):
            session.try_dispatch()

    def _session(self, index: int, siblings: Any = ()) -> Session:
        request = ValidatedRequest(PROMPT, self.params, "label", RequestOptions(n=3))
        return Session(
            SessionOutput(f"r{index}", request, Letters().step, self, self.clock, 0, index),
            deadline_s=60.0,
            router=self.router,
            entropy=FakeEntropy(),
            limits=SessionLimits(settle_s=0.0),
            siblings=siblings,
        )

    def emit(self, chunk: OutputChunk) -> bool:
        self.chunks.append(chunk)
        return True

    def fail(self, error: BatonError) -> None:
        self.error = self.error or error

    def send(
        self, link: str, sample: int, index: int = 0, text: str = "", attempt: int = 0, **more: Any
    ) -> None:
        ids = tuple(map(ord, text))
        output = EngineOutput(f"r{sample}", attempt, first_index=index, token_ids=ids, **more)
        give(self.sessions[sample], link, output)

    def text(self, sample: int) -> str:
        return "".join(chunk.text for chunk in self.chunks if chunk.sample_index == sample)


def test_the_first_session_dispatches_for_all() -> None:
    rig = Rig()
    ((request, work, ticket, _),) = rig.links["p1"].dispatched
    assert (request.request_id, request.fork_ids, request.sample_index) == ("r0", ("r1", "r2"), 0)
    assert work is Work.PREFILL
    assert [d[:3] for d in rig.links["d1"].dispatched] == [(request, Work.DECODE, ticket)]
    for sample in range(3):
        rig.send("p1", sample, 0, "abc"[sample])
        rig.send("d1", sample, 1, "xy", finish_reason=LENGTH)
    assert [rig.text(sample) for sample in range(3)] == ["axy", "bxy", "cxy"]
    assert [chunk.result is not None for chunk in rig.chunks].count(True) == 3
    assert {session.call_id for session in rig.sessions} == {"r0"}


def test_a_sample_is_tried_again_by_itself() -> None:
    rig = Rig()
    for sample in range(3):
        rig.send("p1", sample, 0, "abc"[sample])
    rig.send("d1", 0, 1, "x")
    rig.send("d1", 2, 1, "xy", finish_reason=LENGTH)
    rig.router.decode = [rig.links["d2"]]
    for session in rig.sessions:
        engine_lost(session, "d1")
        session.tick()
    again = [d[0] for d in rig.links["d2"].dispatched]
    assert [(r.key, r.sample_index, r.fork_ids) for r in again] == [
        ("r0/1", 0, ()),
        ("r1/1", 1, ()),
    ]
    assert [r.output_token_ids for r in again] == [tuple(b"ax"), tuple(b"b")]
    rig.send("p1", 1, 1, "x", attempt=1)
    rig.send("d2", 1, 2, "y", attempt=1, finish_reason=LENGTH)
    assert [rig.text(sample) for sample in range(3)] == ["ax", "bxy", "cxy"]


def test_samples_wait_with_the_first_for_engines() -> None:
    class NoEngines(FakeRouter):
        is_closed = True

        def choose(self, demand: Demand, **how: Any) -> Any:
            if self.is_closed:
                raise Unavailable("no engines")
            return super().choose(demand, **how)

    rig = Rig(n=1)
    router = NoEngines(rig.router.prefill, rig.router.decode)
    rig.router = router
    siblings = [rig._session(1), rig._session(2)]
    rig.sessions = [rig._session(0, siblings), *siblings]
    for session in reversed(rig.sessions):
        session.try_dispatch()
    assert [session.is_waiting for session in rig.sessions] == [True, False, False]
    for session in rig.sessions:
        session.tick()
    router.is_closed = False
    rig.sessions[0].try_dispatch()
    assert rig.links["p1"].dispatched[-1][0].fork_ids == ("r1", "r2")
    for session in rig.sessions:
        session.cancel(Cancelled("enough"))
    assert rig.links["d1"].cancelled[-3:] == [0, 0, 0]


def test_logprobs_stay_with_their_tokens_whatever_overtakes() -> None:
    rig = Rig(n=1, logprobs=1, prompt_logprobs=1)
    rig.send("d1", 0, 1, "b", logprobs=SCORES[1:2])
    rig.send("p1", 0, prompt_logprobs=SCORES[4:5], first_prompt_index=1)
    rig.send("p1", 0, prompt_logprobs=SCORES[5:6], first_prompt_index=2)
    rig.send("p1", 0, 0, "a", logprobs=SCORES[:1])
    rig.send("d1", 0, 2, "c", logprobs=SCORES[2:3], finish_reason=LENGTH)
    first, last = rig.chunks
    assert (first.text, first.logprobs, first.prompt_logprobs) == ("ab", SCORES[:2], SCORES[4:6])
    assert (last.text, last.logprobs, last.prompt_logprobs) == ("c", SCORES[2:3], ())


def test_scores_of_a_prompt_are_copied_for_its_first_chunk_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scores, which arrive in one output per chunk of the prompt, are copied once, for the first
    chunk of text."""
    copied: list[int] = []
    all_scores = PromptScores.all

    def counted(scores: PromptScores) -> tuple[TokenLogprobs, ...]:
        found = all_scores(scores)
        copied.append(len(found))
        return found

    monkeypatch.setattr(PromptScores, "all", counted)
    rig = Rig(n=1, prompt_logprobs=1)
    rig.send("p1", 0, prompt_logprobs=SCORES[:1], first_prompt_index=1)
    rig.send("p1", 0, prompt_logprobs=SCORES[1:2], first_prompt_index=2)
    rig.send("p1", 0, finish_reason=LENGTH)
    (only,) = rig.chunks
    assert only.prompt_logprobs == SCORES[:2] and copied == [2]


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_end_of_a_search_waits_for_the_scores_of_its_prompt(*, is_lost: bool) -> None:
    rig = Rig(n=2, use_beam_search=True, best_of=2, prompt_logprobs=1)
    rig.send("p1", 0, prompt_logprobs=SCORES[4:5], first_prompt_index=1)
    for sample in range(2):
        rig.send("d1", sample, 0, "abc", finish_reason=LENGTH)
    assert [session.is_over for session in rig.sessions] == [False, True]
    prefill, attempt = "p1", 0
    if is_lost:
        rig.router.prefill = [rig.links["p2"]]
        engine_lost(rig.sessions[0], "p1")
        rig.sessions[0].tick()
        prefill, attempt = "p2", 1
        decode = "d1" if rig.links["d1"].dispatched[1:] else "d2"
        rig.send(decode, 0, 0, "abc", finish_reason=LENGTH, attempt=1)
    rig.send(prefill, 0, prompt_logprobs=SCORES[4:6], first_prompt_index=1, attempt=attempt)
    _, mine = rig.chunks
    assert (mine.text, mine.prompt_logprobs) == ("abc", SCORES[4:6])
    assert mine.result is not None and mine.result.attempts == 1 + attempt


def test_prompt_logprobs_are_asked_for_until_they_are_here() -> None:
    rig = Rig(n=2, prompt_logprobs=1)
    rig.send("p1", 0, prompt_logprobs=SCORES[:1], first_prompt_index=1)
    rig.send("p1", 0, error=NodeLost("gone"))
    rig.sessions[0].tick()
    again = rig.links["p1"].dispatched + rig.links["p2"].dispatched
    assert again[-1][0].sampling.prompt_logprobs == 1
    link = "p2" if rig.links["p2"].dispatched else "p1"
    rig.send(link, 0, prompt_logprobs=SCORES[:2], first_prompt_index=1, attempt=1)
    rig.send(link, 0, 0, "a", attempt=1)
    assert rig.chunks[-1].prompt_logprobs == SCORES[:2]
    whys = ["they are known", "the first sample's to ask"]
    for session, why in zip(rig.sessions, whys, strict=True):
        rest = session.answer.rest(1, (), may_refuse=False)
        assert rest.sampling.prompt_logprobs is None, why


def test_no_token_goes_in_front_of_the_prompt_s_scores() -> None:
    rig = Rig(n=1, prompt_logprobs=1)
    rig.send("p1", 0, prompt_logprobs=SCORES[:1], first_prompt_index=1)
    rig.send("p1", 0, 0, "a")
    assert not rig.chunks
    rig.send("p1", 0, prompt_logprobs=SCORES[1:2], first_prompt_index=2)
    (chunk,) = rig.chunks
    assert (chunk.text, chunk.prompt_logprobs) == ("a", SCORES[:2])


@pytest.mark.parametrize("nonsense", [{"logprobs": SCORES[:1]}, {"prompt_logprobs": SCORES[:3]}])
def test_nonsense_fails_the_attempt(nonsense: dict[str, Any]) -> None:
    rig = Rig(n=1)
    rig.send("p1", 0, 0, "ab", first_prompt_index=1, **nonsense)
    assert rig.links["p1"].cancelled == [0]


def test_prompt_scores_have_no_gap() -> None:
    scores = PromptScores(5)
    scores.add(1, SCORES[:2])
    scores.add(2, SCORES[3:5])
    assert scores.all() == (*SCORES[:2], SCORES[4]) and not scores.is_complete
    with pytest.raises(EngineFailed):
        scores.add(5, SCORES[:1])


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    text = TextStream(Letters().step, SamplingParams(stop=("ab",), min_tokens=3))
    assert text.feed(tuple(map(ord, "ababa")))[0] == "abab"
    assert text.feed(tuple(map(ord, "b")))[2] == "ab"


async def test_the_queue_keeps_samples_apart() -> None:
    queue = RanCall(num_samples=3, max_tokens=2)
    queue.emit(OutputChunk("", (), 0))
    await queue.next()
    for index in range(3):
        queue.emit(
            OutputChunk("a", (1,), index, sample_index=0, logprobs=SCORES[index : index + 1])
        )
        queue.emit(OutputChunk("b", (2,), index, sample_index=1))
    assert queue.emit(OutputChunk("c", (3,), 0, sample_index=2)), "the others' are not its own"
    assert not queue.emit(OutputChunk("a", (1,), 3, sample_index=0))
    assert await queue.next() == OutputChunk("aaa", (1, 1, 1), 0, logprobs=SCORES[:3])
    assert await queue.next() == OutputChunk("bbb", (2, 2, 2), 0, sample_index=1)
    queue.fail(EngineFailed("first"))
    queue.fail(Cancelled("then"))
    assert (await queue.next()).text == "c"
    with pytest.raises(EngineFailed) as caught:
        await queue.next()
    assert str(caught.value.__cause__) == "first"
    assert queue.num_failures == 1


def test_a_result_is_each_samples_own() -> None:
    rig = Rig(n=2)
    rig.send("p1", 1, 0, "b", finish_reason=STOP)
    (chunk,) = rig.chunks
    assert isinstance(chunk.result, RequestResult)
    assert (chunk.sample_index, chunk.result.finish_reason, chunk.result.completion_tokens) == (
        1, STOP, 1,
    )  # fmt: skip
    assert rig.links["d1"].cancelled == [0] and not rig.sessions[0].is_over
    assert dataclasses.asdict(chunk.result)["seed"] == 9
