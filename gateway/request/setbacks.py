"""What happens to a request when an attempt fails or is sent back: whether it tries again, which
engines it avoids, and what it waits for before.

    fails on an engine ──► settle: all streams report a node's end, in any order
    fails since an engine's partner is silent ──► until that sends again, or its end is reported
                      └──► avoid: that engine, or the pair, is left out for a moment
A request that may have killed an engine is a suspect as well (suspects.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ...core.errors import (
    BatonError,
    Cancelled,
    EngineFailed,
    HandoffFailed,
    NodeLost,
    PromiseRefused,
    TrialRefused,
)
from ...core.ports import Clock
from ...core.request.request import FinishReason
from .attempt import Attempt
from .engine_link import Avoid, Blocked, EngineLink
from .move import Moves, MovingSession
from .output_chunk import OutputChunk, UnfinishedRun
from .session_output import SessionOutput
from .suspects import LATE_S, Suspects, Suspicion


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long and how often a request tries.

    `max_engine_failures`: engines that may die under one request, since it may be what kills them,
    unless it has got further in between. `recovery_wait_s`: wait for an engine where none can take
    it. `avoid_s`: how long a failed engine is left out even if it is the only one; covers the age
    of heartbeats. `settle_s`: the end of a node is noticed on several streams, in any order; a
    retry waits until all were received. `max_queue_s`: wait for a place on engines that are there,
    of what was never dispatched.
    """

    max_attempts: int = 3
    max_engine_failures: int = 2
    recovery_wait_s: float = 10.0
    avoid_s: float = 0.3
    settle_s: float = 0.02
    max_queue_s: float = math.inf


class FailingSession(MovingSession, Protocol):
    """What the setbacks of a request need of its session. `last_attempt`: the current attempt, or
    the one before; `num_taken`: attempts that count; `queue_until_s`: when it gives up waiting for
    a place."""

    call_id: str
    limits: SessionLimits
    suspects: Suspects
    clock: Clock
    moves: Moves | None
    last_attempt: Attempt | None
    num_taken: int
    queue_until_s: float
    setbacks: Setbacks | None
    is_over: bool

    @property
    def is_waiting(self) -> bool: ...

    def try_dispatch(self) -> None: ...

    def block(self, reason: Blocked | None) -> None: ...

    def finish(self, attempt: Attempt, reason: FinishReason, chunk: OutputChunk) -> None: ...

    def end_badly(self, error: BatonError) -> None: ...


def setbacks_of(session: FailingSession) -> Setbacks:
    """Its setbacks, which a session has from the first one on."""
    if session.setbacks is None:
        session.setbacks = Setbacks(session)
    return session.setbacks


def engine_lost(session: FailingSession, incarnation: str, *, has_died: bool = False) -> None:
    """The stream of an engine ended: what it still owed will not come.

    `has_died`: its supervisor lives and reports that the engine process ended.
    """
    if session.moves is not None:
        session.moves.lose(incarnation, has_died=has_died)
    if session.attempt is not None and incarnation in session.attempt.pair:
        setbacks_of(session).engine_lost(session.attempt, incarnation, has_died=has_died)
    elif session.setbacks is not None and not session.is_over:
        session.setbacks.another_lost(incarnation, has_died=has_died)


def unfinished_run(session: FailingSession) -> UnfinishedRun | None:
    """Where a request was that ended badly; None: it was never dispatched."""
    if (last := session.last_attempt) is None:
        return None
    return UnfinishedRun(
        last.route.prefill.name,
        last.route.decode.name,
        last.is_handed_over,
        session.answer.transfer,
        len(session.answer.output_ids),
        tuple(session.answer.timeline),
    )


