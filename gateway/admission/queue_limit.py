"""Refuses a call at once if it would fail later, or wait longer than it may.

    prompt tokens ahead, and its own, by the engine's own cost ─┐ the longer of the two
    requests ahead that wait for a decode place, by how many    ├─► longer than what is left of its
    places become free                                         ─┘   deadline, or --max-queue-s:
                                                                    Overloaded, and when to retry
The work ahead is counted in an order that is fair between callers: of each other caller, no more
than this caller has queued itself. So a light caller is not refused because bulk callers have long
queues. Only measured times count: a time that no engine has measured yet counts as 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from ...core.errors import DeadlineExceeded, Overloaded
from ...prefix_index.prefix_sources import NOTHING, CachedPrefix
from ..engines.engine_account import EngineAccount
from ..engines.engine_table import EngineTable
from ..engines.linked_engine import LinkedEngine
from ..request.dispatch_queue import SEQUENCE_TOKENS, CallerShare, DispatchQueue
from ..request.engine_link import Avoid

_SOON_S = 0.1  # no retry sooner


class QueueLimit:
    """The rule of one gateway. `max_queue_s` None: only the deadline of a request bounds its
    wait."""

    def __init__(self, table: EngineTable, queue: DispatchQueue, max_queue_s: float | None) -> None:
        self._table, self._queue = table, queue
        self._max_queue_s = math.inf if max_queue_s is None else max_queue_s

    def check(
        self,
        caller_id: int,
        num_tokens: int,
        cached: Mapping[str, CachedPrefix],
        remaining_s: float,
    ) -> None:
        """Raise Overloaded unless a prompt of `num_tokens` can be computed in time, and
        DeadlineExceeded if no time is left. `cached`: the prompt's cached prefix of each engine, by
        incarnation.
        """
        if remaining_s <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        wait_s = max(
            self.prefill_s(caller_id, num_tokens, cached), self._place_s(caller_id, num_tokens)
        )
        allowed_s = min(self._max_queue_s, remaining_s)
        if wait_s <= allowed_s:
            return
        bound = "its deadline" if remaining_s < self._max_queue_s else "the longest wait here"
        raise Overloaded(
            f"the prompt would be computed in about {wait_s:.1f} s, {bound} is {allowed_s:.1f} s",
            retry_after_s=max(_SOON_S, wait_s - allowed_s),
        )

    def prefill_s(
        self, caller_id: int, num_tokens: int, cached: Mapping[str, CachedPrefix]
    ) -> float:
        """The time to a prompt's first token at the fastest engine, if all queues are fair between
        callers. 0 if nothing is ahead of it, or an engine's cost is not known.
        """
        table = self._table
        prefill = [e for e in table.engines.values() if e.takes_prompts and e.is_ready]
        parts = {
            other: share.num_tokens / len(prefill)
            for other, share in self._queue.shares.items()
            if prefill
        }
        fetches = table.fetches(cached, Avoid())

        def seconds(engine: LinkedEngine, own: int) -> float:
            ahead = fair_tokens_ahead(engine.account, caller_id, own, parts)
            speed = engine.account.speed
            if not ahead or speed is None:
                return 0.0
            return speed.prompt_seconds(own, num_tokens - own, ahead)

        waits_s = []
        for engine in prefill:
            name = engine.incarnation
            waits_s.append(seconds(engine, num_tokens - cached.get(name, NOTHING).num_tokens))
            if fetch := fetches.get(name):
                fetched_s = seconds(engine, num_tokens - fetch.num_tokens)
                waits_s.append(fetch.seconds + fetched_s)
        return min(waits_s, default=0.0)

    def _place_s(self, caller_id: int, num_tokens: int) -> float:
        """The time until decode places are free for the requests ahead of this one, and for it."""
        engines = self._table.engines.values()
        places_per_s = sum(engine.account.places_per_s or 0.0 for engine in engines)
        if not self._queue.has_no_place or not places_per_s:
            return 0.0
        shares = self._queue.shares
        own = shares.get(caller_id, CallerShare())
        cost = own.cost + num_tokens + SEQUENCE_TOKENS
        num_ahead = own.num_requests + sum(
            share.num_requests * min(1.0, cost / share.cost)
            for other, share in shares.items()
            if other != caller_id
        )
        return (num_ahead + 1) / places_per_s


def fair_tokens_ahead(
    account: EngineAccount, caller_id: int, num_tokens: int, held: Mapping[int, float]
) -> float:
    """The tokens ahead of a new prompt of this caller with `num_tokens` to compute, on an engine
    and among those `held` in the gateway, by caller: of each other caller at most as many as this
    one has waiting, and the prompt's own."""
    others = Counter[int](held)
    others.update(account.own_tokens)
    others.update(account.others.by_caller)
    mine = others.pop(caller_id, 0.0)
    unlisted, least = account.others.unlisted, account.others.least_listed
    most = mine + num_tokens
    whole = mine + sum(others.values()) + unlisted
    fair = mine + sum(min(tokens, most) for tokens in others.values())
    if unlisted:
        fair += unlisted * (min(1.0, most / least) if least else 1)
    share = fair / whole if whole else 0.0
    return (account.tokens_ahead + sum(held.values())) * share
