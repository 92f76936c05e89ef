"""The queue that is fair between callers, against a brute-force implementation of its rules and
against its bounds.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.fair_queue import FairQueue

CALLERS = st.integers(0, 4)
TOKENS = st.integers(1, 40)


@dataclass
class Item:
    """An item of the brute force, which searches one flat list each time."""

    name: int
    caller_id: int
    num_tokens: int
    is_first: bool = False


@dataclass
class BruteForce:
    """The rules, one by one. Counters of all callers are kept for ever."""

    items: list[Item] = field(default_factory=list)  # by arrival, returned ones first
    served: Counter[int] = field(default_factory=Counter)
    passing: Counter[int] = field(default_factory=Counter)  # others' tokens served meanwhile
    joined: list[int] = field(default_factory=list)  # waiting callers by time of arrival
    floor: int = 0
    pinned: int | None = None  # name of the head item

    def waiting(self) -> set[int]:
        return {item.caller_id for item in self.items if not item.is_first}

    def add(self, item: Item) -> None:
        if item.caller_id not in self.waiting():
            self.served[item.caller_id] = max(self.served[item.caller_id], self.floor)
            self.passing[item.caller_id] = 0
            self.joined.append(item.caller_id)
        self.items.append(item)

    def head(self) -> Item | None:
        for item in self.items:
            if item.is_first or item.name == self.pinned:
                return item
        heads = [next(i for i in self.items if i.caller_id == c) for c in self.joined]
        return min(heads, key=self.rank, default=None)

    def rank(self, item: Item) -> tuple[int, int]:
        share = item.num_tokens * len(self.waiting())
        is_overdue = self.passing[item.caller_id] > 2 * share
        charge = 0 if is_overdue else item.num_tokens
        return self.served[item.caller_id] + charge, item.num_tokens

    def pop(self, charge: int) -> None:
        head = self.head()
        assert head is not None
        if not head.is_first:
            self.floor = min(self.served[caller] for caller in self.waiting())
            self.served[head.caller_id] += charge
            for caller in self.waiting():
                self.passing[caller] += charge
            self.passing[head.caller_id] = 0
        self.take(head)

    def take(self, item: Item) -> None:
        self.items.remove(item)
        self.joined = [caller for caller in self.joined if caller in self.waiting()]
        if item.name == self.pinned:
            self.pinned = None


class QueueMachine(RuleBasedStateMachine):
    """The queue and the brute force perform the same operations; all that is visible is equal."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue()
        self.model = BruteForce()
        self.num_items = 0

    def new(self, caller_id: int, num_tokens: int, *, is_first: bool) -> Item:
        self.num_items += 1
        return Item(self.num_items, caller_id, num_tokens, is_first)

    @rule(caller_id=CALLERS, num_tokens=TOKENS)
    def add(self, caller_id: int, num_tokens: int) -> None:
        item = self.new(caller_id, num_tokens, is_first=False)
        self.queue.add(item.name, caller_id, num_tokens)
        self.model.add(item)

    @rule(caller_id=CALLERS, num_tokens=TOKENS)
    def come_back(self, caller_id: int, num_tokens: int) -> None:
        item = self.new(caller_id, num_tokens, is_first=True)
        self.queue.add_first(item.name, caller_id, num_tokens)
        self.model.items.insert(0, item)

    @precondition(lambda self: self.model.items)
    @rule(charge=st.none() | TOKENS)
    def pop(self, charge: int | None) -> None:
        head = self.model.head()
        assert head is not None
        assert self.queue.pop(charge) == head.name
        self.model.pop(head.num_tokens if charge is None else charge)

    @precondition(lambda self: self.model.items)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.model.items))
        self.queue.remove(item.name)
        self.model.take(item)

    @rule()
    def pin(self) -> None:
        self.queue.pin_head()
        head = self.model.head()
        if head is not None and not head.is_first:
            self.model.pinned = head.name

    @invariant()
    def agree(self) -> None:
        head = self.model.head()
        assert self.queue.head == (None if head is None else head.name)
        assert sorted(self.queue) == sorted(item.name for item in self.model.items)
        assert len(self.queue) == len(self.model.items)
        if head is not None:
            assert next(iter(self.queue)) == head.name
        for item in self.model.items:
            assert self.queue.num_tokens(item.name) == item.num_tokens
        assert self.queue.total_tokens == sum(item.num_tokens for item in self.model.items)
        for caller_id in range(5):
            expected = max(self.model.served[caller_id], self.model.floor)
            assert self.queue.served(caller_id) == expected


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.lists(TOKENS, min_size=40, max_size=40), min_size=2, max_size=5))
@settings(max_examples=40)
def test_callers_that_always_wait_are_served_alike(prompts: list[list[int]]) -> None:
    """Service of waiting callers differs by at most twice the largest charge, as in the paper."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for caller_id, lengths in enumerate(prompts):
        for index, length in enumerate(lengths):
            queue.add((caller_id, index), caller_id, length)
    served = [0] * len(prompts)
    largest = max(map(max, prompts))
    while len({caller_id for caller_id, _ in queue}) == len(prompts):
        caller_id, index = queue.pop()
        served[caller_id] += prompts[caller_id][index]
        assert max(served) - min(served) <= 2 * largest


def test_a_light_caller_passes_all_bulk_callers() -> None:
    queue: FairQueue[str] = FairQueue()
    for caller_id in range(10):
        for index in range(64):
            queue.add(f"bulk {caller_id} {index}", caller_id, 2000)
    for turn in range(200):
        queue.add(f"light {turn}", 99, 16)
        assert queue.pop() == f"light {turn}"
        assert queue.pop().startswith("bulk")


def test_idling_earns_nothing_and_leaving_clears_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(10):
        queue.add(f"a{index}", 1, 10)
    assert [queue.pop() for _ in range(5)] == [f"a{index}" for index in range(5)]
    queue.add("b0", 2, 30)
    queue.add("b1", 2, 30)
    assert [queue.pop() for _ in range(3)] == ["a5", "a6", "b0"]
    queue.remove("b1")
    queue.add("b2", 2, 5)
    queue.add("c", 3, 5)
    assert [queue.pop() for _ in range(3)] == ["c", "b2", "a7"], "b was served 30, c nothing"


def test_callers_that_come_again_and_again_with_one_item_share_with_one_that_waits() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(20):
        queue.add(f"bulk{index}", 1, 100)
    served = Counter[str]()
    for _ in range(25):
        if "b" not in queue:
            queue.add("b", 2, 50)
        head = queue.pop()
        served[head[:4]] += 50 if head == "b" else 100
        assert abs(served["bulk"] - served["b"]) <= 100


def test_callers_that_are_new_each_time_do_not_starve_a_large_head() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("large", 0, 1000)
    for index in range(1, 10_000):
        queue.add(f"{index}", index, 10)
        if queue.pop() == "large":
            break
    assert 2 * 2 * 1000 / 10 <= index <= 2 * 2 * 1000 / 10 + 2


def test_a_pinned_head_is_passed_by_nobody_but_what_comes_back() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("large", 0, 1000)
    queue.pin_head()
    for index in range(1, 9):
        queue.add(f"{index}", index, 1)
    assert queue.head == "large"
    queue.add_first("back", 3, 50)
    assert [queue.pop(), queue.pop()] == ["back", "large"]
    queue.pin_head()
    queue.remove("1")
    assert queue.head == "2"


def test_what_comes_back_is_charged_once() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("a", 1, 10)
    queue.add("b", 2, 10)
    assert queue.pop() == "a"
    queue.add_first("a", 1, 12)
    assert queue.total_tokens == 22
    assert queue.pop() == "a" and queue.served(1) == 10


def test_what_does_not_wait_cannot_be_removed() -> None:
    queue: FairQueue[str] = FairQueue()
    with pytest.raises(KeyError):
        queue.remove("a")
    assert queue.head is None and not queue


def test_it_remembers_no_caller_for_ever() -> None:
    queue: FairQueue[int] = FairQueue()
    for caller_id in range(5000):
        queue.add(caller_id, caller_id, 7)
        queue.pop()
    assert len(queue._idle) <= 1024 and not queue._callers and not queue._items
    queue.add(0, 5000, 7)
    for index in range(1, 300):
        queue.add(index, 5000, 7)
        queue.pop()
    queue.pop()
    assert len(queue._idle) <= 1, "all others have been served as much"


def test_thousands_of_items_of_one_caller_cost_nothing_more() -> None:
    queue: FairQueue[int] = FairQueue()
    start_s = time.process_time()
    for index in range(20_000):
        queue.add(index, 1, 5)
    for index in range(10_000, 20_000):
        queue.remove(index)
    assert [queue.pop() for _ in range(10_000)] == [*range(10_000)]
    assert time.process_time() - start_s < 2.0
