"""Moves this gateway's requests away from engines that cannot serve them in time.

    every PERIOD_S   heartbeats ─► choice.py ─► a route with the prefix from the old engine ─►
                                                session (request/move.py)
                     prompts that wait beside decodes ─► another plan, for another engine

Running requests leave engines whose promise is broken or withdrawn. A prompt leaves an engine whose
promise leaves no time for it, if a prefill-only engine would compute it sooner than it has waited.
The source and the target of a move rest until heartbeats show its effect. Nothing moves where no
link bandwidth is known: recomputing the context would cost more than the move gains.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from ...core.membership import Role
from ...core.ports import Clock
from ...core.step_cost import StepCost
from ...prefix_index.prefix_sources import Fetch
from ..engines.engine_account import EngineAccount
from ..engines.engine_table import EngineTable
from ..engines.linked_engine import LinkedEngine
from ..request.engine_link import Avoid, Route
from ..request.move import Moves
from ..request.session import Session
from ..request.session_table import SessionTable
from ..request.setbacks import setbacks_of
from .choice import EngineSteps, PlannedMove, Running, choose_moves

log = logging.getLogger(__name__)

PERIOD_S = 0.25
_REST_S = 1.0
_LEAST_LEFT_TOKENS = 32  # that a request may still generate, or it does not move
_MOST_AHEAD_S = 0.1  # of waiting prompts at the target
_PATIENCE_S = 0.5  # the least wait of a prompt before it is planned again
_TIMES = 2.0  # and the least ratio of that wait to its time at another engine


class RequestMover:
    """The mover of one gateway."""

    def __init__(
        self,
        table: EngineTable,
        sessions: SessionTable,
        clock: Clock,
        chance: random.Random | None = None,
    ) -> None:
        self._table = table
        self._sessions = sessions
        self._clock = clock
        self._chance = chance or random.Random()
        self._rests: dict[str, float] = {}  # end of the rest, by incarnation

    async def run(self) -> None:
        """Call `look` every PERIOD_S until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        """Begin the moves that are due according to the last heartbeats."""
        now_s = self._clock.monotonic_s()
        self._look_at_prompts(now_s)
        self._rests = {name: until_s for name, until_s in self._rests.items() if until_s > now_s}
        if not any(map(_may_be_left, self._table.engines.values())):
            return
        costs = self._table.step_costs()
        movable = movable_by_engine(self._sessions, now_s)
        by_id = {one.request_id: one for ours in movable.values() for one in ours}
        engines = [
            steps
            for engine in self._table.engines.values()
            if engine.incarnation not in self._rests
            and (steps := _steps_of(engine, costs, self._served_by_all(engine, movable)))
        ]
        for move in choose_moves(engines, self._chance):
            self._begin(move, by_id[move.request_id])

    def _look_at_prompts(self, now_s: float) -> None:
        """Plan prompts again that wait much longer than another engine would need for them."""
        engines = self._table.engines.values()
        sources = {name for e in engines if e.is_ready for name in e.load.links}
        takers = [e for e in engines if e.incarnation in sources and _computes_prompts_alone(e)]
        for engine in engines if takers else ():
            others = [taker for taker in takers if taker is not engine]
            waiting = [
                self._sessions.get(request_id) for request_id, _ in engine.account.unanswered
            ]
            for session in waiting:
                if session is None or (since_s := _beside_decodes_since_s(session)) is None:
                    continue
                able = [taker.account for taker in others if _served([session], by=[taker])]
                num_tokens = session.demand.num_tokens
                soonest_s = min((_seconds_until(num_tokens, one) for one in able), default=math.inf)
                if now_s - since_s >= max(_PATIENCE_S, _TIMES * soonest_s):
                    log.info("%s: its prompt is planned again", session.call_id)
                    self._table.plans.moves["planned_again"] += 1
                    here = engine.incarnation
                    avoid = Avoid((here, other.incarnation) for other in engines)
                    self._sessions.act(session, setbacks_of(session).plan_again, avoid)

    def _begin(self, move: PlannedMove, session: Session) -> None:
        """Dispatch the request to the target, if that can pull KV from the source."""
        source, target = (self._table.engines[name] for name in (move.source, move.target))
        num_tokens = session.demand.num_tokens
        fetch = _fetch(source, target, num_tokens)
        if fetch is None:
            return
        until_s = self._clock.monotonic_s() + _REST_S
        self._rests |= {move.source: until_s, move.target: until_s}
        log.info("%s: from engine %s to %s", session.call_id, source.name, target.name)
        route = Route(target, target, fetch=fetch)
        on_over = partial(self._table.plans.note_move, target.name)
        self._sessions.act(session, begin_move, session, route, self._clock.monotonic_s(), on_over)

    def _served_by_all(
        self, engine: LinkedEngine, movable: Mapping[str, list[Session]]
    ) -> list[Session]:
        """The requests that decode on `engine` and that every engine of its model can continue."""
        alike = [e for e in self._table.engines.values() if e.fingerprint == engine.fingerprint]
        return _served(movable.get(engine.incarnation, ()), by=alike)


