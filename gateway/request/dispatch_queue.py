"""Sessions that found no place, and the order in which they try again: fair between callers.

    a session that must wait, or starts
    while others wait ─► eligible: a fair queue; only its head is tried
                          │ ▲  └─ no decode engine has a place ► it stays the head; none passes it
                          ▼ │
                       held, by caller: enough of that caller's prompts wait at the engines;
                          │ ▲           a first token of one ► the caller's next one is eligible
                          ▼ │
                       stranded: no pair of engines may serve it; tried when engines come or go
So prompts wait here, and engines get only what they will compute soon: a light caller finds places,
and few prompts ahead of its own. A session that was dispatched before goes first.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ...core.fair_queue import FairQueue
from .engine_link import Blocked
from .session import Session

SEQUENCE_TOKENS = 256  # the cost of a place in prompt tokens: about what is generated in it


@dataclass(slots=True)
class CallerShare:
    """The waiting sessions of one caller. `cost`: prompt tokens and places, in tokens."""

    num_requests: int = 0
    num_tokens: int = 0
    cost: int = 0


class _Counted(NamedTuple):
    """What one waiting session adds to its caller's share. `order`: among the caller's sessions,
    those that an engine had before are first."""

    num_tokens: int
    cost: int
    order: tuple[bool, int]


class DispatchQueue:
    """Knows no engine: sessions try, and their `blocked` is why they could not be dispatched.

    `released`: callers with a prompt that an engine has computed or ended since; cleared here, and
    by the owner while no session waits. `shares`: by caller; empty if no session waits.
    """

    def __init__(self, released: set[int] | None = None) -> None:
        self.released: set[int] = set() if released is None else released
        self._eligible: FairQueue[Session] = FairQueue()
        self._held: dict[int, list[Session]] = {}  # by caller, in their order
        self._stranded: dict[Session, None] = {}
        self.shares: dict[int, CallerShare] = {}
        self._counted: dict[Session, _Counted] = {}  # all waiting sessions
        self._numbers = itertools.count()
        self._tried: Session | None = None
        self._has_changed = False  # since `advance`
        self.has_no_place = False  # whether the head found none when it was last tried

    def __len__(self) -> int:
        return len(self._counted)

    def num_tokens(self) -> int:
        """Tokens of the waiting prompts."""
        return sum(share.num_tokens for share in self.shares.values())

    @property
    def is_due(self) -> bool:
        """Whether waiting sessions may find a place that they did not at the last `advance`."""
        return bool(self._counted) and (self._has_changed or bool(self.released))

    def add(self, session: Session) -> None:
        """Add a new session, behind the others of its caller."""
        self._count(session)
        if (held := self._held.get(session.request.caller_id)) is not None:
            held.append(session)
        else:
            self._make_eligible(session)

    def follow(self, session: Session) -> None:
        """Update the queue after a session acted by itself: it may wait again, or no longer."""
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
            self._keep(session)

    def remove(self, session: Session) -> None:
        """Remove a session that ended or was dispatched, if it waits here."""
        if session not in self._counted:
            return
        self._uncount(session)
        caller_id = session.request.caller_id
        if session in self._eligible:
            self._eligible.remove(session)
            self._release(caller_id)
            self._has_changed = True  # it may have been the head that no other one passes
        elif session in self._stranded:
            del self._stranded[session]
        else:
            self._held[caller_id].remove(session)
            if not self._held[caller_id]:
                del self._held[caller_id]

    def advance(self, try_dispatch: Callable[[Session], None]) -> None:
        """Try to dispatch sessions, in their order, until one finds no place."""
        for caller_id in self.released & self._held.keys():
            self._release(caller_id)
        self.released.clear()
        self._has_changed = self.has_no_place = False
        while (head := self._eligible.head) is not None and not self.has_no_place:
            self._tried = head
            try:
                try_dispatch(head)
            finally:
                self._tried = None
            self._place(head)

    def retry_stranded(self) -> None:
        """Engines came or went: the next `advance` tries all that were stranded or held."""
        for session in self._stranded:
            self._make_eligible(session)
        self._stranded.clear()
        for caller_id in list(self._held):
            self._release(caller_id)

    def _place(self, head: Session) -> None:
        """Put the head where it belongs after it was tried."""
        caller_id = head.request.caller_id
        if head not in self._counted:
            return  # it ended and was removed
        if not head.is_waiting:
            self._uncount(head)
            self._eligible.pop()
            self._release(caller_id)
        elif head.blocked is Blocked.PLACE:
            self._eligible.pin_head()
            self.has_no_place = True
        else:
            self._eligible.remove(head)
            if head.blocked is None:
                self._uncount(head)  # it will try by itself
            else:
                self._keep(head)
            if head.blocked is not Blocked.TURN:
                self._release(caller_id)

    def _make_eligible(self, session: Session) -> None:
        self._has_changed = True
        was_dispatched = session.last_attempt is not None  # so its caller was charged for it
        add = self._eligible.add_first if was_dispatched else self._eligible.add
        add(session, session.request.caller_id, self._counted[session].cost)

    def _keep(self, session: Session) -> None:
        """Keep a session by why it was not dispatched."""
        match session.blocked:
            case Blocked.ENGINE:
                self._stranded[session] = None
            case Blocked.TURN:
                held = self._held.setdefault(session.request.caller_id, [])
                insort(held, session, key=lambda waiting: self._counted[waiting].order)
            case _:
                self._make_eligible(session)

    def _release(self, caller_id: int) -> None:
        """Make the caller's next held session eligible."""
        if held := self._held.get(caller_id):
            self._make_eligible(held.pop(0))
        if not held:
            self._held.pop(caller_id, None)

    def _count(self, session: Session) -> None:
        demand = session.demand
        cost = demand.num_tokens + SEQUENCE_TOKENS * demand.num_sequences
        order = session.last_attempt is None, next(self._numbers)
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
        if not self.shares:
            self.has_no_place = False  # a session that starts now is tried at once
