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
owner's choice, but for a retry (session_table.py). Sees clock, entropy, engines and the client only
through Protocols; never blocks: the owner calls `tick` at `next_wakeup_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    HandoffFailed,
    NodeLost,
    Overloaded,
    PromiseRefused,
    TrialRefused,
    Unavailable,
)
from ...core.ports import Clock, Entropy
from ...core.request.request import FinishReason
from ...core.request.timeline import Event, Stamp
from ..text.text_stream import TextStream
from ..validation.validation import ValidatedRequest
from .answer import Answer, OutputToken
from .attempt import Attempt
from .engine_link import Avoid, Blocked, Demand, EngineLink, EngineOutput, MustWait, Route, Router
from .move import Moves
from .output_chunk import ChunkSink, OutputChunk, UnfinishedRun
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
        *,
        deadline_s: float,
        arrived: Stamp,
        text: TextStream,
        sink: ChunkSink,
        router: Router,
        clock: Clock,
        entropy: Entropy,
        limits: SessionLimits,
        suspects: Suspects | None = None,
        sample_index: int = 0,
        siblings: Sequence[Session] = (),
    ) -> None:
        self.request_id = request_id
        self.call_id = request_id  # what the client knows all samples by
        self.request = request
        self.sample_index = sample_index
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
        self._answer = Answer(request_id, request, sample_index, text, sink, arrived, clock)
        self.blocked: Blocked | None = None  # why the last try to dispatch did not
        self._queue_until_s = clock.monotonic_s() + limits.max_queue_s
        self._engine_until_s: float | None = None  # while no engine can take it
        self._setbacks: Setbacks | None = None  # from the first attempt on that came to nothing
        self._moves: Moves | None = None  # from its first move on
        self._attempt: Attempt | None = None
        self._last: Attempt | None = None  # the same, and what was the last one
        self._num_attempts = 0
        self._num_refusals = 0  # of them: attempts that came to nothing at once
        self._num_taken = 0  # of them: neither those nor rounds of moves
        self._fingerprint: str | None = None
        self.is_over = False

    def engine_output(self, incarnation: str, output: EngineOutput) -> None:
        """Take what an engine sent; anything of another attempt is dropped."""
        moves = self._moves
        if moves is not None and moves.take(incarnation, output, self._clock.monotonic_s()):
            return
        attempt = self._attempt
        if attempt is None or not attempt.expects(incarnation, output.attempt):
            return
        attempt.note(incarnation, output)
        if isinstance(output.error, PromiseRefused | TrialRefused):
            self._was_sent_back(attempt, incarnation, output.error)
            return
        if output.error is not None:
            # A hand-off fails between two engines: each may be fine with another partner.
            is_pairs = isinstance(output.error, HandoffFailed | NodeLost)
            self._engine_gave_up(attempt, incarnation, output.error, is_pairs=is_pairs)
            return
        try:
            tokens = attempt.add(output, now_s=self._clock.monotonic_s())
        except EngineFailed as error:
            self.fail_attempt(attempt, error, blamed=incarnation)
        else:
            self._advance(attempt, tokens)

    def next_token(self, incarnation: str, attempt_number: int, index: int, token_id: int) -> bool:
        """The usual case of `engine_output`: the next token, of the engine that decodes.

        False: it is not that, and nothing was done.
        """
        attempt, moves, answer = self._attempt, self._moves, self._answer
        if (
            attempt is None
            or (moves is not None and moves.now is not None)
            or self._fingerprint is None
            or (self._setbacks is not None and self._setbacks.is_suspect)
            or answer.text.is_searched
            or not attempt.takes_next(incarnation, attempt_number, index)
        ):
            return False
        if not answer.next(index, token_id):
            self._end_badly(Overloaded(_TOO_SLOW))
        return True

    def engine_lost(self, incarnation: str, *, has_died: bool = False) -> None:
        """An engine's stream ended: what it still owed will not come.

        `has_died`: its supervisor lives and reports that the engine process ended.
        """
        attempt = self._attempt
        if self._moves is not None:
            self._moves.lose(incarnation, has_died=has_died)
        if attempt is not None and incarnation in attempt.pair:
            error = attempt.loss_of(incarnation, has_died=has_died)
            self._engine_gave_up(attempt, incarnation, error)
        elif self._setbacks is not None and not self.is_over:
            late = self._setbacks.engine_lost(incarnation, has_died=has_died)
            if late is not None and not self._may_try_again:
                self._end_badly(late)
            elif late is not None and self._attempt is not None:
                self._setbacks.attempt_began(self._attempt)

    @property
    def unfinished_run(self) -> UnfinishedRun | None:
        """Of one that ended badly; None: no engine had it."""
        last = self._last
        if last is None:
            return None
        return self._answer.unfinished(last.route, is_handed_over=last.is_handed_over)

    @property
    def is_waiting(self) -> bool:
        """For an engine."""
        return self._attempt is None and not self.is_over and not self._is_led

    @property
    def demand(self) -> Demand:
        """What the next dispatch needs, with the samples that it dispatches for."""
        num_samples = 1 if self.is_retry else 1 + len(self._siblings)
        return self._answer.demand(num_samples, is_retry=self.is_retry)

    @property
    def num_outputs(self) -> int:
        """Tokens so far, whoever gets them."""
        return len(self._answer.output_ids)

    @property
    def was_dispatched(self) -> bool:
        """Whether an engine had it, be it that it was sent back: its caller was charged for it."""
        return self._num_attempts > 0

    @property
    def is_retry(self) -> bool:
        """Whether it was dispatched before, and taken, or streams."""
        return self._num_taken > 0 or bool(self._answer.output_ids)

    def cancel(self, error: BatonError) -> None:
        """End early: `Cancelled`, or what made the gateway give up on the client."""
        if not self.is_over:
            self._end_badly(error)

    @property
    def next_wakeup_s(self) -> float:
        """When `tick` has something to do, on the monotonic clock."""
        if self._attempt is not None:
            due_s = min(self._deadline_s, self._attempt.doubt_until_s)
            return due_s if self._moves is None else min(due_s, self._moves.deadline_s)
        waits_s = [self._deadline_s]
        if self._waits_for_its_first_place:
            waits_s.append(self._queue_until_s)
        if self._engine_until_s is not None:
            waits_s.append(self._engine_until_s)
        if self._setbacks is not None:
            waits_s.append(self._setbacks.until_s)
        return min(waits_s)

    def tick(self) -> None:
        """Act on whatever time is up."""
        now_s = self._clock.monotonic_s()
        attempt = self._attempt
        if self.is_over:
            return
        if now_s >= self._deadline_s:
            self._end_badly(DeadlineExceeded("the request's deadline passed"))
        elif attempt is not None and now_s >= attempt.doubt_until_s:
            self.fail_attempt(attempt, attempt.doubt or HandoffFailed("no message came"))
        elif self._moves is not None and self._moves.is_late(now_s):
            return
        elif self._waits_for_its_first_place:
            if now_s >= self._queue_until_s:
                waited_s = self._limits.max_queue_s
                self._end_badly(Overloaded(f"no place became free in {waited_s:g} s"))
        else:
            self.try_dispatch()

    @property
    def _waits_for_its_first_place(self) -> bool:
        return self.is_waiting and not self.is_retry and self.blocked is not Blocked.ENGINE

    def try_dispatch(self, without: str | None = None) -> None:
        """Find engines, but for the one `without`, and dispatch, or wait for them as long as that
        makes sense; `blocked` is why. Does nothing unless it waits."""
        if not self.is_waiting:
            return
        try:
            route = self._find_engines(without)
        except BatonError as error:
            self._end_badly(error)
            return
        if route is None:
            return
        siblings = () if self.is_retry else self._siblings
        attempt = self._begin_attempt(route)
        for sibling in siblings:
            sibling._begin_attempt(route)
        fork_ids = tuple(sibling.request_id for sibling in siblings)
        # An engine may send it back: not for ever, and not once it was taken.
        may_refuse = self._num_taken == 1 and not self._siblings
        may_refuse = may_refuse and self._num_refusals < _MAX_REFUSALS
        attempt.send(
            self._entropy,
            self._deadline_s - self._clock.monotonic_s(),
            fork_ids,
            may_refuse=may_refuse,
            trial_side=None if self._setbacks is None else self._setbacks.suspect_side,
        )

    def _find_engines(self, without: str | None) -> Route | None:
        """None: none now. Raises what ends the request: no engine came in time, or its call has
        killed too many."""
        now_s, setbacks, avoid = self._clock.monotonic_s(), self._setbacks, Avoid()
        if setbacks is not None:
            if not setbacks.may_try():
                self.blocked = None
                return None
            avoid = setbacks.avoid
        if without is not None:
            avoid = Avoid(avoid.incarnations | {without}, avoid.pairs)
        try:
            route = self._router.choose(self.demand, avoid=avoid, fingerprint=self._fingerprint)
        except MustWait as wait:
            self.blocked, self._engine_until_s = wait.reason, None
            return None
        except Unavailable:
            if setbacks is not None and setbacks.waits_for_trials():
                self.blocked = self._engine_until_s = None
                return None
            self.blocked = Blocked.ENGINE
            if self._engine_until_s is None:
                self._engine_until_s = now_s + self._limits.recovery_wait_s
            elif now_s >= self._engine_until_s:
                raise
            return None
        self.blocked = self._engine_until_s = None
        return route

    def _begin_attempt(self, route: Route) -> Attempt:
        self._attempt = self._last = attempt = self._new_attempt(route)
        if self._setbacks is not None:
            self._setbacks.attempt_began(attempt)
        self._num_taken += 1
        self._is_led = False
        self._answer.stamp(Event.ROUTED)
        return attempt

    def dispatch_beside(self, route: Route) -> Attempt:
        """See MovingSession."""
        attempt = self._new_attempt(route)
        remaining_s = self._deadline_s - self._clock.monotonic_s()
        attempt.send(self._entropy, remaining_s, may_refuse=True)
        return attempt

    def _new_attempt(self, route: Route) -> Attempt:
        """The next, from the tokens so far on."""
        self._num_attempts += 1
        return Attempt(self._num_attempts - 1, route, self._answer)

    def _was_sent_back(self, attempt: Attempt, incarnation: str, error: BatonError) -> None:
        """The engine did not take it: where another gateway's suspect is on trial, it goes
        elsewhere, or there once that is over. Where it would break the engine's promise, plan once
        more without that one, then wait in the queue as if it had never been dispatched."""
        attempt.close(incarnation)
        attempt.cancel()
        self._attempt = None
        if self._moves is not None:
            self._moves.target_ended(attempt, "refused")
        if self._setbacks is not None:
            self._setbacks.trial_ended()
        self._num_taken -= 1
        self._num_refusals += 1
        if isinstance(error, TrialRefused):
            self._setback().leave_out(incarnation, attempt.pair)
            return
        if self._num_refusals == 1:
            self.try_dispatch(without=incarnation)
        if self.is_waiting:
            self.blocked, self._engine_until_s = Blocked.PLACE, None

    def _setback(self) -> Setbacks:
        """There is one."""
        if self._setbacks is None:
            rules = self._limits, self._suspects
            self._setbacks = Setbacks(self._answer, self.call_id, *rules, self._clock)
        return self._setbacks

    def _engine_gave_up(
        self, attempt: Attempt, incarnation: str, error: BatonError, *, is_pairs: bool = False
    ) -> None:
        """An engine of this attempt failed it or is gone; the attempt may survive that."""
        attempt.close(incarnation)
        if not attempt.survives(incarnation, error, now_s=self._clock.monotonic_s()):
            if is_pairs:
                self.fail_attempt(attempt, error, silent=attempt.partner_of(incarnation))
            else:
                self.fail_attempt(attempt, error, blamed=incarnation)

    def fail_attempt(
        self,
        attempt: Attempt,
        error: BatonError,
        *,
        blamed: str | None = None,
        silent: EngineLink | None = None,
    ) -> None:
        """Give this attempt up; try again if that can help. `blamed` None: the pair."""
        attempt.cancel()
        self._attempt, moves = None, self._moves
        if moves is not None:
            moves.target_ended(attempt, "lost")
        self._setback().attempt_failed(attempt, error, blamed, silent)
        if self.num_outputs == self.request.sampling.max_tokens:
            # All tokens are out: only the message that ends it was lost.
            self._finish(attempt, FinishReason.LENGTH, *self._answer.add([]))
        elif error.is_retryable and self._may_try_again:
            if moves is not None:
                self._attempt = moves.take_over(is_suspect=self._is_suspect)
            self._last = self._attempt or attempt
            if self._attempt is None:
                self.try_dispatch()
            else:
                self._num_taken += 1  # as a retry
        else:
            self._end_badly(error)

    @property
    def _may_try_again(self) -> bool:
        is_left = self._num_taken < self._limits.max_attempts
        return is_left and not (self._setbacks and self._setbacks.is_convicted)

    @property
    def _is_suspect(self) -> bool:
        return self._setbacks is not None and self._setbacks.is_suspect

    @property
    def movable_from(self) -> str | None:
        """The engine that it decodes on, if it may be moved from there now. Samples of one prompt
        share blocks, and stay."""
        attempt = self._attempt
        is_alone = not self._siblings and not self.sample_index
        may_move = is_alone and self._answer.output_ids and not self._is_suspect
        if attempt is None or not attempt.is_decoding or not may_move:
            return None
        is_time = self._moves is None or self._moves.may_begin(self._clock.monotonic_s())
        return attempt.pair[1] if is_time else None

    def begin_move(self, route: Route, on_over: Callable[[str], None]) -> None:
        """To another engine of this model, while `movable_from`; move.py has what follows."""
        assert self._attempt is not None and route.decode.fingerprint == self._fingerprint
        if self._moves is None:
            self._moves = Moves(self, self._answer.output_ids)
        self._moves.begin(route, self._attempt, self._clock.monotonic_s(), on_over)

    def go_on_with(self, attempt: Attempt, fresh: list[OutputToken]) -> None:
        """See MovingSession, as of what follows."""
        if self._attempt is not None and self._attempt is not attempt:
            self._attempt.cancel()
        self._attempt = self._last = attempt
        self._advance(attempt, fresh)

    def _advance(self, attempt: Attempt, tokens: list[OutputToken]) -> None:
        """Pass tokens on that are now in order, and finish where they are the last."""
        chunk, matched_stop = self._answer.add(tokens)
        if chunk.token_ids and self._fingerprint is None:
            self._fingerprint = attempt.route.prefill.fingerprint
        if self._setbacks is not None:
            self._setbacks.got_further()
        if matched_stop is not None:
            self._finish(attempt, FinishReason.STOP, chunk, matched_stop)
        elif attempt.is_complete and attempt.finish_reason is not None:
            self._finish(attempt, attempt.finish_reason, chunk)
        elif not self._answer.send(chunk):
            self._end_badly(Overloaded(_TOO_SLOW))

    def _finish(
        self,
        attempt: Attempt,
        reason: FinishReason,
        chunk: OutputChunk,
        matched_stop: str | None = None,
    ) -> None:
        """The good end. Whoever still holds the request gets a Cancel."""
        self._end(Event.FINISHED)
        attempt.cancel()
        self._answer.finish(
            attempt.route,
            reason,
            chunk,
            matched_stop,
            is_handed_over=attempt.is_handed_over,
            num_attempts=self._num_taken,
        )

    def _end_badly(self, error: BatonError) -> None:
        """The other end: cancelled or failed."""
        attempt = self._attempt
        self._end(Event.CANCELLED if isinstance(error, Cancelled) else Event.FAILED)
        if attempt is not None:
            attempt.cancel()
        self._answer.fail(error)

    def _end(self, event: Event) -> None:
        assert not self.is_over, "a request ends once"
        self.is_over = True
        self._attempt = None
        if self._moves is not None:
            self._moves.end("ended")
        if self._setbacks is not None:
            self._setbacks.trial_ended()
        self._answer.stamp(event)
