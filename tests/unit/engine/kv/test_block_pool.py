"""The block pool against a model of it written with sets and lists."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from effort import examples
from engines.integrity import check_pool
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, BlockCounts, BlockPool, Fence
from baton.engine.kv.generations import Generations

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """`holdings` are lists of blocks, each with one reference; some of them are fences."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = Generations(NUM_BLOCKS)
        self.pool = BlockPool(NUM_BLOCKS, self.generations)
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.extend
        self.free = set(range(NUM_RESERVED_BLOCKS, NUM_BLOCKS))
        self.cached: list[int] = []  # least recently used first
        self.kept: set[int] = set()
        self.holdings: list[list[int]] = []
        self.fences: list[Fence] = []

    def refs(self) -> Counter[int]:
        held = Counter(block for holding in self.holdings for block in holding)
        return held + Counter(block for fence in self.fences for block in fence.block_ids)

    def forget(self, blocks: list[int]) -> None:
        """Drop one reference to each of `blocks` in the model, the last block first."""
        for block in reversed(blocks):
            if block not in self.refs():
                if block in self.kept:
                    if block not in self.cached:
                        self.cached.append(block)
                else:
                    self.free.add(block)

    @rule(n=st.integers(0, NUM_BLOCKS))
    def allocate(self, n: int) -> None:
        before = [self.generations.read(b) for b in range(NUM_BLOCKS)]
        num_evicted = len(self.evicted)
        ids = self.pool.allocate(n)
        if n > len(self.free) + len(self.cached):
            assert ids is None
            assert self.evicted[num_evicted:] == []
            return
        assert ids is not None and len(set(ids)) == n
        expected = self.cached[: max(0, n - len(self.free))]
        assert self.evicted[num_evicted:] == expected
        assert set(ids) <= self.free | set(expected)
        self.free = (self.free | set(expected)) - set(ids)
        self.kept -= set(expected)
        del self.cached[: len(expected)]
        self.holdings.append(ids)
        for block in range(NUM_BLOCKS):
            assert (self.generations.read(block) != before[block]) == (block in ids)

    @precondition(lambda self: self.refs() or self.cached)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        known = sorted({*self.refs(), *self.cached})
        ids = data.draw(st.lists(st.sampled_from(known), unique=True))
        self.pool.acquire(ids)
        self.cached = [b for b in self.cached if b not in ids]
        self.holdings.append(ids)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holdings) - 1))
        ids = self.holdings.pop(index)
        self.pool.release(ids)
        self.forget(ids)

    @precondition(lambda self: self.refs())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs())))
        self.pool.keep([block])
        self.kept.add(block)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def open_fence(self, data: st.DataObject) -> None:
        self.fences.append(self.pool.open_fence(data.draw(st.sampled_from(self.holdings))))

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def close_fence(self, data: st.DataObject) -> None:
        fence = self.fences.pop(data.draw(st.integers(0, len(self.fences) - 1)))
        fence.close()
        self.forget(list(fence.block_ids))
        fence.close()

    @invariant()
    def agrees_with_model(self) -> None:
        refs = self.refs()
        check_pool(self.pool, refs)
        assert self.pool.counts == BlockCounts(
            len(self.free), len(self.cached), len(refs), NUM_RESERVED_BLOCKS
        )
        assert self.pool.num_available == len(self.free) + len(self.cached)
        assert set(self.pool.open_fences) == set(self.fences)


PoolMachine.TestCase.settings = examples(25, 60, stateful_step_count=30)
test_pool_machine = PoolMachine.TestCase


def new_pool(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, Generations(num_blocks))


def test_reserved_blocks_are_never_handed_out() -> None:
    pool = new_pool()
    ids = pool.allocate(pool.capacity)
    assert ids is not None
    assert sorted(ids) == [2, 3, 4, 5, 6, 7]
    assert pool.allocate(1) is None


def test_a_fenced_block_is_not_handed_out_before_the_fence_closes() -> None:
    pool = new_pool()
    ids = pool.allocate(6)
    assert ids is not None
    fence = pool.open_fence(ids[:2])
    pool.release(ids)
    again = pool.allocate(4)
    assert again is not None and not set(again) & set(ids[:2])
    assert pool.allocate(1) is None
    fence.close()
    assert set(pool.allocate(2) or []) == set(ids[:2])


def test_a_free_block_cannot_be_acquired() -> None:
    with pytest.raises(KeyError):
        new_pool().acquire([3])


def test_a_large_pool_keeps_some_blocks_free_ahead() -> None:
    """Eviction ahead takes the oldest blocks, a few at a time, and leaves all others untouched."""
    pool = new_pool(64 * 50 + NUM_RESERVED_BLOCKS)
    evicted: list[int] = []
    pool.on_evict = evicted.extend
    ids = pool.allocate(pool.capacity)
    assert ids is not None
    pool.evict_ahead()  # nothing can be evicted yet
    pool.keep(ids)
    pool.release(ids)
    num_free = []
    for _ in range(3):
        pool.evict_ahead()
        num_free.append(pool.counts.free)
    assert num_free == [32, 50, 50]
    assert evicted == ids[:-51:-1]
    assert pool.num_available == pool.capacity


def test_a_small_pool_keeps_all_that_it_can() -> None:
    pool = new_pool(64)
    ids = pool.allocate(pool.capacity)
    assert ids is not None
    pool.keep(ids)
    pool.release(ids)
    pool.evict_ahead()
    assert pool.counts.cached == pool.capacity


@pytest.mark.parametrize(
    ("owners", "message"),
    [({}, "1 references, 0"), ({2: 2}, "1 references, 2"), ({2: 1, 9: 1}, "do not exist: \\[9\\]")],
)
def test_integrity_names_the_first_discrepancy(owners: dict[int, int], message: str) -> None:
    pool = new_pool()
    assert pool.allocate(1) == [2]
    with pytest.raises(AssertionError, match=message):
        check_pool(pool, owners)


def test_a_million_blocks_are_no_burden() -> None:
    """Each operation is O(1) per block. Not a benchmark: the limit is generous."""
    started_s = time.perf_counter()
    pool = BlockPool(1 << 20, Generations(1 << 20))
    held = [pool.allocate(1000) for _ in range(1000)]
    for ids in held:
        assert ids is not None
        pool.release(ids)
    assert time.perf_counter() - started_s < 5
