"""All sessions of a gateway: finds them by id and label, gives them outputs, losses and time, and
lets those that wait be dispatched in an order that is fair between callers.

    a session comes ─► eligible: a fair queue; its head alone is tried
                          │ ▲  └─ no decode engine has a place ► it stays the head; nobody passes
                          ▼ │
                       held, by caller: enough of that caller's own prompts wait at the engines;
                          │ ▲           one of them is answered ► its next one is eligible again
                          ▼ │
                       stranded: no pair of engines may serve it; tried when engines come or go
So prompts wait here, and engines get what they compute soon: a light caller finds places, and few
prompts ahead of its own. A session that was dispatched before tries by itself, and goes first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ...core.errors import BatonError, Cancelled, Overloaded
from ...core.fair_queue import FairQueue
from ...core.ports import Clock
from .engine_link import Blocked, EngineOutput, PlainToken, Route
from .session import Session

SEQUENCE_TOKENS = 256  # what a place weighs against prompt tokens: about what is generated in it


@dataclass(slots=True)
class CallerShare:
    """What one caller has waiting. `cost`: prompt tokens and places, in tokens."""

    num_requests: int = 0
    num_tokens: int = 0
    cost: int = 0


class _Counted(NamedTuple):
    """Of a session that waits. `order`: among its caller's, what an engine had before first."""

    num_tokens: int
    cost: int
    order: tuple[bool, int]


class DispatchQueue:
    """Knows no engine: sessions try, and show why they could not. `released`: callers of which an
    engine has answered or ended something; cleared here."""

    def __init__(self, released: set[int] | None = None) -> None:
        self._released: set[int] = set() if released is None else released
        self._eligible: FairQueue[Session] = FairQueue()
        self._held: dict[int, OrderedDict[Session, None]] = {}
        self._stranded: dict[Session, None] = {}
        self.shares: dict[int, CallerShare] = {}  # by caller, of callers that wait
        self._counted: dict[Session, _Counted] = {}  # all that wait
        self._numbers = itertools.count()
        self._tried: Session | None = None
        self._has_changed = False  # since `advance`
        self.has_no_place = False  # for its head, when that was last tried

    def __len__(self) -> int:
        return len(self._counted)

    def num_tokens(self) -> int:
        """Of the prompts that wait."""
        return sum(share.num_tokens for share in self.shares.values())

    @property
    def is_due(self) -> bool:
        """Whether what waits may find a place since `advance`."""
        return bool(self._counted) and (self._has_changed or bool(self._released))

    def add(self, session: Session) -> None:
        """A new session, behind its caller's others."""
        if not self._counted:
            self._released.clear()
        self._count(session)
        if (held := self._held.get(session.request.caller_id)) is not None:
            held[session] = None
        else:
            self._make_eligible(session)

    def follow(self, session: Session) -> None:
        """Take note of what a session did by itself: it waits again, or does not any more."""
        if session is self._tried:
            return
        if not session.is_waiting:
            self.remove(session)
        elif session in self._stranded:
            if session.blocked is not Blocked.ENGINE:
                del self._stranded[session]
                self._make_eligible(session)
        elif session not in self._counted and session.blocked is not None:
            self._count(session)
            if session.blocked is Blocked.ENGINE:
                self._stranded[session] = None
            else:
                self._make_eligible(session)

    def remove(self, session: Session) -> None:
        """It is over, or was dispatched. Nothing, if it does not wait here."""
        if session not in self._counted:
            return
        self._uncount(session)
        caller_id = session.request.caller_id
        if session in self._eligible:
            self._eligible.remove(session)
            self._release(caller_id)
            self._has_changed = True  # it may have been the head that nobody passes
        elif session in self._stranded:
            del self._stranded[session]
        else:
            del self._held[caller_id][session]
            if not self._held[caller_id]:
                del self._held[caller_id]

    def advance(self, try_dispatch: Callable[[Session], None]) -> None:
        """Let sessions try, in their order, until one finds no place."""
        for caller_id in self._released & self._held.keys():
            self._release(caller_id)
        self._released.clear()
        self._has_changed = self.has_no_place = False
        while (head := self._eligible.head) is not None and not self.has_no_place:
            self._tried = head
            try:
                try_dispatch(head)
            finally:
                self._tried = None
            self._place(head)

    def retry_stranded(self) -> None:
        """Engines came or went: `advance` tries all that waited for any."""
        for session in self._stranded:
            self._make_eligible(session)
        self._stranded.clear()
        for caller_id in list(self._held):
            self._release(caller_id)

    def _place(self, head: Session) -> None:
        """Where the head that has just tried belongs now."""
        caller_id = head.request.caller_id
        if head not in self._counted:
            return  # it ended, and was removed
        if not head.is_waiting:
            self._uncount(head)
            self._eligible.pop()
            self._release(caller_id)
        elif head.blocked is Blocked.PLACE:
            self._eligible.pin_head()
            self.has_no_place = True
        else:
            self._eligible.remove(head)
            if head.blocked is Blocked.TURN:
                self._hold(head)
            elif head.blocked is Blocked.ENGINE:
                self._stranded[head] = None
                self._release(caller_id)
            else:
                self._uncount(head)  # it will try by itself
                self._release(caller_id)

    def _make_eligible(self, session: Session) -> None:
        self._has_changed = True
        add = self._eligible.add_first if session.was_dispatched else self._eligible.add
        add(session, session.request.caller_id, self._counted[session].cost)

    def _hold(self, session: Session) -> None:
        """Behind its caller's own prompts: nearly always the last or the first of what is held."""
        held = self._held.setdefault(session.request.caller_id, OrderedDict())
        order = self._counted[session].order
        is_last = not held or order > self._counted[next(reversed(held))].order
        is_first = not is_last and order < self._counted[next(iter(held))].order
        held[session] = None
        if is_first:
            held.move_to_end(session, last=False)
        elif not is_last:
            for one in sorted(held, key=lambda one: self._counted[one].order):
                held.move_to_end(one)

    def _release(self, caller_id: int) -> None:
        """Let the caller's next held session try."""
        if held := self._held.get(caller_id):
            self._make_eligible(held.popitem(last=False)[0])
        if not held:
            self._held.pop(caller_id, None)

    def _count(self, session: Session) -> None:
        demand = session.demand
        cost = demand.num_tokens + SEQUENCE_TOKENS * demand.num_sequences
        order = not session.was_dispatched, next(self._numbers)
        self._counted[session] = _Counted(demand.num_tokens, cost, order)
        share = self.shares.setdefault(session.request.caller_id, CallerShare())
        share.num_requests += 1
        share.num_tokens += demand.num_tokens
        share.cost += cost

    def _uncount(self, session: Session) -> None:
        num_tokens, cost, _ = self._counted.pop(session)
        share = self.shares[session.request.caller_id]
        share.num_requests -= 1
        share.num_tokens -= num_tokens
        share.cost -= cost
        if not share.num_requests:
            del self.shares[session.request.caller_id]