def _fetch(source: LinkedEngine, target: LinkedEngine, num_tokens: int) -> Fetch | None:
    """A fetch of all full blocks of the request: KV exists for all tokens but the last. None where
    the two have no measured link: a streaming request does not wait for a new one."""
    there, back = target.load.link_gbytes_per_s, source.load.link_gbytes_per_s
    rate = there.get(source.incarnation) or back.get(target.incarnation)
    size = source.member.block_size
    num_blocks = (num_tokens - 1) // size
    if not rate or not num_blocks:
        return None
    num_bytes = num_blocks * target.welcome.block_bytes
    return Fetch.over(rate, source.incarnation, num_blocks * size, num_bytes)


def movable_by_engine(sessions: Iterable[Session], now_s: float) -> dict[str, list[Session]]:
    """The requests that decode and may be moved, by the incarnation of their engine."""
    found: dict[str, list[Session]] = {}
    for session in sessions:
        if (incarnation := movable_from(session, now_s)) is not None:
            found.setdefault(incarnation, []).append(session)
    return found


def movable_from(session: Session, now_s: float) -> str | None:
    """The engine that the request decodes on, if it may be moved from there now: the engine goes on
    by itself, and nothing is in doubt."""
    attempt, moves, setbacks = session.attempt, session.moves, session.setbacks
    if attempt is None or not attempt.is_handed_over or attempt.finish_reason or attempt.doubt:
        return None
    is_suspect = setbacks is not None and setbacks.is_suspect
    is_alone = session.request.num_samples == 1  # several share blocks and stay together
    is_decoding = session.num_outputs and attempt.has_tokens  # a retry computes its prompt first
    may_move = is_alone and is_decoding and not is_suspect
    is_time = moves is None or moves.may_begin(now_s)
    return attempt.pair[1] if may_move and is_time else None


def begin_move(
    session: Session, route: Route, now_s: float, on_over: Callable[[str], None]
) -> None:
    """Begin to move it to another engine of its model; requires that it is `movable_from` one."""
    assert session.attempt is not None
    assert route.decode.fingerprint == session.attempt.route.decode.fingerprint
    if session.moves is None:
        session.moves = Moves(session)
    session.moves.begin(route, session.attempt, now_s, on_over)


def _beside_decodes_since_s(session: Session) -> float | None:
    """Since when the prompt has waited at an engine that serves the whole request. None: it has
    tokens or may have (beam search), is one of several samples, or is a further attempt."""
    attempt, is_search = session.attempt, session.request.sampling.use_beam_search
    if attempt is None or attempt.number or is_search or session.request.num_samples > 1:
        return None
    return attempt.began_s if attempt.is_local and not attempt.has_tokens else None


def _computes_prompts_alone(engine: LinkedEngine) -> bool:
    is_free = engine.is_ready and not engine.load.takes_whole
    return is_free and engine.member.role is Role.PREFILL


def _seconds_until(num_tokens: int, account: EngineAccount) -> float:
    """The time until this engine would have computed a prompt; `inf`: its speed is not known."""
    speed = account.speed
    return math.inf if speed is None else speed.prompt_seconds(num_tokens, 0, account.tokens_ahead)


def _served(sessions: Iterable[Session], by: Collection[LinkedEngine]) -> list[Session]:
    """The sessions that all these engines can serve: constraints, adapters, context lengths."""
    can_constrain = all(engine.member.can_constrain for engine in by)
    shortest = min((engine.member.max_model_len for engine in by), default=0)
    has_adapters = all(engine.welcome.max_loras for engine in by)
    return [
        session
        for session in sessions
        if len(session.request.prompt_token_ids) + session.request.sampling.max_tokens <= shortest
        and (can_constrain or session.request.sampling.constraint is None)
        and (has_adapters or not session.request.adapter_digest)
    ]


def _may_be_left(engine: LinkedEngine) -> bool:
    steps = _steps_of(engine, {}, [])
    return steps is not None and (steps.is_left or steps.load > 1)


def _steps_of(
    engine: LinkedEngine, costs: Mapping[str, StepCost], ours: list[Session]
) -> EngineSteps | None:
    """None: the engine promises nothing, or no cost is known. One without a measured step cost gets
    the cost of its fingerprint in `costs`."""
    load = engine.load
    cost = load.step_cost or costs.get(engine.fingerprint)
    if cost is None or not load.tbt_target_s:
        return None
    speed = engine.account.speed
    ahead_s = engine.account.tokens_ahead * speed.token_s if speed is not None else 0.0
    num_places = (engine.welcome.max_num_seqs or 1 << 16) - engine.account.num_requests
    is_free = load.takes_whole and not load.is_draining and ahead_s <= _MOST_AHEAD_S
    return EngineSteps(
        engine.incarnation,
        engine.fingerprint,
        cost,
        load.tbt_target_s,
        load.decodes,
        takes_more=is_free,
        num_places=num_places,
        room_tokens=load.room_blocks * engine.member.block_size,
        ours=[
            Running(one.request_id, one.demand.num_tokens)
            for one in ours
            if one.demand.max_output_tokens >= _LEAST_LEFT_TOKENS
        ],
        is_withdrawn=load.is_promise_withdrawn,
    )
