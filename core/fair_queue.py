"""A queue that is fair between callers, in tokens, and first come, first served within each.

After the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI
2024): every caller has a counter of the tokens that it was served. The next item is that of the
caller whose counter would be lowest with its head served, so no caller is ever ahead by more than
two heads:

    caller   served   waiting               next: 7, until it has been served 1412 - 16
       3       900    [ 512 | 512 | 512 ]
       7       980    [ 16 ]                idle: 5 keeps its counter until no waiting caller
       5      1050                                has less

The counter of a caller that joins is raised to the lowest one of a waiting caller when an item was
last served: being idle earns nothing, and leaving the queue clears nothing. So a light caller
passes bulk callers as long as it was served less; with deficit round robin it would wait for a
round of them. A head that was passed by `_PATIENCE` times its share counts as 0 tokens, so that
callers that are new each time do not starve it.

Knows no engine and no time. The owner decides what a token costs and when an item can be served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_PATIENCE = 2
_MAX_IDLE = 1024  # counters kept of callers without items


class _Caller(Generic[T]):
    """A caller with items."""

    __slots__ = ("caller_id", "items", "num_passing_tokens", "num_tokens", "served")

    def __init__(self, caller_id: int, served: int) -> None:
        self.caller_id = caller_id
        self.served = served
        self.items: OrderedDict[T, int] = OrderedDict()  # with their tokens; the head first
        self.num_tokens = 0
        self.num_passing_tokens = 0  # of other callers, served since its last item


class FairQueue(Generic[T]):
    """Items are distinct. All but iteration is O(callers), whatever the number of items.

    Items that were served and return (`add_first`) go before all others and are not charged again.
    `pin_head`: a head that could not be served stays the head until it is popped or removed, so
    that smaller items do not take the place of a large one for ever.
    """

    def __init__(self) -> None:
        self._callers: dict[int, _Caller[T]] = {}
        self._first: OrderedDict[T, tuple[int, int]] = OrderedDict()  # caller id, tokens
        self._owners: dict[T, int] = {}  # of all items but the first ones: caller ids
        self._idle: dict[int, int] = {}  # counters above the floor
        self._floor = 0  # the lowest counter when an item was last served: no counter is below
        self._chosen: _Caller[T] | None = None  # the caller of the head; None: to be found
        self._is_pinned = False  # `_chosen` stays

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
        """The next item."""
        if self._first:
            return next(iter(self._first))
        return next(iter(self._next().items)) if self._callers else None

    def pin_head(self) -> None:
        """The head cannot be served now: it stays the head, except for items that return."""
        if self._callers and not self._first:
            self._next()
            self._is_pinned = True

    def pop(self, num_tokens: int | None = None) -> T:
        """Remove the head and charge its caller the `num_tokens`, by default those that it was
        added with. The queue must not be empty."""
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
        """Remove `item` without a charge. Raises KeyError if it is not in the queue."""
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
            if len(self._idle) > _MAX_IDLE:  # little is lost: they are close to the floor
                self._idle.clear()

    def served(self, caller_id: int) -> int:
        """The caller's counter, in tokens; for an unknown caller, what it would be raised to."""
        caller = self._callers.get(caller_id)
        return max(self._idle.get(caller_id, 0), self._floor) if caller is None else caller.served

    def waiting_tokens(self) -> dict[int, int]:
        """Tokens of all items, by caller id."""
        waiting = {caller.caller_id: caller.num_tokens for caller in self._callers.values()}
        for caller_id, num_tokens in self._first.values():
            waiting[caller_id] = waiting.get(caller_id, 0) + num_tokens
        return waiting

    def num_tokens(self, item: T) -> int:
        """The tokens that `item` was added with. Raises KeyError if it is not in the queue."""
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
        """Drop counters at the floor: their callers would be raised to it anyway."""
        if any(served <= self._floor for served in self._idle.values()):
            above = {i: served for i, served in self._idle.items() if served > self._floor}
            self._idle = above

    def _next(self) -> _Caller[T]:
        if self._chosen is None:
            self._chosen = min(self._callers.values(), key=self._rank)
        return self._chosen

    def _choose_anew(self) -> None:
        if not self._is_pinned:
            self._chosen = None

    def _rank(self, caller: _Caller[T]) -> tuple[bool, int, int]:
        num_tokens = next(iter(caller.items.values()))  # of the caller's head
        share = num_tokens * len(self._callers)
        is_overdue = caller.num_passing_tokens > _PATIENCE * share
        served = caller.served + (0 if is_overdue else num_tokens)
        is_pinned = self._is_pinned and caller is self._chosen
        return not is_pinned, served, num_tokens
