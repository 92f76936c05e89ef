"""A session against simulated engines under every interleaving of messages, losses and retries.

The engines follow the contract: a source computes one token, a puller continues once the source is
done, fails if the source is gone, and withdraws if the source ended the request. Their messages are
delivered one by one, may be duplicated, and still arrive after a cancel. The oracle is a fixed
text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from effort import examples
from fakes.clock import FakeClock, FakeEntropy
from fakes.gateway.engine_link import FakeLink, FakeRouter, FakeSink, Letters, Work
from fakes.gateway.step_outputs import give
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.errors import BatonError, Cancelled, EngineFailed, HandoffFailed, Overloaded
from baton.core.request.request import FinishReason, Request, Ticket
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.timeline import TERMINAL
from baton.gateway.request.engine_link import EngineOutput, TransferSummary
from baton.gateway.request.session import Session
from baton.gateway.request.session_output import SessionOutput
from baton.gateway.request.setbacks import SessionLimits, engine_lost
from baton.gateway.validation.validation import ValidatedRequest

TEXT = "abacabadabacaba"
DEADLINE_S = 100.0


@dataclass
class Held:
    """One attempt that an engine holds."""

    request: Request
    ticket: Ticket
    next_index: int


@dataclass
class SimEngine(FakeLink):
    """An engine that plays its role step by step; `wire` holds what it sent and nobody received
    yet."""

    is_alive: bool = True
    held: dict[int, Held] = field(default_factory=dict)
    wire: deque[EngineOutput] = field(default_factory=deque)
    computed: dict[str, bool] = field(default_factory=dict)  # transfer -> request ended here

    def dispatch(self, request: Request, *more: Any) -> None:
        super().dispatch(request, *more)
        _, work, ticket, _ = self.dispatched[-1]
        assert ticket is not None
        first = len(request.output_token_ids) + (0 if work is Work.PREFILL else 1)
        self.held[request.attempt] = Held(request, ticket, first)

    def cancel(self, request_id: str, attempt: int) -> None:
        super().cancel(request_id, attempt)
        self.held.pop(attempt, None)

    def say(self, held: Held, num_tokens: int, **fields: object) -> None:
        """Send the next tokens of an attempt; the last one of the output ends the attempt."""
        first, tokens = held.next_index, TEXT[held.next_index : held.next_index + num_tokens]
        held.next_index += len(tokens)
        limit = min(held.request.sampling.max_tokens, len(TEXT))
        is_last = held.next_index >= limit
        reason = FinishReason.STOP if limit == len(TEXT) else FinishReason.LENGTH
        output = EngineOutput(
            "r",
            held.request.attempt,
            first_index=first,
            token_ids=tuple(map(ord, tokens)),
            finish_reason=reason if is_last else None,
            **fields,  # type: ignore[arg-type]
        )
        self.wire.append(output)
        if is_last:
            del self.held[held.request.attempt]

    def give_up(self, held: Held, error: BatonError) -> None:
        self.wire.append(EngineOutput("r", held.request.attempt, error=error))
        del self.held[held.request.attempt]


class SessionMachine(RuleBasedStateMachine):
    """Each rule is one event; `teardown` runs the rest to its end."""

    @initialize(
        max_tokens=st.integers(1, len(TEXT)),
        stop=st.sampled_from([(), ("dab",), ("ad", "ca"), ("zz",), ("a",)]),
        has_spare=st.booleans(),
    )
    def begin(self, max_tokens: int, stop: tuple[str, ...], has_spare: bool) -> None:
        self.clock, self.sink = FakeClock(), FakeSink()
        self.max_tokens, self.stop = max_tokens, stop
        self.count = 0
        self.engines: dict[str, SimEngine] = {}
        self.router = FakeRouter([], [])
        for _ in range(2 if has_spare else 1):
            self.add(self.router.prefill)
            self.add(self.router.decode)
        sampling = SamplingParams(max_tokens=max_tokens, stop=stop)
        self.session = Session(
            SessionOutput(
                "r",
                ValidatedRequest((1, 2), sampling, ""),
                Letters().step,
                self.sink,
                self.clock,
                0,
            ),
            deadline_s=DEADLINE_S,
            router=self.router,
            entropy=FakeEntropy(),
            limits=SessionLimits(max_attempts=4),
        )
        self.session.try_dispatch()

    def add(self, role: list[FakeLink]) -> None:
        self.count += 1
        engine = SimEngine(f"e{self.count}")
        self.engines[engine.incarnation] = engine
        role.append(engine)

    def living(self) -> list[SimEngine]:
        return [engine for engine in self.engines.values() if engine.is_alive]

    # --- events -----------------------------------------------------------------------------------

    @rule(pick=st.integers(0, 7), num_tokens=st.integers(1, 4))
    def step(self, pick: int, num_tokens: int) -> None:
        """An engine takes a step for one attempt it holds."""
        busy = [(e, held) for e in self.living() for held in e.held.values()]
        if not busy:
            return
        engine, held = busy[pick % len(busy)]
        if held.ticket.source_incarnation == engine.incarnation:
            engine.say(held, 1, cached_tokens=1)
            has_ended = held.request.attempt not in engine.held
            engine.computed[held.ticket.transfer_id] = has_ended
            engine.held.pop(held.request.attempt, None)
            return
        self.step_puller(engine, held, num_tokens)

    def step_puller(self, engine: SimEngine, held: Held, num_tokens: int) -> None:
        source = self.engines[held.ticket.source_incarnation]
        has_ended = source.computed.get(held.ticket.transfer_id)
        is_attached = held.next_index > len(held.request.output_token_ids) + 1
        if has_ended:
            engine.give_up(held, Cancelled("no hand-off"))
        elif is_attached:
            engine.say(held, num_tokens)
        elif not source.is_alive:
            engine.give_up(held, HandoffFailed("the source is gone"))
        elif has_ended is False:
            engine.say(held, num_tokens, transfer=TransferSummary(1, 0, "sim"))

    @rule(pick=st.integers(0, 7))
    def deliver(self, pick: int) -> None:
        sending = [engine for engine in self.living() if engine.wire]
        if sending:
            engine = sending[pick % len(sending)]
            give(self.session, engine.incarnation, engine.wire.popleft())

    @rule(pick=st.integers(0, 7))
    def deliver_twice(self, pick: int) -> None:
        sending = [engine for engine in self.living() if engine.wire and not engine.wire[0].error]
        if sending:
            engine = sending[pick % len(sending)]
            give(self.session, engine.incarnation, engine.wire[0])

    @rule(pick=st.integers(0, 3), comes_back=st.booleans(), has_died=st.booleans())
    def kill(self, pick: int, comes_back: bool, has_died: bool) -> None:
        """An engine dies with its undelivered messages; a new one may replace it."""
        engine = self.living()[pick % len(self.living())]
        is_prefill = engine in self.router.prefill
        role = self.router.prefill if is_prefill else self.router.decode
        if len(role) == 1 and not comes_back:
            return
        engine.is_alive = False
        role.remove(engine)
        engine_lost(self.session, engine.incarnation, has_died=has_died)
        if comes_back:
            self.add(role)
            self.session.try_dispatch()

    @rule(
        pick=st.integers(0, 7),
        error=st.sampled_from([EngineFailed("x"), HandoffFailed("x"), Overloaded("x")]),
    )
    def fail(self, pick: int, error: BatonError) -> None:
        busy = [(e, held) for e in self.living() for held in e.held.values()]
        if busy:
            engine, held = busy[pick % len(busy)]
            engine.give_up(held, error)

    @rule(seconds=st.sampled_from([0.01, 0.25, 0.3, 2.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.session.tick()

    @precondition(lambda self: not self.sink.is_over)
    @rule(really=st.integers(0, 9))
    def cancel(self, really: int) -> None:
        if really == 9:
            self.session.cancel(Cancelled("the client left"))

    # --- invariants -------------------------------------------------------------------------------

    def expected(self) -> tuple[str, str]:
        """(tokens, text) of the request without faults."""
        tokens = TEXT[: self.max_tokens]
        for end in range(len(tokens) + 1):
            matched = [stop for stop in self.stop if tokens[:end].endswith(stop)]
            if matched:
                return tokens[:end], tokens[: end - max(map(len, matched))]
        return tokens, tokens

    @invariant()
    def streamed_is_a_beginning(self) -> None:
        tokens, text = self.expected()
        assert tokens.startswith("".join(map(chr, self.sink.token_ids)))
        assert text.startswith(self.sink.text)

    @invariant()
    def a_finish_is_whole(self) -> None:
        if self.sink.last is not None:
            tokens, text = self.expected()
            assert "".join(map(chr, self.sink.token_ids)) == tokens
            assert self.sink.text == text

    @invariant()
    def nobody_holds_what_is_over(self) -> None:
        """An engine that holds a request that ended, or an abandoned attempt, is sent a Cancel."""
        assert self.session.is_over == self.sink.is_over
        attempts = [request.attempt for e in self.engines.values() for request, *_ in e.dispatched]
        current = set() if self.session.is_over else {max(attempts, default=0)}
        for engine in self.living():
            assert engine.held.keys() <= current

    @invariant()
    def one_terminal_event(self) -> None:
        ends = [stamp for stamp in self.session.answer.timeline if stamp.event in TERMINAL]
        assert len(ends) == int(self.session.is_over)

    def teardown(self) -> None:
        """Without further faults the request ends before its deadline."""
        if not hasattr(self, "session"):
            return
        for _ in range(400):
            if self.sink.is_over:
                break
            for pick in range(4):
                self.step(pick, 2)
                self.deliver(pick)
            if self.session.next_wakeup_s < DEADLINE_S:
                self.clock.advance(max(0.0, self.session.next_wakeup_s - self.clock.monotonic_s()))
                self.session.tick()
        assert self.sink.is_over, "hangs"
        self.a_finish_is_whole()
        self.nobody_holds_what_is_over()


SessionMachine.TestCase.settings = examples(60, 150, stateful_step_count=40)
test_session_under_faults = SessionMachine.TestCase
