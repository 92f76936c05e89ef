"""Blocks lent to copies and borrowed for them, while other requests take and rewrite blocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest
from effort import number
from engines.integrity import check_pool
from fakes.clock import FakeClock

from baton.core.request.token_ids import BlockHash, Tier, block_hashes, root_hash
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, BlockPool, Fence
from baton.engine.kv.generations import Generations
from baton.engine.kv.lent_prefixes import BorrowedPrefix, LentPrefixes
from baton.engine.kv.prefix_cache import PrefixCache
from baton.prefix_index.journal import CacheJournal
from baton.prefix_index.messages import encode
from baton.prefix_index.mirror import PrefixMirror

SOURCE = "aa" * 16
CAPACITY, NUM_PROMPTS, NUM_BLOCKS = 8, 4, 3
PROMPTS = [block_hashes(root_hash("toy"), [n] * NUM_BLOCKS, 1) for n in range(NUM_PROMPTS)]


class Pool:
    """`content`: for each block the hash whose KV it holds, or None if overwritten by another."""

    def __init__(self) -> None:
        self.generations = Generations(NUM_RESERVED_BLOCKS + CAPACITY)
        self.pool = BlockPool(NUM_RESERVED_BLOCKS + CAPACITY, self.generations)
        self.cache = PrefixCache(self.pool)
        self.lent = LentPrefixes(self.pool, self.cache, lambda: 1 << 30)
        self.content: dict[int, BlockHash | None] = {}
        self.running: list[list[int]] = []

    def compute(self, hashes: list[BlockHash]) -> None:
        """A request computes a prompt in its own blocks and keeps running."""
        blocks = self.pool.allocate(len(hashes))
        if blocks is not None:
            self.content |= dict(zip(blocks, hashes, strict=True))
            self.cache.store(hashes, blocks)
            self.running.append(blocks)

    def rewrite(self, chance: random.Random) -> None:
        """Another request takes some blocks, writes to them and ends."""
        blocks = self.pool.allocate(chance.randint(1, CAPACITY)) or []
        self.content |= dict.fromkeys(blocks)
        self.pool.release(blocks)

    def check(self) -> None:
        fences = [fence.block_ids for fence in self.pool.open_fences]
        check_pool(self.pool, Counter(b for ids in [*fences, *self.running] for b in ids))
        for block_hash, block_id in self.cache._block_of.items():
            assert self.content[block_id] == block_hash, "a wrong block is in the cache"


Pull = tuple[BorrowedPrefix, Fence | None, list[tuple[int, int]]]


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "a source that lies"])
@pytest.mark.parametrize("seed", range(4))
def test_no_race_makes_a_wrong_block_visible(seed: int, is_pinned: bool) -> None:
    """No copy of a reused block is kept: without a pin, generations detect the reuse; with a pin,
    no block is reused."""
    chance = random.Random(seed)
    source, target = Pool(), Pool()
    pulls: list[Pull] = []
    num_kept = num_stale = 0
    for _ in range(number(8_000, 25_000)):
        match chance.choice(["compute", "end", "rewrite", "rewrite", "begin", "copy", "copy"]):
            case "compute":
                chance.choice((source, target)).compute(chance.choice(PROMPTS))
            case "end":
                pool = chance.choice((source, target))
                if pool.running:
                    pool.pool.release(pool.running.pop(chance.randrange(len(pool.running))))
            case "rewrite":
                chance.choice((source, target)).rewrite(chance)
            case "begin":
                hashes = chance.choice(PROMPTS)
                prefix = target.lent.borrow(hashes)
                if prefix is None:
                    continue
                found = source.cache.match(hashes)
                if len(found) < len(hashes):
                    target.lent.drop(prefix)
                    continue
                pin = source.lent._hold(found) if is_pinned else None
                refs = [(block_id, source.generations.read(block_id)) for block_id in found]
                pulls.append((prefix, pin, refs))
            case _ if pulls:
                prefix, pin, refs = pulls.pop(chance.randrange(len(pulls)))
                fresh = slice(prefix.num_cached_blocks, None)
                for (block_id, _), to in zip(refs[fresh], prefix.block_ids[fresh], strict=True):
                    target.content[to] = source.content[block_id]
                is_good = all(source.generations.read(b) == g for b, g in refs[fresh])
                num_kept, num_stale = num_kept + is_good, num_stale + (not is_good)
                if is_good:
                    target.lent.keep(prefix)
                else:
                    target.lent.drop(prefix)
                if pin is not None:
                    source.lent.give_back(pin)
        source.check()
        target.check()
    assert num_kept > 100 and (num_stale > 0) == (not is_pinned)


def test_a_fetched_prefix_is_evicted_from_its_end() -> None:
    """A fetched prefix is evicted from its end: the blocks cached before the fetch are its
    beginning, without which the rest is of no use."""
    target = Pool()
    hashes = block_hashes(root_hash("toy"), [9] * CAPACITY, 1)
    target.compute(hashes[:3])
    target.pool.release(target.running.pop())
    prefix = target.lent.borrow(hashes)
    assert prefix is not None and prefix.num_cached_blocks == 3
    target.lent.keep(prefix)
    for num_left in reversed(range(CAPACITY)):
        assert target.pool.allocate(1)
        assert len(target.cache.match(hashes)) == num_left


class Watched:
    """A source, and a gateway's mirror of its prefix cache."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.source = Pool()
        self.mirror = PrefixMirror(FakeClock())
        self.journal = CacheJournal(SOURCE)
        self.mirror.add(SOURCE, 100)
        self.source.cache._observer = self

    def moved(self, block_hashes: Collection[BlockHash], was: Tier, now: Tier) -> None:
        is_there = now is Tier.DEVICE
        self.journal.record([] if is_there else block_hashes, block_hashes if is_there else [])

    def publish(self) -> None:
        for delta in self.journal.take():
            self.mirror.take(encode(delta))

    def disturb(self) -> None:
        """Actions between look-up and pin: evictions, reuse, the same prompt computed again."""
        for _ in range(self.chance.randint(0, 3)):
            match self.chance.choice(["rewrite", "rewrite", "compute", "end", "publish"]):
                case "rewrite":
                    self.source.rewrite(self.chance)
                case "compute":
                    self.source.compute(self.chance.choice(PROMPTS))
                case "end" if self.source.running:
                    self.source.pool.release(self.source.running.pop())
                case _:
                    self.publish()


