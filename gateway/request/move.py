"""A running request on its way from one engine to another: both work on it for a moment.

    old engine  ..  k-1 │ k  k+1 │ k+2 ..: kept back ............................ cancelled
    new engine          └ pulls ──► k  k+1 │ k+2 ..: the stream goes on with these
                                confirmed: the very tokens that were streamed

The new engine gets prompt and outputs as a retry would, and pulls their KV from the old one, which
goes on. A token's random key depends on its position alone, so both choose the same tokens; where
one differs all the same, the move fails. What the old engine sends after the new one's first token
is kept back until that one has confirmed all that was streamed: then it goes on with the first
token that nobody has seen. If too many were streamed by then, the move has another round, which
finds nearly all KV in the new engine's cache. A move that fails leaves the request where it was:
what was kept back is streamed.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ...core.errors import BatonError, EngineFailed, HandoffFailed, PromiseRefused
from .answer import OutputToken
from .attempt import Attempt
from .engine_link import EngineOutput, Route

MOVE_EVERY_S = 5.0  # of one request, at most; twice as long after each move that failed
LIMIT_S = 2.0  # from the first dispatch to the new engine's first token in time
CATCH_UP_S = 0.25  # for which tokens are kept back
MOST_BEHIND = 2  # tokens that are confirmed one by one: each is a step of a gap for the client
_MOST_ROUNDS = 3


class MoveStep(enum.Enum):
    """What an output was for a move."""

    NOT_ITS = enum.auto()  # the session takes it as any other
    TAKEN = enum.auto()
    NEXT_ROUND = enum.auto()
    ARRIVED = enum.auto()
    FAILED = enum.auto()


class Move:
    """Owned by its session. `route`: to the new engine, which fetches from the old one. `on_over`
    gets how it ended: moved, refused, failed, late, differs, lost, or ended with its request.
    """

    def __init__(
        self, route: Route, source: Attempt, now_s: float, on_over: Callable[[str], None]
    ) -> None:
        self.route = route
        self.deadline_s = now_s + LIMIT_S
        self.has_source = True
        self.is_catching_up = False
        self.kept_back: list[tuple[str, EngineOutput]] = []
        self.fresh: list[OutputToken] = []  # once it has arrived: what nobody has seen
        self.failure = "failed"
        self._source = source
        self._target: Attempt | None = None
        self._num_rounds = 0
        self._next_index = 0
        self._on_over = on_over

    @property
    def target(self) -> Attempt:
        """The new engine's attempt, of this round."""
        assert self._target is not None, "no round has begun"
        return self._target

    def begin_round(self, target: Attempt, num_streamed: int) -> None:
        """By this attempt. The round before it is called off, and what it fetched is there."""
        if self._target is not None:
            self._target.cancel()
        self._target, self._next_index = target, num_streamed
        self._num_rounds += 1
        if (fetch := self.route.fetch) is not None:
            num_tokens = fetch.num_tokens
            self.route = replace(self.route, cached_tokens=(num_tokens, num_tokens), fetch=None)

    def lose_source(self) -> None:
        """The old engine failed: the new one is waited for as after a retry."""
        self.has_source, self.deadline_s = False, math.inf
        self.kept_back.clear()

    def over(self, how: str) -> None:
        """Called once."""
        self._on_over(how)

    def take(
        self, incarnation: str, output: EngineOutput, streamed: Sequence[int], now_s: float
    ) -> MoveStep:
        """An output of whichever engine; `streamed` are the request's tokens so far."""
        if not self.target.expects(incarnation, output.attempt):
            return self._take_of_source(incarnation, output)
        if output.error is not None or output.finish_reason is not None:
            self.target.close(incarnation)
        if output.error is not None:
            if not self.has_source:
                return MoveStep.NOT_ITS
            return self._fail("refused" if isinstance(output.error, PromiseRefused) else "failed")
        try:
            tokens = self.target.add(output, now_s=now_s)
        except EngineFailed:
            return self._fail("failed")
        return self._confirm(tokens, streamed, now_s) if tokens else MoveStep.TAKEN

    def _take_of_source(self, incarnation: str, output: EngineOutput) -> MoveStep:
        is_its = self._source.expects(incarnation, output.attempt)
        if not (is_its and self.is_catching_up and self.has_source) or output.error is not None:
            return MoveStep.NOT_ITS
        self.kept_back.append((incarnation, output))
        return MoveStep.TAKEN if output.finish_reason is None else self._fail("ended")

    def _confirm(
        self, tokens: list[OutputToken], streamed: Sequence[int], now_s: float
    ) -> MoveStep:
        """Compare the new engine's next tokens with those that were streamed."""
        num_known = max(0, len(streamed) - self._next_index)
        known, self.fresh = tokens[:num_known], tokens[num_known:]
        end = self._next_index + len(known)
        if [token_id for token_id, _ in known] != list(streamed[self._next_index : end]):
            return self._fail("differs")
        self._next_index = end
        num_behind = len(streamed) - end
        if not num_behind:
            return MoveStep.ARRIVED
        if self.target.is_complete:
            return self._fail("differs")
        if not self.is_catching_up and self.has_source:
            if num_behind > MOST_BEHIND:
                is_last = self._num_rounds == _MOST_ROUNDS
                return self._fail("late") if is_last else MoveStep.NEXT_ROUND
            self.deadline_s = min(self.deadline_s, now_s + CATCH_UP_S)
        self.is_catching_up = True
        return MoveStep.TAKEN

    def _fail(self, how: str) -> MoveStep:
        self.failure = how
        return MoveStep.FAILED


