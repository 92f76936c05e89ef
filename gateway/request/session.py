"""One request's life, from its arrival to its one terminal event.

    WAITING ──dispatched───► RUNNING ──last token──────────► ENDED (finished)
       ▲                       │ │ └──cancel, deadline─────► ENDED (cancelled, failed)
       └──attempt failed, ─────┘ └──attempts used up───────► ENDED (failed)
          retryable

An *attempt* is one dispatch to a prefill and a decode engine. When one fails, the tokens already
streamed go with the next as `output_token_ids`, and both engines of the old one get a Cancel; what
still comes from them is dropped by its attempt number. A running request may be moved to another
engine (move.py), by a second attempt beside the first. Of several samples of one prompt the first
dispatches for all, once; from then on each is a session like any other. When a waiting session
tries to dispatch is its owner's choice, but for a retry, which goes first (session_table.py). Sees
clock, entropy, engines and the client only through Protocols; never blocks: the owner calls `tick`
at `next_wakeup_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    HandoffFailed,
    NodeLost,
    Overloaded,
    PromiseRefused,
    Unavailable,
)
from ...core.ports import Clock, Entropy
from ...core.request.request import FinishReason, Request, SamplingParams, Ticket
from ...core.request.timeline import TERMINAL, Event, Stamp
from ..text.text_stream import TextStream
from ..validation.validation import ValidatedRequest
from .attempt import Attempt, OutputToken
from .engine_link import (
    Avoid,
    Blocked,
    Demand,
    EngineOutput,
    MustWait,
    Route,
    Router,
    TransferSummary,
    Work,
)
from .move import Move, MovePause, MoveStep
from .output_chunk import ChunkSink, OutputChunk, PromptScores, RequestResult, UnfinishedRun
from .suspects import EngineDeaths, Suspects

GATEWAY = "gateway"
_MAX_REFUSALS = 2  # of one request; then the next engine has to take it


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long and how often a request tries.

    `max_engine_failures`: engines that may die under one request, since it may be what kills them,
    unless it has got further in between (suspects.py).
    `recovery_wait_s`: wait for an engine where none can take it. `avoid_s`: how long a failed
    engine is left out even if it is the only one; covers the age of heartbeats. `settle_s`: the end
    of a node is noticed on several streams, in any order; a retry waits until all were received.
    `max_queue_s`: wait for a place on engines that are there, of what was never dispatched.
    """

    max_attempts: int = 3
    max_engine_failures: int = 2
    recovery_wait_s: float = 10.0
    avoid_s: float = 0.3
    settle_s: float = 0.02
    max_queue_s: float = math.inf


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
        self.timeline = [arrived]
        self._deadline_s = deadline_s
        self._queue_until_s = clock.monotonic_s() + limits.max_queue_s
        self._text = text
        self._sink = sink
        self._router = router
        self._clock = clock
        self._entropy = entropy
        self._limits = limits
        self._output_ids: list[int] = []
        self._prompt_scores = PromptScores(len(request.prompt_token_ids))
        self._attempt: Attempt | None = None
        self._last: Attempt | None = None  # the same, and what was the last one
        self._num_attempts = 0
        self._num_refusals = 0  # of them: attempts that came to nothing at once
        self._num_rounds = 0  # of them: of moves
        self._move: Move | None = None
        self._move_pause = MovePause()
        self._suspects = Suspects() if suspects is None else suspects
        self._deaths = EngineDeaths(request_id, self._suspects, limits.max_engine_failures)
        self._fingerprint: str | None = None
        self._avoid = Avoid()
        self._avoid_until_s = 0.0
        self._wait_until_s: float | None = None
        self._settle_until_s: float | None = None
        self.blocked: Blocked | None = None  # why the last try to dispatch did not
        self._cached_tokens = 0
        self._transfer: TransferSummary | None = None
        self.is_over = False

    # --- what the owner calls ---------------------------------------------------------------------

    def try_dispatch(self) -> None:
        """Find engines and dispatch, or wait; `blocked` is why. Does nothing unless it waits."""
        if self.is_waiting:
            self._try_dispatch()

    def engine_output(self, incarnation: str, output: EngineOutput) -> None:
        """Take what an engine sent; anything of another attempt is dropped."""
        if self._move is not None and self._go_on_moving(self._move, incarnation, output):
            return
        attempt = self._attempt
        if attempt is None or not attempt.expects(incarnation, output.attempt):
            return
        self._note(attempt, incarnation, output)
        if output.finish_reason is not None:
            attempt.close(incarnation)
        if isinstance(output.error, PromiseRefused):
            self._was_refused(attempt, incarnation)
            return
        if output.error is not None:
            # A hand-off fails between two engines: each may be fine with another partner.
            is_pair_fault = isinstance(output.error, HandoffFailed | NodeLost)
            self._engine_gave_up(attempt, incarnation, output.error, is_pair_fault=is_pair_fault)
            return
        try:
            if output.prompt_logprobs:
                self._prompt_scores.add(output.first_prompt_index, output.prompt_logprobs)
            tokens = attempt.add(output, now_s=self._clock.monotonic_s())
        except EngineFailed as error:
            self._fail_attempt(attempt, error, blamed=incarnation)
            return
        self._advance(attempt, tokens)

    def next_token(self, incarnation: str, attempt_number: int, index: int, token_id: int) -> bool:
        """The usual case of `engine_output`: the next token, of the engine that decodes.

        False: it is not that, and nothing was done.
        """
        attempt = self._attempt
        if (
            attempt is None
            or self._move is not None
            or self._fingerprint is None
            or self._deaths.is_suspect
            or self._text.is_searched
            or not attempt.takes_next(incarnation, attempt_number, index)
        ):
            return False
        self._output_ids.append(token_id)
        text = self._text.next(token_id)
        if not self._sink.emit(OutputChunk(text, (token_id,), index, None, self.sample_index)):
            self._end_too_slow()
        return True

    def engine_lost(self, incarnation: str, *, has_died: bool = False) -> None:
        """An engine's stream ended: what it still owed will not come.

        `has_died`: its supervisor lives and reports that the engine process ended.
        """
        move, attempt = self._move, self._attempt
        if move is not None and move.has_source and incarnation in move.target.pair:
            self._fail_move(move, "lost")
        if attempt is None or incarnation not in attempt.pair:
            if has_died and not self.is_over:
                self._blame_late(incarnation)
            return
        name = attempt.name_of(incarnation)
        error: BatonError = NodeLost(f"node {name} was lost")
        if has_died:
            error = EngineFailed(f"the engine of node {name} died")
        self._engine_gave_up(attempt, incarnation, error, is_pair_fault=False)

    @property
    def is_waiting(self) -> bool:
        """For an engine."""
        return self._attempt is None and not self.is_over and not self._is_led

    @property
    def demand(self) -> Demand:
        """What the next dispatch needs."""
        return Demand(
            num_tokens=len(self.request.prompt_token_ids) + len(self._output_ids),
            num_sequences=self._num_sequences,
            max_output_tokens=self.request.sampling.max_tokens - len(self._output_ids),
            is_retry=self.is_retry,
            tbt_target_s=self.request.sampling.tbt_target_ms / 1000,
        )

    @property
    def _num_sequences(self) -> int:
        """That decode for it, and for those it dispatches for."""
        sampling = self.request.sampling
        if sampling.use_beam_search:
            return sampling.best_of
        return 1 if self.is_retry else 1 + len(self._siblings)

    @property
    def was_dispatched(self) -> bool:
        """Whether an engine had it, be it that it was sent back: its caller was charged for it."""
        return self._num_attempts > 0

    @property
    def is_retry(self) -> bool:
        """Whether it was dispatched before, and taken."""
        return self._num_taken > 0

    @property
    def _num_taken(self) -> int:
        return self._num_attempts - self._num_refusals - self._num_rounds

    def cancel(self, error: BatonError) -> None:
        """End early: `Cancelled`, or what made the gateway give up on the client."""
        if not self.is_over:
            self._end_badly(error)

    @property
    def next_wakeup_s(self) -> float:
        """When `tick` has something to do, on the monotonic clock."""
        if self._attempt is not None:
            move_until_s = math.inf if self._move is None else self._move.deadline_s
            return min(self._deadline_s, self._attempt.doubt_until_s, move_until_s)
        waits = [self._deadline_s]
        if self._waits_for_its_first_place:
            waits.append(self._queue_until_s)
        if self._settle_until_s is not None:
            waits.append(self._settle_until_s)
        if self._wait_until_s is not None:
            waits.append(self._wait_until_s)
        if self._avoid:
            waits.append(self._avoid_until_s)
        return min(waits)

    def tick(self) -> None:
        """Act on whatever time is up."""
        now_s = self._clock.monotonic_s()
        attempt = self._attempt
        if self.is_over:
            return
        if now_s >= self._deadline_s:
            self._end_badly(DeadlineExceeded("the request's deadline passed"))
        elif attempt is not None and now_s >= attempt.doubt_until_s:
            self._fail_attempt(
                attempt, attempt.doubt or HandoffFailed("no message came"), blamed=None
            )
        elif self._move is not None and now_s >= self._move.deadline_s:
            self._fail_move(self._move, "late")
        elif self._waits_for_its_first_place:
            if now_s >= self._queue_until_s:
                longest_s = self._limits.max_queue_s
                self._end_badly(Overloaded(f"no place became free in {longest_s:g} s"))
        elif self.is_waiting:
            self._try_dispatch()

    @property
    def _waits_for_its_first_place(self) -> bool:
        return self.is_waiting and not self.is_retry and self.blocked is not Blocked.ENGINE

    # --- attempts ---------------------------------------------------------------------------------

    def _try_dispatch(self) -> None:
        """Dispatch the next attempt, or wait for engines as long as that makes sense."""
        now_s = self._clock.monotonic_s()
        if self._settle_until_s is not None:
            if now_s < self._settle_until_s:
                self.blocked = None
                return
            self._settle_until_s = None
        if self._avoid and now_s >= self._avoid_until_s:
            self._avoid = Avoid()
        avoid = self._avoid
        if self._deaths.is_suspect:
            if error := self._suspects.convicted.get(self.call_id):
                self._end_badly(error)
                return
            if self._suspects.tries(self.call_id):
                self.blocked, self._settle_until_s = None, now_s + self._limits.settle_s
                return
            avoid = self._suspects.keep_clear(avoid)
        try:
            route = self._router.choose(self.demand, avoid=avoid, fingerprint=self._fingerprint)
        except MustWait as wait:
            self.blocked, self._wait_until_s = wait.reason, None
            return
        except Unavailable as unavailable:
            self.blocked = Blocked.ENGINE
            if avoid != self._avoid:  # until another suspect's trial is over
                self.blocked, self._wait_until_s = None, None
                self._settle_until_s = now_s + self._limits.settle_s
            elif self._wait_until_s is None:
                self._wait_until_s = now_s + self._limits.recovery_wait_s
            elif now_s >= self._wait_until_s:
                self._end_badly(unavailable)
            return
        self.blocked = self._wait_until_s = None
        siblings = () if self.is_retry else self._siblings
        attempt = self._begin_attempt(route)
        for sibling in siblings:
            sibling._begin_attempt(route)
        self._send(attempt, now_s, tuple(sibling.request_id for sibling in siblings))

    def _begin_attempt(self, route: Route) -> Attempt:
        self._attempt = self._last = attempt = self._new_attempt(route)
        self._deaths.attempt_began(self.call_id, attempt.pair)
        self._is_led = False
        self._stamp(Event.ROUTED)
        return attempt

    def _new_attempt(self, route: Route) -> Attempt:
        """The next, from the tokens so far on."""
        self._num_attempts += 1
        return Attempt(
            number=self._num_attempts - 1,
            route=route,
            base_index=len(self._output_ids),
            max_tokens=self.request.sampling.max_tokens,
            is_search=self.request.sampling.use_beam_search,
        )

    def _send(self, attempt: Attempt, now_s: float, fork_ids: tuple[str, ...]) -> None:
        """Hand the attempt to its two engines, or to the one."""
        prefill, decode = attempt.route.prefill, attempt.route.decode
        request = self._wire_request(attempt, fork_ids, may_refuse=self._may_refuse)
        remaining_s = self._deadline_s - now_s
        if attempt.route.is_local:
            decode.dispatch(request, Work.LOCAL, None, remaining_s)
            return
        ticket = Ticket(self._entropy.new_id(), prefill.incarnation, decode.incarnation)
        prefill.dispatch(request, Work.PREFILL, ticket, remaining_s)
        decode.dispatch(request, Work.DECODE, ticket, remaining_s)

    def _wire_request(
        self, attempt: Attempt, fork_ids: tuple[str, ...] = (), *, may_refuse: bool
    ) -> Request:
        """The attempt as engines get it."""
        return Request(
            request_id=self.request_id,
            attempt=attempt.number,
            prompt_token_ids=self.request.prompt_token_ids,
            sampling=self._wanted_sampling(),
            output_token_ids=tuple(self._output_ids),
            cache_salt=self.request.options.cache_salt,
            sample_index=self.sample_index,
            fork_ids=fork_ids,
            caller_id=self.request.caller_id,
            may_refuse=may_refuse,
            adapter=self.request.adapter,
        )

    def _wanted_sampling(self) -> SamplingParams:
        """Without what is known already, or another sample's to request."""
        sampling = self.request.sampling
        if self.sample_index or self._prompt_scores.is_complete:
            return replace(sampling, prompt_logprobs=None)
        return sampling

    @property
    def _may_refuse(self) -> bool:
        """Whether an engine may send it back: not for ever, and not once it was taken."""
        return self._num_taken == 1 and not self._siblings and self._num_refusals < _MAX_REFUSALS

    def _was_refused(self, attempt: Attempt, incarnation: str) -> None:
        """It would break an engine's promise: plan once more without that one, then wait in the
        queue as if it had never been dispatched."""
        attempt.close(incarnation)
        attempt.cancel(self.request_id)
        self._attempt = None
        self._deaths.ended()
        self._num_refusals += 1
        if self._num_refusals == 1:
            refused = Avoid(self._avoid.incarnations | {incarnation}, self._avoid.pairs)
            before = self._avoid, self._avoid_until_s
            self._avoid = refused
            self._avoid_until_s = self._clock.monotonic_s() + self._limits.avoid_s
            self._try_dispatch()
            self._avoid, self._avoid_until_s = before
        if self.is_waiting:
            self.blocked, self._wait_until_s = Blocked.PLACE, None

    def _engine_gave_up(
        self, attempt: Attempt, incarnation: str, error: BatonError, *, is_pair_fault: bool
    ) -> None:
        """An engine of this attempt failed it or is gone; the attempt may survive that."""
        attempt.close(incarnation)
        if attempt.survives(incarnation, error, now_s=self._clock.monotonic_s()):
            return
        self._fail_attempt(attempt, error, blamed=None if is_pair_fault else incarnation)

    def _fail_attempt(self, attempt: Attempt, error: BatonError, *, blamed: str | None) -> None:
        """Give this attempt up; try again if that can help. `blamed` None: the pair."""
        attempt.cancel(self.request_id)
        self._attempt = None
        if self._move is not None and attempt is self._move.target:
            self._end_move(self._move, "lost")
        if blamed is None:
            self._avoid = Avoid(self._avoid.incarnations, self._avoid.pairs | {attempt.pair})
        else:
            self._avoid = Avoid(self._avoid.incarnations | {blamed}, self._avoid.pairs)
        now_s = self._clock.monotonic_s()
        self._avoid_until_s = now_s + self._limits.avoid_s
        self._settle_until_s = now_s + self._limits.settle_s
        num_tokens = len(self._output_ids)
        self._deaths.attempt_failed(
            self.call_id, attempt.pair, blamed, error, num_tokens=num_tokens, now_s=now_s
        )
        if num_tokens == self.request.sampling.max_tokens:
            # All tokens are out: only the message that ends it was lost.
            self._finish(attempt, FinishReason.LENGTH, self._text.flush(), [])
        elif error.is_retryable and self._may_try_again:
            if not self._has_moved_in_time():
                self._try_dispatch()
        else:
            self._end_badly(error)

    def _blame_late(self, died: str) -> None:
        """An engine died that the attempt before may have failed for."""
        num_tokens, now_s = len(self._output_ids), self._clock.monotonic_s()
        error = self._deaths.died_late(self.call_id, died, num_tokens=num_tokens, now_s=now_s)
        if error is None:
            return
        if not self._may_try_again:
            self._end_badly(error)
        elif self._attempt is not None:
            self._deaths.attempt_began(self.call_id, self._attempt.pair)

    @property
    def _may_try_again(self) -> bool:
        is_left = self._num_taken < self._limits.max_attempts
        return is_left and not self._deaths.is_convicted

    # --- moves ------------------------------------------------------------------------------------

    @property
    def movable_from(self) -> str | None:
        """The engine that it decodes on, if it may be moved from there now. Samples of one prompt
        share blocks, and stay."""
        attempt = self._attempt
        if attempt is None or not attempt.is_decoding or self._move is not None:
            return None
        is_alone = not self._siblings and not self.sample_index
        may_move = is_alone and self._output_ids and not self._deaths.is_suspect
        if not may_move or not self._move_pause.is_over(self._clock.monotonic_s()):
            return None
        return attempt.pair[1]

    def begin_move(self, route: Route, on_over: Callable[[str], None]) -> None:
        """To another engine of this model, while `movable_from`; move.py has what follows."""
        now_s = self._clock.monotonic_s()
        assert self._attempt is not None and route.decode.fingerprint == self._fingerprint
        self._move_pause.begin(now_s)
        self._move = Move(route, self._attempt, now_s, on_over)
        self._begin_round(self._move)

    def _begin_round(self, move: Move) -> None:
        target = self._new_attempt(move.route)
        self._num_rounds += 1
        link = move.begin_round(target, self.request_id, len(self._output_ids))
        request = self._wire_request(target, may_refuse=True)
        remaining_s = self._deadline_s - self._clock.monotonic_s()
        link.dispatch(request, Work.LOCAL, None, remaining_s)

    def _go_on_moving(self, move: Move, incarnation: str, output: EngineOutput) -> bool:
        """Whether the output was the move's."""
        step = move.take(incarnation, output, self._output_ids, self._clock.monotonic_s())
        if step is MoveStep.NEXT_ROUND:
            self._begin_round(move)
        elif step is MoveStep.ARRIVED:
            self._arrive(move)
        elif step is MoveStep.FAILED:
            self._fail_move(move, move.failure)
        return step is not MoveStep.NOT_ITS

    def _arrive(self, move: Move) -> None:
        """The old engine is not needed any more."""
        if move.has_source and self._attempt is not None:
            self._attempt.cancel(self.request_id)
        self._attempt = self._last = move.target
        self._move = None
        move.over("moved")
        self._advance(move.target, move.fresh)

    def _fail_move(self, move: Move, how: str) -> None:
        """Stay on the old engine; without it, try again as ever."""
        if not move.has_source:
            error = HandoffFailed("the engine that a request was moved to did not go on with it")
            self._fail_attempt(move.target, error, blamed=None)
            return
        self._move_pause.failed()
        self._end_move(move, how)
        for incarnation, output in move.kept_back:
            self.engine_output(incarnation, output)

    def _end_move(self, move: Move, how: str) -> None:
        self._move = None
        move.target.cancel(self.request_id)
        move.over(how)

    def _has_moved_in_time(self) -> bool:
        """The old engine failed: whether the new one goes on instead of a retry. Not where the
        request may be what killed it: suspects are tried one at a time."""
        move = self._move
        if move is None:
            return False
        if self._deaths.is_suspect:
            self._end_move(move, "lost")
            return False
        move.lose_source()
        self._attempt = self._last = move.target
        self._num_rounds -= 1  # it counts as the retry
        return True

    # --- tokens -----------------------------------------------------------------------------------

    def _note(self, attempt: Attempt, incarnation: str, output: EngineOutput) -> None:
        """Keep what an output has beside its tokens. Terminal events are ours alone to give."""
        if output.stamps:
            self.timeline += [stamp for stamp in output.stamps if stamp.event not in TERMINAL]
        if output.cached_tokens is not None and incarnation == attempt.pair[0]:
            self._cached_tokens = min(output.cached_tokens, len(self.request.prompt_token_ids))
        if output.transfer is not None:
            self._transfer = output.transfer
        if not attempt.is_handed_over and incarnation == attempt.pair[1]:
            attempt.note_decode_progress(output)

    def _advance(self, attempt: Attempt, tokens: list[OutputToken]) -> None:
        """Pass tokens on that are now in order, and finish where they are the last."""
        piece = self._text.feed([token_id for token_id, _ in tokens])
        shown = tokens[: piece.num_tokens]
        self._output_ids += [token_id for token_id, _ in shown]
        if shown and self._fingerprint is None:
            self._fingerprint = attempt.route.prefill.fingerprint
        self._deaths.got_to(len(self._output_ids))
        if piece.matched_stop is not None:
            self._finish(attempt, FinishReason.STOP, piece.text, shown, piece.matched_stop)
        elif attempt.is_complete and attempt.finish_reason is not None:
            self._finish(attempt, attempt.finish_reason, piece.text + self._text.flush(), shown)
        elif shown and not self._sink.emit(self._chunk(piece.text, shown)):
            self._end_too_slow()

    def _chunk(
        self, text: str, shown: list[OutputToken], result: RequestResult | None = None
    ) -> OutputChunk:
        """The newest tokens for the client."""
        index = len(self._output_ids) - len(shown)
        return OutputChunk(
            text,
            tuple([token_id for token_id, _ in shown]),
            index,
            result,
            self.sample_index,
            tuple([logprobs for _, logprobs in shown if logprobs is not None]),
            self._prompt_scores.all() if index == 0 else (),
        )

    # --- the end ----------------------------------------------------------------------------------

    def _finish(
        self,
        attempt: Attempt,
        reason: FinishReason,
        text: str,
        shown: list[OutputToken],
        matched_stop: str | None = None,
    ) -> None:
        """The good end. Whoever still holds the request gets a Cancel."""
        self._end(Event.FINISHED)
        attempt.cancel(self.request_id)
        result = RequestResult(
            finish_reason=reason,
            matched_stop=matched_stop,
            prompt_tokens=len(self.request.prompt_token_ids),
            completion_tokens=len(self._output_ids),
            cached_tokens=self._cached_tokens,
            prefill_node=attempt.route.prefill.name,
            decode_node=attempt.route.decode.name if attempt.is_handed_over else None,
            transfer=self._transfer,
            attempts=self._num_taken,
            seed=self.request.sampling.seed,
            timeline=tuple(self.timeline),
        )
        self._sink.emit(self._chunk(text, shown, result))

    @property
    def unfinished_run(self) -> UnfinishedRun | None:
        """Of one that ended badly; None: no engine had it."""
        if (last := self._last) is None:
            return None
        return UnfinishedRun(
            last.route.prefill.name,
            last.route.decode.name,
            last.is_handed_over,
            self._transfer,
            len(self._output_ids),
            tuple(self.timeline),
        )

    def _end_badly(self, error: BatonError) -> None:
        """The other end: cancelled or failed."""
        attempt = self._attempt
        self._end(Event.CANCELLED if isinstance(error, Cancelled) else Event.FAILED)
        if attempt is not None:
            attempt.cancel(self.request_id)
        self._sink.fail(error)

    def _end_too_slow(self) -> None:
        self._end_badly(Overloaded("the client reads too slowly; its stream was ended"))

    def _end(self, event: Event) -> None:
        assert not self.is_over, "a request ends once"
        self.is_over = True
        self._attempt = None
        if self._move is not None:
            self._end_move(self._move, "ended")
        self._deaths.ended()
        self._stamp(event)

    def _stamp(self, event: Event) -> None:
        self.timeline.append(Stamp(event, self._clock.unix_ns(), GATEWAY))
