"""One request's life, from its arrival to its one terminal event.

    WAITING ──dispatched───► RUNNING ──last token──────────► ENDED (finished)
       ▲                       │ │ └──cancel, deadline─────► ENDED (cancelled, failed)
       └──attempt failed, ─────┘ └──attempts used up───────► ENDED (failed)
          retryable

An *attempt* is one dispatch to a prefill and a decode engine. When one fails, the tokens already
streamed go with the next as `output_token_ids`, and both engines of the old one get a Cancel; what
still comes from them is dropped by its attempt number. A running request may be moved to another
engine (move.py), by a second attempt beside the first. Of several samples of one prompt the first
dispatches for all, once; from then on each is a session like any other. When it tries is its
owner's choice, but for a retry (dispatch_queue.py). Sees clock, entropy, engines and the client
only through Protocols; never blocks: the owner calls `tick` at `next_wakeup_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    HandoffFailed,
    Overloaded,
    Unavailable,
)
from ...core.ports import Clock, Entropy
from ...core.request.request import FinishReason
from ...core.request.timeline import Event
from ..text.text_stream import TextStream
from ..validation.validation import ValidatedRequest
from .answer import Answer
from .attempt import Attempt
from .engine_link import Avoid, Blocked, Demand, EngineOutput, MustWait, Route, Router
from .move import Moves
from .output_chunk import ChunkSink, OutputChunk, OutputToken, UnfinishedRun
from .setbacks import SessionLimits, Setbacks, Suspects

_TOO_SLOW = "the client reads too slowly; its stream was ended"
_MAX_REFUSALS = 2  # of one request; then the next engine has to take it


class Session:
    """One request: one sample of a prompt. All methods are calls of the owner's single thread.

    `siblings` are the prompt's further samples, of the indices that follow: this session dispatches
    for them the first time, and until then they wait for it (`is_led`). With beams the samples are
    the best hypotheses of one search; a retry searches anew for its own.
    """

    def __init__(
        self,
        request_id: str,
        request: ValidatedRequest,
        text: TextStream,
        sink: ChunkSink,
        *,
        arrived_unix_ns: int,
        deadline_s: float,
        router: Router,
        clock: Clock,
        entropy: Entropy,
        limits: SessionLimits,
        suspects: Suspects | None = None,
        sample_index: int = 0,
        siblings: Sequence[Session] = (),
    ) -> None:
        self.answer = Answer(request_id, request, text, sink, arrived_unix_ns, clock, sample_index)
        self.request = request
        self.request_id = self.call_id = request_id  # the client knows all samples by one
        self._siblings = siblings
        self._is_led = False
        for sibling in siblings:
            sibling.call_id, sibling._is_led = self.call_id, True
        self._deadline_s = deadline_s
        self._clock = clock
        self._limits = limits
        self._router = router
        self._entropy = entropy
        self._suspects = suspects or Suspects()
        self.blocked: Blocked | None = None  # why the last try to dispatch did not
        self._queue_until_s = clock.monotonic_s() + limits.max_queue_s
        self._engine_until_s = math.inf  # while no engine can take it
        self._setbacks: Setbacks | None = None  # from the first attempt on that came to nothing
        self.moves: Moves | None = None  # from its first move on
        self.attempt: Attempt | None = None
        self._last: Attempt | None = None  # the same, and what was the last one
        self._num_attempts = 0
        self.num_taken = 0  # of them: neither those that were sent back nor rounds of moves
        self.fingerprint: str | None = None  # of the engines whose tokens it streams
        self.is_over = False

    def engine_output(self, incarnation: str, output: EngineOutput) -> None:
        """Take what an engine sent; anything of another attempt is dropped."""
        moves = self.moves
        if moves is not None and moves.take(incarnation, output, self._clock.monotonic_s()):
            return
        attempt = self.attempt
        if attempt is None or not attempt.expects(incarnation, output.attempt):
            return
        attempt.note(incarnation, output)
        if output.error is not None:
            self._setback().engine_failed(attempt, incarnation, output.error)
            return
        try:
            tokens = attempt.add(output, now_s=self._clock.monotonic_s())
        except EngineFailed as error:
            self._setback().fail_attempt(attempt, error, blamed=incarnation)
        else:
            self.advance(attempt, tokens)

    def next_token(self, incarnation: str, attempt_number: int, index: int, token_id: int) -> bool:
        """The usual case of `engine_output`: the next token, of the engine that decodes.

        False: it is not that, and nothing was done.
        """
        attempt, moves, answer = self.attempt, self.moves, self.answer
        if (
            attempt is None
            or (moves is not None and moves.now is not None)
            or self.fingerprint is None
            or (self._setbacks is not None and self._setbacks.is_suspect)
            or answer.text.is_searched
            or not attempt.takes_next(incarnation, attempt_number, index)
        ):
            return False
        if not answer.next(index, token_id):
            self.end_badly(Overloaded(_TOO_SLOW))
        return True

    def engine_lost(self, incarnation: str, *, has_died: bool = False) -> None:
        """An engine's stream ended: what it still owed will not come.

        `has_died`: its supervisor lives and reports that the engine process ended.
        """
        attempt = self.attempt
        if self.moves is not None:
            self.moves.lose(incarnation, has_died=has_died)
        if attempt is not None and incarnation in attempt.pair:
            self._setback().engine_lost(attempt, incarnation, has_died=has_died)
        elif self._setbacks is not None and not self.is_over:
            self._setbacks.another_lost(incarnation, has_died=has_died)

    @property
    def unfinished_run(self) -> UnfinishedRun | None:
        """Of one that ended badly; None: no engine had it."""
        if (last := self._last) is None:
            return None
        return UnfinishedRun(
            last.route.prefill.name,
            last.route.decode.name,
            last.is_handed_over,
            self.answer.transfer,
            self.num_outputs,
            tuple(self.answer.timeline),
        )

    @property
    def is_waiting(self) -> bool:
        """For an engine."""
        return self.attempt is None and not self.is_over and not self._is_led

    @property
    def demand(self) -> Demand:
        """What the next dispatch needs, with the samples that it dispatches for."""
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
        """Tokens so far, whoever gets them."""
        return len(self.answer.output_ids)

    @property
    def was_dispatched(self) -> bool:
        """Whether an engine had it, be it that it was sent back: its caller was charged for it."""
        return self._num_attempts > 0

    @property
    def is_retry(self) -> bool:
        """Whether it was dispatched before, and taken, or streams."""
        return self.num_taken > 0 or bool(self.answer.output_ids)

    def cancel(self, error: BatonError) -> None:
        """End early: `Cancelled`, or what made the gateway give up on the client."""
        if not self.is_over:
            self.end_badly(error)

    @property
    def next_wakeup_s(self) -> float:
        """When `tick` has something to do, on the monotonic clock."""
        return min(self._deadline_s, self._due[0])

    def tick(self) -> None:
        """Act on whatever time is up."""
        now_s, (due_s, act) = self._clock.monotonic_s(), self._due
        if self.is_over:
            return
        if now_s >= self._deadline_s:
            self.end_badly(DeadlineExceeded("the request's deadline passed"))
        elif now_s >= due_s:
            act()

    @property
    def _due(self) -> tuple[float, Callable[[], None]]:
        """What time brings next, if the deadline does not, and when."""
        if (attempt := self.attempt) is not None:
            if self.moves is None or attempt.doubt_until_s <= self.moves.deadline_s:
                return attempt.doubt_until_s, self._give_up_doubtful
            return self.moves.deadline_s, self.moves.end_late
        if self.is_waiting and not self.is_retry and self.blocked is not Blocked.ENGINE:
            return self._queue_until_s, self._give_up_waiting
        until_s = math.inf if self._setbacks is None else self._setbacks.until_s
        return min(until_s, self._engine_until_s), self.try_dispatch

    def _give_up_doubtful(self) -> None:
        if (attempt := self.attempt) is not None:
            self.fail_attempt(attempt, attempt.doubt or HandoffFailed("no message came"))

    def _give_up_waiting(self) -> None:
        waited_s = self._limits.max_queue_s
        self.end_badly(Overloaded(f"no place became free in {waited_s:g} s"))

    def try_dispatch(self) -> None:
        """Find engines and dispatch, or wait for them as long as that makes sense; `blocked` is
        why. Does nothing unless it waits."""
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
        # An engine may send it back: not for ever, and not once it was taken.
        num_refusals = 0 if self._setbacks is None else self._setbacks.num_refusals
        may_refuse = self.num_taken == 1 and not self._siblings and num_refusals < _MAX_REFUSALS
        attempt.send(
            self._entropy,
            self._deadline_s - self._clock.monotonic_s(),
            fork_ids,
            may_refuse=may_refuse,
        )

    def _find_engines(self) -> Route | None:
        """None: none now. Raises what ends the request: no engine came in time, or its call has
        killed too many."""
        setbacks, avoid = self._setbacks, Avoid()
        if setbacks is not None:
            if not setbacks.may_try():
                self.blocked = None
                return None
            avoid = setbacks.avoid
        route, reason = None, None
        try:
            route = self._router.choose(self.demand, avoid=avoid, fingerprint=self.fingerprint)
        except MustWait as wait:
            reason = wait.reason
        except Unavailable:
            if setbacks is None or not setbacks.waits_for_trials():
                if self._clock.monotonic_s() >= self._engine_until_s:
                    raise
                reason = Blocked.ENGINE
        self.block(reason)
        return route

    def block(self, reason: Blocked | None) -> None:
        """Why it was not dispatched; it waits for any engine as long as there is none."""
        self.blocked = reason
        if reason is not Blocked.ENGINE:
            self._engine_until_s = math.inf
        elif self._engine_until_s == math.inf:
            self._engine_until_s = self._clock.monotonic_s() + self._limits.recovery_wait_s

    def _begin_attempt(self, route: Route) -> Attempt:
        attempt = self._new_attempt(route)
        self.switch_to(attempt)
        if self._setbacks is not None:
            self._setbacks.attempt_began(attempt)
        self.num_taken += 1
        self._is_led = False
        self.answer.stamp(Event.ROUTED)
        return attempt

    def switch_to(self, attempt: Attempt) -> None:
        self.attempt = self._last = attempt

    def dispatch_beside(self, route: Route) -> Attempt:
        """See MovingSession."""
        attempt = self._new_attempt(route)
        remaining_s = self._deadline_s - self._clock.monotonic_s()
        attempt.send(self._entropy, remaining_s, may_refuse=True)
        return attempt

    def _new_attempt(self, route: Route) -> Attempt:
        """The next, from the tokens so far on."""
        self._num_attempts += 1
        return Attempt(self._num_attempts - 1, route, self.answer, self._clock.monotonic_s())

    def fail_attempt(self, attempt: Attempt, error: BatonError) -> None:
        """See MovingSession."""
        self._setback().fail_attempt(attempt, error)

    def _setback(self) -> Setbacks:
        """There is one."""
        if self._setbacks is None:
            self._setbacks = Setbacks(self, self._limits, self._suspects, self._clock)
        return self._setbacks

    @property
    def is_suspect(self) -> bool:
        """An engine died under it, perhaps for it."""
        return self._setbacks is not None and self._setbacks.is_suspect

    @property
    def is_alone(self) -> bool:
        """Not one of several samples, which share blocks, and stay together."""
        return not self._siblings and not self.answer.sample_index

    def plan_again(self, avoid: Avoid) -> None:
        """Before its first token: another engine is to compute the prompt. `avoid`: every plan in
        which this one would."""
        if (attempt := self.attempt) is not None:
            self._queue_until_s = self._clock.monotonic_s() + self._limits.max_queue_s
            self._setback().plan_again(attempt, avoid)

    def advance(self, attempt: Attempt, tokens: list[OutputToken]) -> None:
        """Pass tokens on that are now in order, and finish where they are the last."""
        chunk = self.answer.add(tokens)
        if chunk.token_ids and self.fingerprint is None:
            self.fingerprint = attempt.route.prefill.fingerprint
        if self._setbacks is not None:
            self._setbacks.got_further(attempt)
        if self.answer.matched_stop is not None:
            self.finish(attempt, FinishReason.STOP, chunk)
        elif attempt.is_complete and attempt.finish_reason is not None:
            self.finish(attempt, attempt.finish_reason, chunk)
        elif not self.answer.send(chunk):
            self.end_badly(Overloaded(_TOO_SLOW))

    def finish(self, attempt: Attempt, reason: FinishReason, chunk: OutputChunk) -> None:
        """The good end. Whoever still holds the request gets a Cancel."""
        self._end(Event.FINISHED)
        attempt.cancel()
        self.answer.finish(
            attempt.route,
            reason,
            chunk,
            is_handed_over=attempt.is_handed_over,
            num_attempts=self.num_taken,
        )

    def end_badly(self, error: BatonError) -> None:
        """The other end: cancelled or failed."""
        attempt = self.attempt
        self._end(Event.CANCELLED if isinstance(error, Cancelled) else Event.FAILED)
        if attempt is not None:
            attempt.cancel()
        self.answer.fail(error)

    def _end(self, event: Event) -> None:
        assert not self.is_over, "a request ends once"
        self.is_over = True
        self.attempt = None
        if self.moves is not None:
            self.moves.end("ended")
        if self._setbacks is not None:
            self._setbacks.trial_ended()
        self.moves = self._setbacks = None  # which have the session
        self.answer.stamp(event)