class Setbacks:
    """Those of one session, from its first failed attempt on. `suspicion`: whether it may be what
    kills engines; `num_refusals`: attempts that an engine sent back at once."""

    def __init__(self, session: FailingSession) -> None:
        self.num_refusals = 0
        self._session = session
        self._limits = session.limits
        self._clock = session.clock
        self.suspicion = Suspicion(
            session.call_id,
            session.answer.request_id,
            session.answer.output_ids,
            session.limits.max_engine_failures,
            session.suspects,
        )
        self._avoid = Avoid()
        self._avoid_until_s = 0.0
        self._settle_until_s: float | None = None
        self._silent: tuple[EngineLink, float] | None = None  # since when

    @property
    def is_suspect(self) -> bool:
        return self.suspicion.side is not None

    @property
    def _may_try_again(self) -> bool:
        has_attempts = self._session.num_taken < self._limits.max_attempts
        return has_attempts and not self.suspicion.is_convicted

    # --- before the next attempt ------------------------------------------------------------------

    def may_try(self) -> bool:
        """Whether the next attempt may begin now. Raises what ends the request: its call has
        killed too many engines."""
        now_s = self._clock.monotonic_s()
        if self._settle_until_s is not None and now_s < self._settle_until_s:
            return False
        self._settle_until_s = None
        if self._silent is not None:
            partner, since_s = self._silent
            if partner.reported_s < since_s + self._limits.settle_s and now_s < since_s + LATE_S:
                return self._settle()
            self._end_silence()
        if self._avoid and now_s >= self._avoid_until_s:
            self._avoid = Avoid()
        return not self.suspicion.must_wait() or self._settle()

    @property
    def avoid(self) -> Avoid:
        """Engines and pairs that the next attempt must not use."""
        return self._avoid | self.suspicion.avoid

    def waits_for_trials(self) -> bool:
        """Whether there may be engines for it once the trials of other suspects are over."""
        return self.avoid != self._avoid and not self._settle()

    @property
    def until_s(self) -> float:
        """When the next wait ends; none does before all has settled."""
        if self._settle_until_s is not None:
            return self._settle_until_s
        return self._avoid_until_s if self._avoid else math.inf

    def _end_silence(self) -> None:
        self._silent = None
        self.suspicion.end_trial()

    def _settle(self) -> bool:
        """False: it may not try now."""
        self._settle_until_s = self._clock.monotonic_s() + self._limits.settle_s
        return False

    # --- events -----------------------------------------------------------------------------------

    def engine_failed(self, attempt: Attempt, incarnation: str, error: BatonError) -> None:
        """An engine of this attempt reported an error. The attempt may survive that."""
        prefill, decode = attempt.route.prefill, attempt.route.decode
        if isinstance(error, PromiseRefused | TrialRefused):
            self._sent_back(attempt, incarnation, error)
        elif self._survives(attempt, incarnation, error):
            return
        elif isinstance(error, HandoffFailed | NodeLost):
            # A hand-off fails between two engines: each may be fine with another partner.
            partner = decode if incarnation == prefill.incarnation else prefill
            self.fail_attempt(attempt, error, silent=partner)
        else:
            self.fail_attempt(attempt, error, blamed=incarnation)

    def engine_lost(self, attempt: Attempt, incarnation: str, *, has_died: bool) -> None:
        """An engine of this attempt is lost. The attempt may survive that."""
        prefill, decode = attempt.route.prefill, attempt.route.decode
        name = prefill.name if incarnation == prefill.incarnation else decode.name
        error: BatonError = NodeLost(f"node {name} was lost")
        if has_died:
            error = EngineFailed(f"the engine of node {name} failed")
        if not self._survives(attempt, incarnation, error):
            self.fail_attempt(attempt, error, blamed=incarnation)

    def _survives(self, attempt: Attempt, incarnation: str, error: BatonError) -> bool:
        """Whether the attempt can go on without this engine, perhaps in doubt."""
        attempt.close(incarnation)
        prefill, decode = attempt.pair
        if incarnation == prefill and not attempt.is_local:
            if not _has_first_token(attempt, self._session.answer):
                return False
            if not attempt.is_handed_over:
                if not error.is_retryable or decode not in attempt.holders:
                    return False
                attempt.begin_doubt(error)
            return True
        if attempt.finish_reason is not None:
            return True
        if isinstance(error, Cancelled) and not attempt.is_handed_over:
            error = HandoffFailed("the decode node cancelled its wait for KV")
            attempt.begin_doubt(error)
            return True
        return False

    def _sent_back(self, attempt: Attempt, incarnation: str, error: BatonError) -> None:
        """The engine refused it. If another gateway's suspect is on trial there, it goes to another
        engine, or to this one after the trial; if it would break the engine's promise, it is
        planned again."""
        attempt.close(incarnation)
        self._take_back(attempt)
        if isinstance(error, TrialRefused):
            self._leave_out(incarnation, attempt.pair)
        else:
            self._plan_without(Avoid({incarnation}))

    def plan_again(self, avoid: Avoid) -> None:
        """Before the first token another engine is to compute the prompt, as if the current one had
        not taken it. `avoid`: every plan in which the current one would compute it."""
        session = self._session
        assert session.attempt is not None
        session.queue_until_s = self._clock.monotonic_s() + self._limits.max_queue_s
        self._take_back(session.attempt)
        self._plan_without(avoid)

    def _take_back(self, attempt: Attempt) -> None:
        self._give_up(attempt, "refused")
        self.suspicion.end_trial()
        self._session.num_taken -= 1
        self.num_refusals += 1

    def _plan_without(self, avoid: Avoid) -> None:
        """Plan it once more; then it waits in the queue as if it had never been dispatched."""
        session = self._session
        if self.num_refusals == 1:
            before = self._avoid, self._avoid_until_s
            self._avoid |= avoid
            self._avoid_until_s = math.inf
            session.try_dispatch()
            self._avoid, self._avoid_until_s = before
        if session.is_waiting:
            session.block(Blocked.PLACE)

    def _give_up(self, attempt: Attempt, how: str) -> None:
        attempt.cancel()
        self._session.attempt = None
        if self._session.moves is not None:
            self._session.moves.target_ended(attempt, how)

    def fail_attempt(
        self,
        attempt: Attempt,
        error: BatonError,
        blamed: str | None = None,
        silent: EngineLink | None = None,
    ) -> None:
        """Give this attempt up, because of the engine `blamed` or, None, of the pair; try again if
        that can help. `silent`: an engine that its partner cannot reach, which may have died under
        the request."""
        session = self._session
        self._give_up(attempt, "lost")
        self._leave_out(blamed, attempt.pair)
        self.suspicion.end_trial()
        now_s = self._clock.monotonic_s()
        self.suspicion.attempt_failed(attempt, error, blamed, now_s)
        if len(session.answer.output_ids) == session.answer.request.sampling.max_tokens:
            # All tokens are out: only the message that ends it was lost.
            session.finish(attempt, FinishReason.LENGTH, session.answer.add([]))
        elif not error.is_retryable or not self._may_try_again:
            session.end_badly(error)
        elif moved := session.moves and session.moves.take_over(is_suspect=self.is_suspect):
            session.switch_to(moved)
            session.num_taken += 1  # as a retry
        else:
            if silent is not None:
                self._silent = silent, now_s
                self.suspicion.wait_for(silent.incarnation)
            session.try_dispatch()

    def _leave_out(self, blamed: str | None, pair: tuple[str, str]) -> None:
        """Avoid this engine for a moment; None: the pair."""
        self._avoid |= {pair if blamed is None else blamed}
        self._avoid_until_s = self._clock.monotonic_s() + self._limits.avoid_s
        self._settle()

    def another_lost(self, lost: str, *, has_died: bool) -> None:
        """An engine is lost that the running attempt is not on. Its death may be what made the
        previous attempt fail. Then the running one is no trial: others that failed with that one
        may be on its engine, too."""
        if self._silent is not None and self._silent[0].incarnation == lost:
            self._end_silence()
        if not has_died:
            return
        error = EngineFailed("an engine failed during the request")
        side = self.suspicion.explained_by(lost, error, self._clock.monotonic_s())
        if side is None:
            return
        if self.suspicion.is_convicted:
            self._session.end_badly(error)
        elif (running := self._session.attempt) is not None:
            self._take_back(running)
            self._leave_out(running.pair[side], running.pair)


def _has_first_token(attempt: Attempt, answer: SessionOutput) -> bool:
    """Whether the prefill engine has sent all that is due from it."""
    if answer.request.sampling.use_beam_search:
        return attempt.is_handed_over and not answer.lacks_scores
    return attempt.has_tokens
