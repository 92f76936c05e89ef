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
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

_PATIENCE = 2
_MAX_IDLE = 1024  # counters kept of callers without items


@dataclass(slots=True, eq=False)
class _Caller(Generic[T]):
    """A caller with items."""

    served: int
    items: OrderedDict[T, int] = field(default_factory=OrderedDict)  # with their tokens, in order
    num_passing_tokens: int = 0  # of other callers, served since its last item


class FairQueue(Generic[T]):
    """Items are distinct. All but iteration is O(callers), whatever the number of items.

    Items that were served and return (`add_first`) go before all others and are not charged again.
    `pin_head`: a head that could not be served stays the head until it is popped or removed, so
    that smaller items do not take the place of a large one for ever.
    """

    def __init__(self) -> None:
        self._items: dict[T, tuple[int, int]] = {}  # all: caller id, tokens
        self._first: OrderedDict[T, None] = OrderedDict()  # those that returned
        self._callers: dict[int, _Caller[T]] = {}  # of the others
        self.total_tokens = 0  # of all items
        self._idle: dict[int, int] = {}  # counters above the floor
        self._floor = 0  # the lowest counter when an item was last served: no counter is below
        self._chosen: _Caller[T] | None = None  # the caller of the head; None: to be found
        self._is_pinned = False  # `_chosen` stays

    def add(self, item: T, caller_id: int, num_tokens: int) -> None:
        """Queue `item` behind all others of its caller."""
        self._enter(item, caller_id, num_tokens)
        caller = self._callers.get(caller_id)
        if caller is None:
            caller = self._callers[caller_id] = _Caller(self.served(caller_id))
            self._idle.pop(caller_id, None)
            if not self._is_pinned:
                self._chosen = None
        caller.items[item] = num_tokens

    def add_first(self, item: T, caller_id: int, num_tokens: int) -> None:
        """Queue `item` before all others of all callers."""
        self._enter(item, caller_id, num_tokens)
        self._first[item] = None
        self._first.move_to_end(item, last=False)

    def _enter(self, item: T, caller_id: int, num_tokens: int) -> None:
        assert item not in self._items
        self._items[item] = caller_id, num_tokens
        self.total_tokens += num_tokens

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
        item = self.head
        assert item is not None
        if not self._first:
            caller = self._next()
            charge = caller.items[item] if num_tokens is None else num_tokens
            self._floor = min(other.served for other in self._callers.values())
            for other in self._callers.values():
                other.num_passing_tokens += charge
            caller.served += charge
            caller.num_passing_tokens = 0
        self.remove(item)
        # Callers at the floor would be raised to it anyway.
        self._idle = {i: served for i, served in self._idle.items() if served > self._floor}
        return item

    def remove(self, item: T) -> None:
        """Remove `item` without a charge. Raises KeyError if it is not in the queue."""
        caller_id, num_tokens = self._items.pop(item)
        self.total_tokens -= num_tokens
        if item in self._first:
            del self._first[item]
            return
        caller = self._callers[caller_id]
        if caller is self._chosen and item == next(iter(caller.items)):
            self._is_pinned = False
        if not self._is_pinned:
            self._chosen = None
        del caller.items[item]
        if not caller.items:
            del self._callers[caller_id]
            self._idle[caller_id] = caller.served
            if len(self._idle) > _MAX_IDLE:  # little is lost: they are close to the floor
                self._idle.clear()

    def served(self, caller_id: int) -> int:
        """The caller's counter, in tokens; for an unknown caller, what it would be raised to."""
        caller = self._callers.get(caller_id)
        return max(self._idle.get(caller_id, 0), self._floor) if caller is None else caller.served

    def num_tokens(self, item: T) -> int:
        """The tokens that `item` was added with. Raises KeyError if it is not in the queue."""
        return self._items[item][1]

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        """All items: the first ones in their order, then caller by caller, the next one first."""
        yield from self._first
        for caller in sorted(self._callers.values(), key=self._rank):
            yield from caller.items

    def _next(self) -> _Caller[T]:
        if self._chosen is None:
            self._chosen = min(self._callers.values(), key=self._rank)
        return self._chosen

    def _rank(self, caller: _Caller[T]) -> tuple[bool, int, int]:
        num_tokens = next(iter(caller.items.values()))  # of the caller's head
        share = num_tokens * len(self._callers)
        is_overdue = caller.num_passing_tokens > _PATIENCE * share
        served = caller.served + (0 if is_overdue else num_tokens)
        is_pinned = self._is_pinned and caller is self._chosen
        return not is_pinned, served, num_tokens
