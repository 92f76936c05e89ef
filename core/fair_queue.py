"""A queue that is fair between callers, in tokens, and first come, first served within each.

After the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI
2024): every caller has a counter of the tokens that it was served. Next comes the caller that has
the least with its head served, so that nobody is ever ahead by more than two heads:

    caller   served   waiting               next: 7, until it has been served 1412 - 16
       3       900    [ 512 | 512 | 512 ]
       7       980    [ 16 ]                idle: 5 keeps its counter until nobody that waits
       5      1050                                has less

A caller that comes is lifted to the least counter that a waiting caller had when somebody was last
served: idling earns nothing, and leaving the queue clears nothing. So a light caller passes bulk
callers as long as it has had less than they; by deficit round robin it would wait for a round of
them. A head that others pass for `_PATIENCE` times its share is taken for an empty one: callers
that are new each time do not starve it.

Knows no engine and no time. What a token costs, and when an item can be served, is its owner's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_PATIENCE = 2
_MAX_IDLE = 1024  # counters kept of callers of which nothing waits


class _Caller(Generic[T]):
    """One of which something waits."""

    __slots__ = ("caller_id", "items", "num_passing_tokens", "num_tokens", "served")

    def __init__(self, caller_id: int, served: int) -> None:
        self.caller_id = caller_id
        self.served = served
        self.items: OrderedDict[T, int] = OrderedDict()  # with their tokens; the next one first
        self.num_tokens = 0
        self.num_passing_tokens = 0  # of others, served since one of its own was


class FairQueue(Generic[T]):
    """Items are distinct. All is O(callers) at most, and independent of the number of items, but
    for iteration.

    Items that were served and come back (`add_first`) go before all others and are not charged
    again. A head that could not be served stays the head from `pin_head` until it is popped or
    removed, whoever comes: a large one does not wait for ever while smaller ones take its place.
    """

    def __init__(self) -> None:
        self._callers: dict[int, _Caller[T]] = {}
        self._first: OrderedDict[T, tuple[int, int]] = OrderedDict()  # caller id, tokens
        self._owners: dict[T, int] = {}  # of all items but the first ones: caller ids
        self._idle: dict[int, int] = {}  # counters above the floor
        self._floor = 0  # the least counter when somebody was last served: no counter is below
        self._chosen: _Caller[T] | None = None  # whose head is next; None: to be found anew
        self._is_pinned = False  # it stays chosen

    def add(self, item: T, caller_id: int, num_tokens: int) -> None:
        """Queue `item` behind all others of its caller."""
        assert item not in self._owners and item not in self._first
        caller = self._callers.get(caller_id)
        if caller is None:
            served = self.served(caller_id)
            self._idle.pop(caller_id, None)
            caller = self._callers[caller_id] = _Caller(caller_id, served)
            self._choose_anew()
        caller.items[item] = num_tokens
        caller.num_tokens += num_tokens
        self._owners[item] = caller_id

    def add_first(self, item: T, caller_id: int, num_tokens: int) -> None:
        """Queue `item` before all others of all callers."""
        assert item not in self._owners and item not in self._first
        self._first[item] = caller_id, num_tokens
        self._first.move_to_end(item, last=False)

    @property
    def head(self) -> T | None:
        """The next one."""
        if self._first:
            return next(iter(self._first))
        return next(iter(self._next().items)) if self._callers else None

    def pin_head(self) -> None:
        """The head cannot be served now: it stays the head, but for items that come back."""
        if self._callers and not self._first:
            self._next()
            self._is_pinned = True

    def pop(self, num_tokens: int | None = None) -> T:
        """Take the head out and charge its caller; `num_tokens`: if it turned out to cost others
        than it was added with. The queue is not empty."""
        if self._first:
            return self._first.popitem(last=False)[0]
        caller = self._next()
        item, expected = next(iter(caller.items.items()))
        charge = expected if num_tokens is None else num_tokens
        self._floor = caller.served
        for other in self._callers.values():
            self._floor = min(self._floor, other.served)
            other.num_passing_tokens += charge
        caller.served += charge
        caller.num_passing_tokens = 0
        self.remove(item)
        self._forget_idle()
        return item

    def remove(self, item: T) -> None:
        """Take `item` out uncharged. Raises KeyError if it does not wait."""
        if item in self._first:
            del self._first[item]
            return
        caller = self._callers[self._owners.pop(item)]
        if caller is self._chosen and item == next(iter(caller.items)):
            self._is_pinned = False
        self._choose_anew()
        caller.num_tokens -= caller.items.pop(item)
        if not caller.items:
            del self._callers[caller.caller_id]
            self._idle[caller.caller_id] = caller.served
            if len(self._idle) > _MAX_IDLE:  # of callers that come once: about the same
                self._idle.clear()

    def served(self, caller_id: int) -> int:
        """The caller's counter, in tokens; of one that is not known, what it would be lifted to."""
        caller = self._callers.get(caller_id)
        return max(self._idle.get(caller_id, 0), self._floor) if caller is None else caller.served

    def waiting_tokens(self) -> dict[int, int]:
        """Tokens of all that waits, by caller id."""
        waiting = {caller.caller_id: caller.num_tokens for caller in self._callers.values()}
        for caller_id, num_tokens in self._first.values():
            waiting[caller_id] = waiting.get(caller_id, 0) + num_tokens
        return waiting

    def num_tokens(self, item: T) -> int:
        """With which `item` was added. Raises KeyError if it does not wait."""
        if item in self._first:
            return self._first[item][1]
        return self._callers[self._owners[item]].items[item]

    def __len__(self) -> int:
        return len(self._first) + len(self._owners)

    def __contains__(self, item: T) -> bool:
        return item in self._owners or item in self._first

    def __iter__(self) -> Iterator[T]:
        """All items: the first ones in their order, then caller by caller, the next one first."""
        yield from self._first
        for caller in sorted(self._callers.values(), key=self._rank):
            yield from caller.items

    def _forget_idle(self) -> None:
        """Drop the counters of callers that would be lifted over them in any case."""
        if any(served <= self._floor for served in self._idle.values()):
            above = {one: had for one, had in self._idle.items() if had > self._floor}
            self._idle = above

    def _next(self) -> _Caller[T]:
        if self._chosen is None:
            self._chosen = min(self._callers.values(), key=self._rank)
        return self._chosen

    def _choose_anew(self) -> None:
        if not self._is_pinned:
            self._chosen = None

    def _rank(self, caller: _Caller[T]) -> tuple[bool, int, int]:
        num_tokens = next(iter(caller.items.values()))  # of its head
        share = num_tokens * len(self._callers)
        is_overdue = caller.num_passing_tokens > _PATIENCE * share
        served = caller.served + (0 if is_overdue else num_tokens)
        is_pinned = self._is_pinned and caller is self._chosen
        return not is_pinned, served, num_tokens
