"""One request's life, from its arrival to its one terminal event.

    WAITING ──dispatched───► RUNNING ──last token──────────► ENDED (finished)
       ▲                       │ │ └──cancel, deadline─────► ENDED (cancelled, failed)
       └──attempt failed, ─────┘ └──attempts used up───────► ENDED (failed)
          retryable

An *attempt* is one dispatch to a prefill and a decode engine. When one fails, the tokens already
streamed go with the next as `output_token_ids`, and both engines of the old one get a Cancel; what
they still send is dropped by its attempt number. What happens after a failure is in setbacks.py. A
running request may be moved to another engine (move.py), by a second attempt beside the first. The
owner decides when a session tries to dispatch, except for a retry (dispatch_queue.py).

Knows clock, entropy, engines and client only by Protocols; never blocks: the owner calls `tick` at
`next_wakeup_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    Unavailable,
)
from ...core.ports import Entropy
from ...core.request.request import FinishReason
from ...core.request.timeline import Event
from .attempt import Attempt
from .engine_link import Avoid, Blocked, Demand, EngineOutput, MustWait, Route, Router
from .move import Moves
from .output_chunk import OutputChunk, OutputToken
from .session_output import SessionOutput
from .setbacks import SessionLimits, Setbacks, setbacks_of
from .suspects import Suspects

_TOO_SLOW = "the client reads too slowly; its stream was ended"
_MAX_REFUSALS = 2  # of one request; the next engine must take it


class Session:
    """One request: one sample of a prompt. Its owner calls all methods from a single thread.

    `siblings` are the further samples of the prompt, with the next indices: the first dispatch of
    this session is also theirs, and they wait for it (`_is_led`); from then on each is a session
    like any other. With beams the samples are the best hypotheses of one search; a retry searches
    anew for its own.

    `blocked`: why it was not dispatched when it last tried; `last_attempt`: the current attempt, or
    the one before; `num_taken`: attempts, without those that an engine sent back and the rounds of
    moves; `moves`, `setbacks`: from the first one on.
    """

    def __init__(
        self,
        answer: SessionOutput,
        router: Router,
        entropy: Entropy,
        limits: SessionLimits,
        *,
        deadline_s: float,
        suspects: Suspects | None = None,
        siblings: Sequence[Session] = (),
    ) -> None:
        self.answer = answer
        self.request, self.clock = answer.request, answer.clock
        self.request_id = self.call_id = answer.request_id  # the client knows all samples by one
        self.limits = limits
        self.suspects = suspects or Suspects()
        self.blocked: Blocked | None = None
        self.queue_until_s = self.clock.monotonic_s() + limits.max_queue_s
        self.attempt: Attempt | None = None
        self.last_attempt: Attempt | None = None
        self.moves: Moves | None = None
        self.setbacks: Setbacks | None = None
        self.num_taken = 0
        self.is_over = False
        self._siblings = siblings
        self._is_led = False
        for sibling in siblings:
            sibling.call_id, sibling._is_led = self.call_id, True
        self._deadline_s = deadline_s
        self._router = router
        self._entropy = entropy
        self._engine_until_s = math.inf  # when it gives up, while no engine can take it
        self._num_attempts = 0

    def engine_output(self, incarnation: str, output: EngineOutput) -> None:
        """Take an output of an engine; one of another attempt is dropped."""
        if self.moves is not None and self.moves.take(incarnation, output):
            return
        attempt = self.attempt
        if attempt is None or not attempt.expects(incarnation, output.attempt):
            return
        attempt.note(incarnation, output)
        if output.error is not None:
            setbacks_of(self).engine_failed(attempt, incarnation, output.error)
            return
        try:
            tokens = attempt.add(output)
        except EngineFailed as error:
            setbacks_of(self).fail_attempt(attempt, error, blamed=incarnation)
        else:
            self.advance(attempt, tokens)

    def next_token(self, incarnation: str, attempt_number: int, index: int, token_id: int) -> bool:
        """The usual case of `engine_output`: the next token, from the engine that decodes.

        False: it is another case, and nothing was done.
        """
        attempt, moves, answer = self.attempt, self.moves, self.answer
        if (
            attempt is None
            or (moves is not None and moves.now is not None)
            or (self.setbacks is not None and self.setbacks.is_suspect)
            or not answer.output_ids
            or answer.text.search is not None
            or not attempt.takes_next(incarnation, attempt_number, index)
        ):
            return False
        if not answer.next(index, token_id):
            self.end_badly(Overloaded(_TOO_SLOW))
        return True

    @property
    def is_waiting(self) -> bool:
        return self.attempt is None and not self.is_over and not self._is_led

    @property
    def demand(self) -> Demand:
        """What the next dispatch needs, for all samples that it covers."""
        sampling, is_retry = self.request.sampling, self.is_retry
        num_samples = 1 if is_retry else 1 + len(self._siblings)
        return Demand(
            num_tokens=len(self.request.prompt_token_ids) + self.num_outputs,
            num_sequences=sampling.best_of if sampling.use_beam_search else num_samples,
            max_output_tokens=sampling.max_tokens - self.num_outputs,
            is_retry=is_retry,
            tbt_target_s=sampling.tbt_target_ms / 1000,
        )

    @property
    def num_outputs(self) -> int:
        """Tokens so far, also those that the client does not get."""
        return len(self.answer.output_ids)

    @property
    def is_retry(self) -> bool:
        """Whether an engine has taken it before, or it has tokens."""
        return self.num_taken > 0 or bool(self.answer.output_ids)

    def cancel(self, error: BatonError) -> None:
        """End early, if it is not over: with `Cancelled`, or why the gateway gives up on it."""
        if not self.is_over:
            self.end_badly(error)

    @property
    def next_wakeup_s(self) -> float:
        """When `tick` is due, on the monotonic clock."""
        return min(self._deadline_s, self._due[0])

    def tick(self) -> None:
        """Act on what is due."""
        now_s, (due_s, act) = self.clock.monotonic_s(), self._due
        if self.is_over:
            return
        if now_s >= self._deadline_s:
            self.end_badly(DeadlineExceeded("the request's deadline passed"))
        elif now_s >= due_s:
            act()

    @property
    def _due(self) -> tuple[float, Callable[[], None]]:
        """What is due next except for the deadline, and when."""
        if (attempt := self.attempt) is not None:
            if self.moves is None or attempt.doubt_until_s <= self.moves.deadline_s:
                return attempt.doubt_until_s, self._give_up_doubtful
            return self.moves.deadline_s, self.moves.end_late
        if self.is_waiting and not self.is_retry and self.blocked is not Blocked.ENGINE:
            return self.queue_until_s, self._give_up_waiting
        until_s = math.inf if self.setbacks is None else self.setbacks.until_s
        return min(until_s, self._engine_until_s), self.try_dispatch

    def _give_up_doubtful(self) -> None:
        assert self.attempt is not None and self.attempt.doubt is not None
        self.fail_attempt(self.attempt, self.attempt.doubt)

    def _give_up_waiting(self) -> None:
        self.end_badly(Overloaded(f"no engine had room within {self.limits.max_queue_s:g} s"))

    def try_dispatch(self) -> None:
        """Find engines and dispatch, or go on waiting. Does nothing unless it waits."""
        if not self.is_waiting:
            return
        try:
            route = self._find_engines()
        except BatonError as error:
            self.end_badly(error)
            return
        if route is None:
            return
        siblings = () if self.is_retry else self._siblings
        attempt = self._begin_attempt(route)
        for sibling in siblings:
            sibling._begin_attempt(route)
        fork_ids = tuple(sibling.request_id for sibling in siblings)
        # An engine may send it back a few times, unless one has taken it before.
        num_refusals = 0 if self.setbacks is None else self.setbacks.num_refusals
        may_refuse = self.num_taken == 1 and not self._siblings and num_refusals < _MAX_REFUSALS
        attempt.send(self._entropy, self._deadline_s, fork_ids, may_refuse=may_refuse)

    def _find_engines(self) -> Route | None:
        """None: not now. Raises what ends the request: no engine came in time, or its call has
        killed too many."""
        setbacks, avoid, fingerprint = self.setbacks, Avoid(), None
        if setbacks is not None:
            if not setbacks.may_try():
                self.block(None)  # not for lack of an engine: the wait for one is over
                return None
            avoid = setbacks.avoid
        if (last := self.last_attempt) is not None and self.answer.output_ids:
            fingerprint = last.route.prefill.fingerprint  # the next tokens are to match these
        route, reason = None, None
        try:
            route = self._router.choose(self.demand, avoid=avoid, fingerprint=fingerprint)
        except MustWait as wait:
            reason = wait.reason
        except Unavailable:
            if setbacks is None or not setbacks.waits_for_trials():
                if self.clock.monotonic_s() >= self._engine_until_s:
                    raise
                reason = Blocked.ENGINE
        self.block(reason)
        return route

    def block(self, reason: Blocked | None) -> None:
        """Note why it was not dispatched; without any engine it waits for a limited time."""
        self.blocked = reason
        if reason is not Blocked.ENGINE:
            self._engine_until_s = math.inf
        elif self._engine_until_s == math.inf:
            self._engine_until_s = self.clock.monotonic_s() + self.limits.recovery_wait_s

    def _begin_attempt(self, route: Route) -> Attempt:
        attempt = self._new_attempt(route)
        self.switch_to(attempt)
        if self.setbacks is not None:
            self.setbacks.suspicion.attempt_began(attempt)
        self.num_taken += 1
        self._is_led = False
        self.answer.stamp(Event.ROUTED)
        return attempt

    def switch_to(self, attempt: Attempt) -> None:
        self.attempt = self.last_attempt = attempt

    def dispatch_beside(self, route: Route) -> Attempt:
        """See MovingSession."""
        attempt = self._new_attempt(route)
        attempt.send(self._entropy, self._deadline_s, may_refuse=True)
        return attempt

    def _new_attempt(self, route: Route) -> Attempt:
        """The next one, which starts behind the tokens so far."""
        self._num_attempts += 1
        return Attempt(self._num_attempts - 1, route, self.answer)

    def fail_attempt(self, attempt: Attempt, error: BatonError) -> None:
        """See MovingSession."""
        setbacks_of(self).fail_attempt(attempt, error)

    def advance(self, attempt: Attempt, tokens: list[OutputToken]) -> None:
        """Pass on tokens that are now in order, and finish if they are the last."""
        chunk = self.answer.add(tokens)
        if self.setbacks is not None:
            self.setbacks.suspicion.got_further(attempt)
        if self.answer.matched_stop is not None:
            self.finish(attempt, FinishReason.STOP, chunk)
        elif attempt.is_complete and attempt.finish_reason is not None:
            self.finish(attempt, attempt.finish_reason, chunk)
        elif chunk.token_ids and not self.answer.sink.emit(chunk):
            self.end_badly(Overloaded(_TOO_SLOW))

    def finish(self, attempt: Attempt, reason: FinishReason, chunk: OutputChunk) -> None:
        """End well. Engines that still hold the request get a Cancel."""
        self._end(Event.FINISHED)
        attempt.cancel()
        decode_node = attempt.route.decode.name if attempt.is_handed_over else None
        nodes = attempt.route.prefill.name, decode_node
        self.answer.finish(reason, chunk, nodes, self.num_taken)

    def end_badly(self, error: BatonError) -> None:
        """End as cancelled or failed."""
        attempt = self.attempt
        self._end(Event.CANCELLED if isinstance(error, Cancelled) else Event.FAILED)
        if attempt is not None:
            attempt.cancel()
        self.answer.sink.fail(error)

    def _end(self, event: Event) -> None:
        assert not self.is_over, "a request ends once"
        self.is_over = True
        self.attempt = None
        if self.moves is not None:
            self.moves.end("ended")
        if self.setbacks is not None:
            self.setbacks.suspicion.end_trial()
        self.moves = self.setbacks = None  # these refer back to the session
        self.answer.stamp(event)
