"""Moves a running request from one engine to another: for a moment both work on it.

    old engine  ..  k-1 │ k  k+1 │ k+2 ..: kept back ............................ cancelled
    new engine          └ pulls ──► k  k+1 │ k+2 ..: the stream goes on with these
                                confirmed: equal to the tokens that were streamed

The new engine gets prompt and outputs as for a retry, and pulls their KV from the old one, which
continues. The random key of a token depends only on its position, so both choose the same tokens,
except where two are about equally likely. What the old engine sends after the new one's first token
is kept back until the new one has confirmed all that was streamed: then the stream goes on with its
next token. If too many tokens were streamed by then, or one differs, the move has another round,
which finds nearly all KV in the new engine's cache. If a move fails, the request stays on the old
engine, and what was kept back is streamed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...core.errors import BatonError, EngineFailed, HandoffFailed, PromiseRefused
from .attempt import Attempt
from .engine_link import EngineOutput, Route
from .output_chunk import OutputToken
from .session_output import SessionOutput

MOVE_EVERY_S = 5.0  # between two moves of a request; doubles with each move that failed
LIMIT_S = 2.0  # of a round, until the new engine has sent a token that is not too late
CATCH_UP_S = 0.25  # limit of the time for which tokens are kept back
MOST_BEHIND = 2  # tokens to confirm one by one: each adds a step to a gap for the client
_MOST_ROUNDS = 3


@dataclass(slots=True)
class Move:
    """A move in progress. `route`: to the new engine, which fetches from the old one; `target`: the
    attempt on the new engine, of this round; `next_index`: of the next token to confirm;
    `has_source`: the old engine still works on it. `on_over` is called with the outcome: moved,
    refused, failed, late, differs, lost, or ended (with the request).
    """

    route: Route
    target: Attempt
    next_index: int
    deadline_s: float
    source: Attempt
    on_over: Callable[[str], None]
    num_rounds: int = 1
    has_source: bool = True
    is_catching_up: bool = False
    kept_back: list[tuple[str, EngineOutput]] = field(default_factory=list)


class MovingSession(Protocol):
    """What moves need of their session."""

    answer: SessionOutput
    attempt: Attempt | None

    def dispatch_beside(self, route: Route) -> Attempt:
        """Start another attempt beside the current one, behind the tokens so far."""

    def switch_to(self, attempt: Attempt) -> None: ...

    def advance(self, attempt: Attempt, tokens: list[OutputToken]) -> None:
        """Stream the next tokens, which are this attempt's."""

    def fail_attempt(self, attempt: Attempt, error: BatonError) -> None: ...

    def engine_output(self, incarnation: str, output: EngineOutput) -> None: ...


