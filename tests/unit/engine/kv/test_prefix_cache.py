"""The prefix cache against a brute-force oracle: a dict of whole prefixes and a list by age."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from effort import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.core.request.token_ids import BlockHash, Tier, block_hashes, root_hash
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.generations import Generations
from baton.engine.kv.prefix_cache import PrefixCache
from baton.engine.scheduling import sequence
from baton.engine.scheduling.block_tables import BlockTables

BLOCK_SIZE = 2
ROOT = root_hash("model")
NUM_BLOCKS = 10

Prefix = tuple[int, ...]
prompts = st.lists(st.integers(0, 1), min_size=BLOCK_SIZE, max_size=5 * BLOCK_SIZE).map(tuple)


class SetObserver:
    """The hashes in the cache, according to its events."""

    def __init__(self) -> None:
        self.hashes: set[BlockHash] = set()

    def moved(self, block_hashes: Iterable[BlockHash], was: Tier, now: Tier) -> None:
        assert {was, now} == {Tier.NOWHERE, Tier.DEVICE}
        for block_hash in block_hashes:
            assert (block_hash in self.hashes) == (was is Tier.DEVICE)
            self.hashes.symmetric_difference_update((block_hash,))


def prefixes(tokens: Prefix) -> list[Prefix]:
    """One prefix per full block: all tokens up to the block's end."""
    return [tokens[: i + BLOCK_SIZE] for i in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)]


def hashes_of(tokens: Prefix) -> list[BlockHash]:
    return block_hashes(ROOT, tokens, BLOCK_SIZE)


class CacheMachine(RuleBasedStateMachine):
    """Prompts arrive, share cached blocks, compute and store the rest, and end."""

    @initialize()
    def start(self) -> None:
        self.observer = SetObserver()
        self.pool = BlockPool(NUM_BLOCKS, Generations(NUM_BLOCKS))
        self.cache = PrefixCache(self.pool, observer=self.observer)
        self.block_of: dict[Prefix, int] = {}  # the oracle's cache
        self.ages: list[Prefix] = []  # unreferenced blocks, the oldest first
        self.live: list[list[int]] = []

    def oracle_match(self, tokens: Prefix) -> list[int]:
        best: list[int] = []
        for depth in range(len(prefixes(tokens)) + 1):
            chain = prefixes(tokens)[:depth]
            if all(prefix in self.block_of for prefix in chain):
                best = [self.block_of[prefix] for prefix in chain]
        return best

    @rule(tokens=prompts)
    def match_is_the_longest_cached_chain(self, tokens: Prefix) -> None:
        assert self.cache.match(hashes_of(tokens)) == self.oracle_match(tokens)

    @rule(tokens=prompts)
    def compute(self, tokens: Prefix) -> None:
        matched = self.cache.match(hashes_of(tokens))
        self.pool.acquire(matched)
        num_fresh = len(prefixes(tokens)) - len(matched)
        num_free = self.pool.counts.free
        self.ages = [p for p in self.ages if self.block_of[p] not in matched]
        fresh = self.pool.allocate(num_fresh)
        if fresh is None:
            self.pool.release(matched)
            self.age(matched)
            return
        for prefix in self.ages[: max(0, num_fresh - num_free)]:
            self.ages.remove(prefix)
            del self.block_of[prefix]
        blocks = matched + fresh
        for prefix, block_hash, block in zip(
            prefixes(tokens), hashes_of(tokens), blocks, strict=True
        ):
            if block in fresh:
                self.cache.store([block_hash], [block])
                self.block_of.setdefault(prefix, block)
        self.live.append(blocks)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(blocks)
        self.age(blocks)

    def age(self, blocks: list[int]) -> None:
        prefix_of = {block: prefix for prefix, block in self.block_of.items()}
        for block in reversed(blocks):
            if block in prefix_of and not any(block in other for other in self.live):
                self.ages.append(prefix_of[block])

    @invariant()
    def observer_knows_the_cache(self) -> None:
        assert self.observer.hashes == {hashes_of(prefix)[-1] for prefix in self.block_of}
        assert len(self.cache) == len(self.block_of)
        assert self.pool.counts.cached == len(self.ages)


CacheMachine.TestCase.settings = examples(25, 60, stateful_step_count=30)
test_cache_machine = CacheMachine.TestCase


def new_cache(*, is_enabled: bool = True) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(NUM_BLOCKS, Generations(NUM_BLOCKS))
    return pool, PrefixCache(pool, is_enabled=is_enabled)


def test_a_chain_is_evicted_from_its_end() -> None:
    pool, cache = new_cache()
    tokens = (1, 2, 3, 4, 5, 6, 7, 8)
    blocks = pool.allocate(4)
    assert blocks is not None
    for block_hash, block in zip(hashes_of(tokens), blocks, strict=True):
        cache.store([block_hash], [block])
    pool.release(blocks)
    for num_left in (4, 3, 2, 1, 0):
        assert cache.match(hashes_of(tokens)) == blocks[:num_left]
        pool.allocate(pool.counts.free + 1)


def test_of_two_equal_blocks_the_first_stays() -> None:
    pool, cache = new_cache()
    first, second = pool.allocate(2) or []
    block_hash = hashes_of((1, 2))[0]
    cache.store([block_hash], [first])
    cache.store([block_hash], [second])
    assert cache.match([block_hash]) == [first]
    pool.release([first, second])
    assert pool.counts.cached == 1


def test_switched_off_nothing_is_kept() -> None:
    pool, cache = new_cache(is_enabled=False)
    blocks = pool.allocate(1) or []
    cache.store([hashes_of((1, 2))[0]], [blocks[0]])
    assert cache.match(hashes_of((1, 2))) == []
    pool.release(blocks)
    assert pool.counts.cached == 0


@pytest.mark.parametrize("num_cached", [0, 1, 63, 64, 65, 128, 149, 150])
def test_long_prompt_is_matched_and_hashed_as_far_as_it_is_cached(
    num_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_blocks = 150
    prompt = tuple(range(num_blocks * BLOCK_SIZE))
    pool = BlockPool(num_blocks + 2, Generations(num_blocks + 2))
    cache = PrefixCache(pool)
    tables = BlockTables(pool, cache, BLOCK_SIZE)
    block_ids = pool.allocate(num_cached) or []
    for block_hash, block_id in zip(hashes_of(prompt), block_ids, strict=False):
        cache.store([block_hash], [block_id])
    hashed: list[int] = []

    def count(root: BlockHash, tokens: Sequence[int], block_size: int) -> list[BlockHash]:
        hashed.append(len(tokens) // block_size)
        return block_hashes(root, tokens, block_size)

    monkeypatch.setattr(sequence, "block_hashes", count)
    request = Request("a" * 32, 0, prompt, SamplingParams(max_tokens=1))
    one = sequence.Sequence(request, 1, True, ROOT)
    assert tables.match(one, len(prompt)) == block_ids
    assert sum(hashed) == min(num_blocks, 64 * (num_cached // 64 + 1))
    one.num_launched_tokens = len(prompt)
    tables.prepare_store(one)
    assert one.block_hashes(num_blocks, BLOCK_SIZE) == hashes_of(prompt)
    assert sum(hashed) == num_blocks