log = logging.getLogger(__name__)

_RESERVED_SHARE = 8  # one part in so many


class SessionTable:
    """Use from one event loop. A session is in the table from `start` to its end; one that breaks
    (our own bug) fails alone.

    Owns their only timers and the bound on their number, whose last eighth is for callers that have
    less than their share of it, so that no caller can shut the others out.
    """

    def __init__(
        self, clock: Clock, max_num_requests: int, queue: DispatchQueue | None = None
    ) -> None:
        self.queue = DispatchQueue() if queue is None else queue
        self._clock = clock
        self._max_num_requests = max_num_requests
        self._sessions: dict[str, Session] = {}
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        self._num_admitted = 0
        self._admitted: Counter[int] = Counter()  # by caller
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        return len(self._sessions)

    def admit(self, caller_id: int = 0) -> None:
        """Count one more request in flight; raises Overloaded at the limit. Pair with `leave`."""
        total, most = self._num_admitted, self._max_num_requests
        if total >= most - most // _RESERVED_SHARE:
            share = max(1, most // (1 + len(self._admitted)))
            if total >= most or self._admitted[caller_id] >= share:
                raise Overloaded(
                    f"{total} requests are in flight, {self._admitted[caller_id]} of this caller; "
                    "try again later"
                )
        self._num_admitted += 1
        self._admitted[caller_id] += 1
        self._is_idle.clear()

    def leave(self, caller_id: int = 0) -> None:
        """The request's call is over."""
        self._num_admitted -= 1
        self._admitted[caller_id] -= 1
        if not self._admitted[caller_id]:
            del self._admitted[caller_id]
        if self._num_admitted == 0:
            self._is_idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._is_idle.wait()

    def start(self, session: Session) -> None:
        """Take a session: it is dispatched at once if there is a place, and nobody before it."""
        self._sessions[session.request_id] = session
        if session.is_waiting:
            self.queue.add(session)
        self._arm(session)
        self._dispatch_waiting()

    def engine_outputs(self, incarnation: str, outputs: Iterable[EngineOutput]) -> None:
        """One step's outputs of one engine; those of requests that are over are dropped."""
        for output in outputs:
            if session := self._sessions.get(output.request_id):
                self._do(session, session.engine_output, incarnation, output)
        self._dispatch_due()

    def engine_tokens(self, incarnation: str, tokens: Iterable[PlainToken]) -> None:
        """One step's plain tokens. Most are what their sessions wait for, and take a short way."""
        sessions = self._sessions
        for request_id, attempt, index, token_id in tokens:
            if (session := sessions.get(request_id)) is None:
                continue
            try:
                was_taken = session.next_token(incarnation, attempt, index, token_id)
            except Exception:  # as in `_do`, which ends the session
                log.exception("request %s failed by a bug", request_id)
                self.cancel(session, BatonError("internal error"))
                continue
            if not was_taken:
                output = EngineOutput(request_id, attempt, index, (token_id,))
                self._do(session, session.engine_output, incarnation, output)
            elif session.is_over:
                self._forget(session)

    def engine_lost(self, incarnation: str, *, has_died: bool) -> None:
        for session in list(self._sessions.values()):
            self._do(session, partial(session.engine_lost, incarnation, has_died=has_died))

    def cluster_changed(self, *, is_load_only: bool = False) -> None:
        """What waits may find its place now."""
        if not is_load_only:
            self.queue.retry_stranded()
        self._dispatch_waiting()

    def cancel(self, session: Session, error: BatonError) -> None:
        """End a session early; one that is over stays as it ended."""
        self._do(session, session.cancel, error)
        self._dispatch_due()

    def movable(self) -> dict[str, list[Session]]:
        """What decodes and may be moved, by engine."""
        found: dict[str, list[Session]] = {}
        for session in self._sessions.values():
            if (incarnation := session.movable_from) is not None:
                found.setdefault(incarnation, []).append(session)
        return found

    def prompts_beside_decodes(self, request_ids: Iterable[str]) -> list[tuple[Session, float]]:
        """Of these, those that an engine is to compute beside its decodes, with since when."""
        sessions = (self._sessions.get(request_id) for request_id in request_ids)
        return [
            (session, since_s)
            for session in sessions
            if session and (since_s := session.beside_decodes_since_s) is not None
        ]

    def plan_again(self, session: Session) -> None:
        """One of those: without that engine."""
        self._do(session, session.plan_again)
        self._dispatch_due()

    def move(self, session: Session, route: Route, on_over: Callable[[str], None]) -> None:
        """Begin to move one of those that are `movable`."""
        self._do(session, session.begin_move, route, on_over)

    def end_all(self, error: BatonError) -> None:
        """End every session with the error. Nothing that waits is dispatched."""
        for session in list(self._sessions.values()):
            self._do(session, session.cancel, error)

    def abort(self, names: Iterable[str], tenant: str | None = None) -> int:
        """Cancel calls by gateway id or caller's label; returns how many were in flight.

        Those of one tenant alone, if one is named.
        """
        wanted = set(names) - {""}
        found = [
            session
            for session in self._sessions.values()
            if (session.call_id in wanted or session.request.label in wanted)
            and tenant in (None, session.request.tenant)
        ]
        for session in found:
            self.cancel(session, Cancelled("aborted"))
        return len({session.call_id for session in found})

    def _dispatch_due(self) -> None:
        if self.queue.is_due:
            self._dispatch_waiting()

    def _dispatch_waiting(self) -> None:
        if self.queue:
            self.queue.advance(lambda session: self._do(session, session.try_dispatch))

    def _do(self, session: Session, call: Callable[..., None], *arguments: object) -> None:
        """Let a session act, then note its end or its next wake-up."""
        try:
            call(*arguments)
        except Exception:  # one session's bug must not end the stream that feeds all of them
            log.exception("request %s failed by a bug", session.request_id)
            session.cancel(BatonError("internal error"))
        if session.is_over:
            self._forget(session)
        else:
            self._arm(session)
            self.queue.follow(session)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.request_id, None)
        self.queue.remove(session)
        if timer := self._timers.pop(session.request_id, None):
            timer[1].cancel()

    def _arm(self, session: Session) -> None:
        """Keep one timer per session, at its next wake-up."""
        due_s = session.next_wakeup_s
        timer = self._timers.get(session.request_id)
        if timer is not None:
            if timer[0] == due_s:
                return
            timer[1].cancel()
        delay_s = max(0.0, due_s - self._clock.monotonic_s())
        handle = asyncio.get_running_loop().call_later(delay_s, self._wake, session)
        self._timers[session.request_id] = (due_s, handle)

    def _wake(self, session: Session) -> None:
        self._timers.pop(session.request_id, None)
        self._do(session, session.tick)
        self._dispatch_due()