class Moves:
    """The moves of one request. `now`: the one in progress."""

    def __init__(self, session: MovingSession) -> None:
        self.now: Move | None = None
        self._session = session
        self._clock, self._streamed = session.answer.clock, session.answer.output_ids
        self._pause_s = MOVE_EVERY_S
        self._may_begin_s = -math.inf
        self._tried: tuple[str, ...] = ()  # engines of the last move, unless it succeeded

    @property
    def deadline_s(self) -> float:
        return math.inf if self.now is None else self.now.deadline_s

    def may_begin(self, now_s: float) -> bool:
        """Whether no move is in progress or was lately: no request moves all the time."""
        return self.now is None and now_s >= self._may_begin_s

    def begin(
        self, route: Route, source: Attempt, now_s: float, on_over: Callable[[str], None]
    ) -> None:
        """Dispatch to the new engine; for `on_over` see Move."""
        self._may_begin_s = now_s + self._pause_s
        target, next_index = self._begin_round(route)
        self.now = Move(route, target, next_index, now_s + LIMIT_S, source, on_over)

    def _begin_round(self, route: Route) -> tuple[Attempt, int]:
        target = self._session.dispatch_beside(route)
        self._tried = target.pair
        return target, len(self._streamed)

    def take(self, incarnation: str, output: EngineOutput) -> bool:
        """Whether the output belonged to the move; else the session handles it as usual."""
        move = self.now
        if move is None:
            return False
        if not move.target.expects(incarnation, output.attempt):
            return self._take_of_source(move, incarnation, output)
        if output.error is not None or output.finish_reason is not None:
            move.target.close(incarnation)
        if output.error is not None:
            if move.has_source:
                is_refused = isinstance(output.error, PromiseRefused)
                self._fail(move, "refused" if is_refused else "failed")
            return move.has_source
        try:
            tokens = move.target.add(output)
        except EngineFailed:
            self._fail(move, "failed")
            return True
        if tokens:
            self._confirm(move, tokens)
        return True

    def _take_of_source(self, move: Move, incarnation: str, output: EngineOutput) -> bool:
        if not move.source.expects(incarnation, output.attempt) or output.error is not None:
            return False
        if not (move.is_catching_up and move.has_source):
            return False
        move.kept_back.append((incarnation, output))
        if output.finish_reason is not None:
            self._fail(move, "ended")
        return True

    def _confirm(self, move: Move, tokens: list[OutputToken]) -> None:
        """Compare the new engine's next tokens with the streamed ones."""
        streamed, start = self._streamed, move.next_index
        known = tokens[: max(0, len(streamed) - start)]
        end = move.next_index = start + len(known)
        num_behind = len(streamed) - end
        if [token_id for token_id, _ in known] != streamed[start:end]:
            self._try_again(move, "differs")
        elif not num_behind:
            self.now, self._tried = None, ()
            move.on_over("moved")
            if (left := self._session.attempt) is not None and left is not move.target:
                left.cancel()
            self._session.switch_to(move.target)
            self._session.advance(move.target, tokens[len(known) :])
        elif move.target.is_complete:
            self._fail(move, "differs")
        elif move.is_catching_up or not move.has_source:
            move.is_catching_up = True
        elif num_behind <= MOST_BEHIND:
            move.is_catching_up = True
            move.deadline_s = min(move.deadline_s, self._clock.monotonic_s() + CATCH_UP_S)
        else:
            self._try_again(move, "late")

    def _try_again(self, move: Move, how: str) -> None:
        """Begin another round, from the tokens streamed by now; after the last round, fail."""
        if move.num_rounds == _MOST_ROUNDS or not move.has_source:
            self._fail(move, how)
            return
        move.target.cancel()
        move.is_catching_up, move.deadline_s = False, self._clock.monotonic_s() + LIMIT_S
        self._stream_kept_back(move)
        if self.now is not move:  # the request ended with these
            return
        if (fetch := move.route.fetch) is not None:  # the new engine has it now
            cached = (fetch.num_tokens, fetch.num_tokens)
            move.route = replace(move.route, cached_tokens=cached, fetch=None)
        move.num_rounds += 1
        move.target, move.next_index = self._begin_round(move.route)

    def lose(self, incarnation: str, *, has_died: bool) -> None:
        """An engine is lost. If it died, the move may be why: then there is no other move."""
        if has_died and incarnation in self._tried:
            self._may_begin_s = math.inf
        move = self.now
        if move is not None and move.has_source and incarnation in move.target.pair:
            self._fail(move, "lost")

    def target_ended(self, attempt: Attempt, how: str) -> None:
        """An attempt was given up: if it was on the new engine, the move is over."""
        if self.now is not None and attempt is self.now.target:
            self.end(how)

    def end_late(self) -> None:
        """Fail the move in progress: its time is up."""
        if self.now is not None:
            self._fail(self.now, "late")

    def _fail(self, move: Move, how: str) -> None:
        """Stay on the old engine; if it is lost, fail the attempt, which is then retried."""
        if not move.has_source:
            error = HandoffFailed("the engine that a request was moved to did not go on with it")
            self._session.fail_attempt(move.target, error)
            return
        self._may_begin_s += self._pause_s
        self._pause_s *= 2
        self.end(how)
        self._stream_kept_back(move)

    def _stream_kept_back(self, move: Move) -> None:
        kept_back, move.kept_back = move.kept_back, []
        for incarnation, output in kept_back:
            self._session.engine_output(incarnation, output)

    def end(self, how: str) -> None:
        """End the move in progress, if any."""
        move, self.now = self.now, None
        if move is not None:
            move.target.cancel()
            move.on_over(how)

    def take_over(self, *, is_suspect: bool) -> Attempt | None:
        """After the old engine failed: the attempt on the new one, if it replaces a retry. It does
        not if the request may have killed the engine: suspects are tried one at a time."""
        if self.now is None:
            return None
        if is_suspect:
            self.end("lost")
            return None
        move = self.now  # the new engine has as much time as for a retry
        move.has_source, move.deadline_s = False, math.inf
        move.kept_back.clear()
        return move.target