class MovingSession(Protocol):
    """What the moves of a request need of its session."""

    def dispatch_beside(self, route: Route) -> Attempt:
        """One more attempt, from these tokens on."""

    def go_on_with(self, attempt: Attempt, fresh: list[OutputToken]) -> None:
        """In place of the attempt that it had, with these tokens."""

    def fail_attempt(self, attempt: Attempt, error: BatonError) -> None: ...

    def engine_output(self, incarnation: str, output: EngineOutput) -> None: ...


class Moves:
    """Of one request: `now` is the one that is under way. `streamed`: its tokens so far."""

    def __init__(self, session: MovingSession, streamed: Sequence[int]) -> None:
        self.now: Move | None = None
        self._session = session
        self._streamed = streamed
        self._pause_s = MOVE_EVERY_S
        self._may_begin_s = -math.inf
        self._tried: tuple[str, ...] = ()  # the engines of the last move, unless it ended well

    @property
    def deadline_s(self) -> float:
        return math.inf if self.now is None else self.now.deadline_s

    def may_begin(self, now_s: float) -> bool:
        """None is under way, nor was lately: no request travels all the time."""
        return self.now is None and now_s >= self._may_begin_s

    def begin(
        self, route: Route, source: Attempt, now_s: float, on_over: Callable[[str], None]
    ) -> None:
        """See Move."""
        self._may_begin_s = now_s + self._pause_s
        self.now = Move(route, source, now_s, on_over)
        self._begin_round(self.now)

    def _begin_round(self, move: Move) -> None:
        target = self._session.dispatch_beside(move.route)
        self._tried = target.pair
        move.begin_round(target, len(self._streamed))

    def take(self, incarnation: str, output: EngineOutput, now_s: float) -> bool:
        """Whether the output was the move's."""
        move = self.now
        if move is None:
            return False
        step = move.take(incarnation, output, self._streamed, now_s)
        if step is MoveStep.NEXT_ROUND:
            self._begin_round(move)
        elif step is MoveStep.ARRIVED:
            self.now, self._tried = None, ()
            move.over("moved")
            self._session.go_on_with(move.target, move.fresh)
        elif step is MoveStep.FAILED:
            self._fail(move, move.failure)
        return step is not MoveStep.NOT_ITS

    def lose(self, incarnation: str, *, has_died: bool) -> None:
        """This engine is gone. If it died, the move may be why: there is no other."""
        if has_died and incarnation in self._tried:
            self._may_begin_s = math.inf
        move = self.now
        if move is not None and move.has_source and incarnation in move.target.pair:
            self._fail(move, "lost")

    def target_ended(self, attempt: Attempt, how: str) -> None:
        """An attempt is given up: if it was the new engine's, the move is over."""
        if self.now is not None and attempt is self.now.target:
            self.end(how)

    def is_late(self, now_s: float) -> bool:
        """Whether its time was up: then it has failed."""
        if self.now is None or now_s < self.now.deadline_s:
            return False
        self._fail(self.now, "late")
        return True

    def _fail(self, move: Move, how: str) -> None:
        """Stay on the old engine; without it, try again as ever."""
        if not move.has_source:
            error = HandoffFailed("the engine that a request was moved to did not go on with it")
            self._session.fail_attempt(move.target, error)
            return
        self._may_begin_s += self._pause_s
        self._pause_s *= 2
        self.end(how)
        for incarnation, output in move.kept_back:
            self._session.engine_output(incarnation, output)

    def end(self, how: str) -> None:
        """Of the one that is under way, if any."""
        move, self.now = self.now, None
        if move is not None:
            move.target.cancel()
            move.over(how)

    def take_over(self, *, is_suspect: bool) -> Attempt | None:
        """The old engine failed: the new one's attempt, where that goes on instead of a retry. Not
        where the request may be what killed it: suspects are tried one at a time."""
        if self.now is None:
            return None
        if is_suspect:
            self.end("lost")
            return None
        self.now.lose_source()
        return self.now.target
