"""What becomes of a request whose attempt came to nothing: whether it tries again, whom it leaves
out, what it waits for before, and whether it may be what kills engines.

    fails on an engine ──► settle: all streams tell of a node's end, in any order
    fails since an engine's partner is silent ──► until that one is heard of, or its end is
                      └──► avoid: that engine, or the pair, is left out for a moment
    an engine dies ─► all that it held are suspects ─► on trial, on an engine where no other one is
                                                        │  gets further than where it was: cleared
                                                        └─ the engine dies: it has killed two
So what kills engines takes no other suspect with it, which would count as having killed two as
well. Others are sent to engines without a trial, if any. Knows of this gateway's requests alone: of
two gateways' suspects an engine sends the second one back (node/requests/trials.py).
An engine's partner may notice its death first, and fail the attempt for that: the report of the
death that explains it comes behind, and the next attempt waits for it. Meanwhile no suspect is sent
to that engine: it would count as having killed one that was dead.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
from .answer import Answer
from .attempt import Attempt
from .engine_link import Avoid, Blocked, EngineLink
from .move import MovingSession
from .output_chunk import OutputChunk

_MAX_CONVICTED = 256
LATE_S = 1.0  # by which that report may come


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


class Suspects:
    """Which engines have a suspect on trial. Samples of one call are alike: one is tried at a time,
    and `convicted` are the errors of calls of which one was given up."""

    def __init__(self) -> None:
        self.trials: dict[str, tuple[str, str]] = {}  # call and engine, by request id
        self.silent: dict[str, str] = {}  # engines of which requests wait for word, likewise
        self.convicted: OrderedDict[str, BatonError] = OrderedDict()

    @property
    def engines(self) -> frozenset[str]:
        return frozenset([engine for _, engine in self.trials.values()])

    def tries(self, call_id: str) -> bool:
        """Whether a sample of this call is on trial."""
        return any(call == call_id for call, _ in self.trials.values())


class _Unexplained(NamedTuple):
    """An attempt that failed with neither engine to blame. `num_tokens`: output tokens by then."""

    attempt: Attempt
    num_tokens: int
    failed_s: float


class FailingSession(MovingSession, Protocol):
    """What the setbacks of a request need of its session. `num_taken`: attempts that count."""

    call_id: str
    num_taken: int

    @property
    def is_waiting(self) -> bool: ...

    def try_dispatch(self) -> None: ...

    def block(self, reason: Blocked | None) -> None: ...

    def finish(self, attempt: Attempt, reason: FinishReason, chunk: OutputChunk) -> None: ...

    def end_badly(self, error: BatonError) -> None: ...


class Setbacks:
    """Of one session, from the first attempt on that came to nothing. `suspect_side`: of the pair
    (prefill, decode), where it is on trial; None: it is no suspect. `num_refusals`: attempts that
    were sent back at once."""

    def __init__(
        self, session: FailingSession, limits: SessionLimits, suspects: Suspects, clock: Clock
    ) -> None:
        self.suspect_side: int | None = None
        self.num_refusals = 0
        self._session = session
        self._call_id = session.call_id
        self._request_id = session.answer.request_id
        self._output_ids = session.answer.output_ids  # so far
        self._limits = limits
        self._suspects = suspects
        self._clock = clock
        self._avoid = Avoid()
        self._avoid_until_s = 0.0
        self._settle_until_s: float | None = None
        self._silent: tuple[EngineLink, float] | None = None  # since when
        self._num_deaths = 0
        self._cleared_at = 0  # output tokens
        self._unexplained: _Unexplained | None = None

    @property
    def is_suspect(self) -> bool:
        return self.suspect_side is not None

    @property
    def _is_convicted(self) -> bool:
        return self._num_deaths >= self._limits.max_engine_failures

    @property
    def _may_try_again(self) -> bool:
        return self._session.num_taken < self._limits.max_attempts and not self._is_convicted

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
            if partner.heard_s < since_s + self._limits.settle_s and now_s < since_s + LATE_S:
                return self._settle()
            self.trial_ended()
        if self._avoid and now_s >= self._avoid_until_s:
            self._avoid = Avoid()
        if self.is_suspect:
            if error := self._suspects.convicted.get(self._call_id):
                raise error
            if self._suspects.tries(self._call_id):
                return self._settle()
        return True

    @property
    def avoid(self) -> Avoid:
        """Where it is not to go now; a suspect, to no engine either that has a trial, or may have
        died just now."""
        if not self.is_suspect:
            return self._avoid
        return self._avoid | self._suspects.engines | {*self._suspects.silent.values()}

    def waits_for_trials(self) -> bool:
        """Whether there may be engines for it once other suspects' trials are over."""
        return self.avoid != self._avoid and not self._settle()

    @property
    def until_s(self) -> float:
        """When something of this is over; nothing is until all has settled."""
        if self._settle_until_s is not None:
            return self._settle_until_s
        return self._avoid_until_s if self._avoid else math.inf

    def _settle(self) -> bool:
        """False: it may not try now."""
        self._settle_until_s = self._clock.monotonic_s() + self._limits.settle_s
        return False

    # --- what happens -----------------------------------------------------------------------------

    def attempt_began(self, attempt: Attempt) -> None:
        """A suspect's is its trial."""
        if self.suspect_side is not None:
            attempt.on_trial = engine = attempt.pair[self.suspect_side]
            self._suspects.trials[self._request_id] = (self._call_id, engine)
            # The next token is the prefill engine's, the one behind it the decode engine's.
            self._cleared_at = attempt.base_index + 1 + self.suspect_side

    def engine_failed(self, attempt: Attempt, incarnation: str, error: BatonError) -> None:
        """An engine of this attempt says so. The attempt may survive that."""
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
        """An engine of this attempt is gone. The attempt may survive that."""
        prefill, decode = attempt.route.prefill, attempt.route.decode
        name = prefill.name if incarnation == prefill.incarnation else decode.name
        error: BatonError = NodeLost(f"node {name} was lost")
        if has_died:
            error = EngineFailed(f"the engine of node {name} died")
        if not self._survives(attempt, incarnation, error):
            self.fail_attempt(attempt, error, blamed=incarnation)

    def _survives(self, attempt: Attempt, incarnation: str, error: BatonError) -> bool:
        """Whether the attempt can go on without this engine, perhaps in doubt."""
        attempt.close(incarnation)
        prefill, decode = attempt.pair
        now_s = self._clock.monotonic_s()
        if incarnation == prefill and not attempt.is_local:
            if not _has_first_token(attempt, self._session.answer):
                return False
            if not attempt.is_handed_over:
                if not error.is_retryable or decode not in attempt.holders:
                    return False
                attempt.begin_doubt(error, now_s)
            return True
        if attempt.finish_reason is not None:
            return True
        if isinstance(error, Cancelled) and not attempt.is_handed_over:
            error = HandoffFailed("the decode node was told to stop waiting")
            attempt.begin_doubt(error, now_s)
            return True
        return False

    def _sent_back(self, attempt: Attempt, incarnation: str, error: BatonError) -> None:
        """The engine did not take it: where another gateway's suspect is on trial, it goes
        elsewhere, or there once that is over; where it would break the engine's promise, it is
        planned again."""
        attempt.close(incarnation)
        self._take_back(attempt)
        if isinstance(error, TrialRefused):
            self._leave_out(incarnation, attempt.pair)
        else:
            self._plan_without(Avoid({incarnation}))

    def plan_again(self, attempt: Attempt, avoid: Avoid) -> None:
        """Its engine does not get on with it alone: as if it had not taken it."""
        self._take_back(attempt)
        self._plan_without(avoid)

    def _take_back(self, attempt: Attempt) -> None:
        self._give_up(attempt, "refused")
        self.trial_ended()
        self._session.num_taken -= 1
        self.num_refusals += 1

    def _plan_without(self, avoid: Avoid) -> None:
        """Once; then it waits in the queue as if it had never been dispatched."""
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
        """Give this attempt up, by the engine `blamed` or, None, by the pair; try again if that can
        help. `silent`: an engine that its partner cannot reach: it may have died under the request.
        """
        session = self._session
        self._give_up(attempt, "lost")
        self._leave_out(blamed, attempt.pair)
        self.trial_ended()
        now_s = self._clock.monotonic_s()
        self._unexplained = None
        if blamed is None:
            self._unexplained = _Unexplained(attempt, len(self._output_ids), now_s)
        elif isinstance(error, EngineFailed):
            self._suspect(attempt, blamed, error)
        if len(self._output_ids) == session.answer.request.sampling.max_tokens:
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
                self._suspects.silent[self._request_id] = silent.incarnation
            session.try_dispatch()

    def _leave_out(self, blamed: str | None, pair: tuple[str, str]) -> None:
        """This engine, for a moment; None: the pair."""
        self._avoid |= {pair if blamed is None else blamed}
        self._avoid_until_s = self._clock.monotonic_s() + self._limits.avoid_s
        self._settle()

    def another_lost(self, lost: str, *, has_died: bool) -> None:
        """An engine is gone that the running attempt is not on. Its death may be what made the
        attempt before fail: that was on it, lately, and the request has got no further since. Then
        the running one is no trial: others that failed with that one may be on its engine, too."""
        if self._silent is not None and self._silent[0].incarnation == lost:
            self.trial_ended()
        before = self._unexplained
        if before is None or not has_died or lost not in before.attempt.pair:
            return
        is_late = self._clock.monotonic_s() - before.failed_s >= LATE_S
        if is_late or len(self._output_ids) > before.num_tokens:
            return
        self._unexplained = None
        error = EngineFailed("an engine died under the request")
        side = self._suspect(before.attempt, lost, error)
        if self._is_convicted:
            self._session.end_badly(error)
        elif (running := self._session.attempt) is not None:
            self._take_back(running)
            self._leave_out(running.pair[side], running.pair)

    def got_further(self, attempt: Attempt) -> None:
        """Perhaps than where its engine died: then what killed that was another request."""
        if self.is_suspect and attempt.reaches(self._cleared_at):
            self.suspect_side = None
            self._num_deaths = 0
            self.trial_ended()

    def trial_ended(self) -> None:
        """Or its attempt did, however; or there is word of the engine that was silent."""
        self._silent = None
        self._suspects.trials.pop(self._request_id, None)
        self._suspects.silent.pop(self._request_id, None)

    def _suspect(self, attempt: Attempt, died: str, error: EngineFailed) -> int:
        """Returns its side. An engine that does both died while it decoded if it had brought a
        token."""
        self._num_deaths += 1
        is_alone = attempt.is_local
        side = self.suspect_side = int(attempt.has_tokens) if is_alone else attempt.pair.index(died)
        if self._is_convicted:
            convicted = self._suspects.convicted
            convicted[self._call_id] = error  # remembered while samples of the call may wait
            if len(convicted) > _MAX_CONVICTED:
                convicted.popitem(last=False)
        return side


def _has_first_token(attempt: Attempt, answer: Answer) -> bool:
    """Whether the prefill engine has sent all that is due from it."""
    if answer.request.sampling.use_beam_search:
        return attempt.is_handed_over and not answer.lacks_scores
    return attempt.has_tokens
