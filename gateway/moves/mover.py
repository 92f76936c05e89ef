"""Moves this gateway's requests away from engines that do not get on with them.

    every PERIOD_S   heartbeats ─► choice.py ─► a route whose prefix comes from the old engine ─►
                                                session (request/move.py)
                     prompts that wait beside decodes ─► planned again, not there alone

Running requests leave engines whose promise is broken or withdrawn. A prompt leaves one whose
promise to its decodes has no room for it, where an engine that computes prompts alone would have it
sooner than it has waited.
An engine that a move left or went to rests until heartbeats show what came of it. Nothing is moved
where no link is known to pull over: to compute the context anew would take longer than the gain.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Collection, Iterable, Mapping
from functools import partial

from ...core.membership import Role
from ...core.ports import Clock
from ...core.step_cost import StepCost
from ...prefix_index.prefix_sources import Fetch, Holders
from ..engines.engine_account import EngineAccount
from ..engines.engine_table import EngineTable
from ..engines.linked_engine import LinkedEngine
from ..request.engine_link import Avoid, Route
from ..request.move import begin_move, movable_from
from ..request.session import Session
from ..request.session_table import SessionTable
from ..request.setbacks import setbacks_of
from .choice import EngineSteps, PlannedMove, Running, choose_moves

log = logging.getLogger(__name__)

PERIOD_S = 0.25
_REST_S = 1.0
_LEAST_LEFT_TOKENS = 32  # of what a request may still generate
_MOST_AHEAD_S = 0.1  # of prompts at the new engine
_PATIENCE_S = 0.5  # of a prompt, at least
_TIMES = 2.0  # so many times as long has it waited as it would take elsewhere


class RequestMover:
    """One gateway's."""

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
        self._rests: dict[str, float] = {}  # until when, by incarnation

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(PERIOD_S)

    def look(self) -> None:
        """Begin the moves that are due by the last heartbeats."""
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
        """Those that wait longer than they need to."""
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
        """Dispatch it to its new engine, if that can pull from the old one."""
        source, target = (self._table.engines[name] for name in (move.source, move.target))
        num_tokens = session.demand.num_tokens
        fetch = self._fetch(source, target, num_tokens)
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
        """Of those that decode there, what any engine of the model could go on with."""
        alike = [e for e in self._table.engines.values() if e.fingerprint == engine.fingerprint]
        return _served(movable.get(engine.incarnation, ()), by=alike)

    @staticmethod
    def _fetch(source: LinkedEngine, target: LinkedEngine, num_tokens: int) -> Fetch | None:
        """All of its full blocks: what is streamed is computed, but for the last token. A request
        that streams does not wait for a link to be opened."""
        size = source.member.block_size
        cached = {source.incarnation: (num_tokens - 1) // size * size}
        rates = {one.incarnation: one.load.link_gbytes_per_s for one in (source, target)}
        token_bytes = target.block_bytes / size
        holders = Holders.of(cached, rates, unmeasured=None)
        return holders.best_fetch(target.incarnation, 0, token_bytes)


def movable_by_engine(sessions: Iterable[Session], now_s: float) -> dict[str, list[Session]]:
    """What decodes and may be moved."""
    found: dict[str, list[Session]] = {}
    for session in sessions:
        if (incarnation := movable_from(session, now_s)) is not None:
            found.setdefault(incarnation, []).append(session)
    return found


def _beside_decodes_since_s(session: Session) -> float | None:
    """Since when one engine has had its prompt, to decode it too; None: there are tokens, or may
    be, in a search, it is one of several samples, or this is not its first attempt."""
    attempt, is_search = session.attempt, session.request.sampling.use_beam_search
    if attempt is None or attempt.number or is_search or not session.is_alone:
        return None
    return attempt.began_s if attempt.is_local and not attempt.has_tokens else None


def _computes_prompts_alone(engine: LinkedEngine) -> bool:
    is_free = engine.is_ready and not engine.load.takes_whole
    return is_free and engine.member.role is Role.PREFILL


def _seconds_until(num_tokens: int, account: EngineAccount) -> float:
    """Until that engine had computed a prompt of so many tokens; `inf`: its speed is not known."""
    speed = account.speed
    return math.inf if speed is None else speed.prompt_seconds(num_tokens, 0, account.tokens_ahead)


def _served(sessions: Iterable[Session], by: Collection[LinkedEngine]) -> list[Session]:
    """Those that all of these engines can serve: constraints, adapters and contexts may differ."""
    can_constrain = all(engine.member.can_constrain for engine in by)
    shortest = min((engine.member.max_model_len for engine in by), default=0)
    has_adapters = all(engine.max_loras for engine in by)
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
    """None: it promises nothing. One that has measured no step is taken for one of `costs`."""
    load = engine.load
    cost = load.step_cost or costs.get(engine.fingerprint)
    if cost is None or not load.tbt_target_s:
        return None
    speed = engine.account.speed
    ahead_s = engine.account.tokens_ahead * speed.token_s if speed is not None else 0.0
    num_places = (engine.max_num_seqs or 1 << 16) - engine.account.num_requests
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