_MANY = [pytest.param(seed, 10_000, marks=pytest.mark.slow) for seed in range(1, 11)]


@pytest.mark.parametrize(("seed", "num_races"), [(0, 1_000), *_MANY])
def test_what_was_looked_up_and_is_no_longer_there_is_not_pinned(seed: int, num_races: int) -> None:
    """Blocks found in a gateway's mirror may have been evicted or reused when they are to be
    pinned: pinned blocks are those that were looked up, and keep their content."""
    chance = random.Random(seed)
    watched = Watched(chance)
    source, outcomes = watched.source, Counter[str]()
    while outcomes["races"] < num_races:
        hashes = chance.choice(PROMPTS)
        num_listed = watched.mirror.cached_blocks([SOURCE], hashes).get(SOURCE, 0)
        found_then = source.cache.match(hashes[:num_listed])
        generations = [source.generations.read(block_id) for block_id in found_then]
        watched.disturb()
        if not num_listed:
            continue
        is_same = [source.generations.read(b) for b in found_then] == generations
        outcomes["races"] += len(found_then) < num_listed or not is_same
        pinned = source.cache.match(hashes[:num_listed])
        pin = source.lent._hold(pinned)
        watched.disturb()
        assert [source.content[block_id] for block_id in pinned] == hashes[: len(pinned)]
        source.lent.give_back(pin)
        outcomes["short" if len(pinned) < num_listed else "whole"] += 1
        if outcomes["races"] % 64 == 0:
            source.check()
    assert min(outcomes["short"], outcomes["whole"]) > num_races / 10
