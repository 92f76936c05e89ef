"""Blocks lent to copies and borrowed for them, while others take and rewrite what they can."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton.core.request.token_ids import BlockHash, block_hashes, root_hash
from baton.engine.kv.block_pool import NUM_RESERVED_BLOCKS, BlockPool, Fence
from baton.engine.kv.generations import LocalGenerations
from baton.engine.kv.lent_prefixes import BorrowedPrefix, LentPrefixes
from baton.engine.kv.prefix_cache import PrefixCache

CAPACITY, NUM_PROMPTS, NUM_BLOCKS = 8, 4, 3
PROMPTS = [block_hashes(root_hash("toy"), [n] * NUM_BLOCKS, 1) for n in range(NUM_PROMPTS)]


class Pool:
    """`content`: by block, the hash whose KV it has, or None for somebody else's."""

    def __init__(self) -> None:
        self.generations = LocalGenerations(NUM_RESERVED_BLOCKS + CAPACITY)
        self.pool = BlockPool(NUM_RESERVED_BLOCKS + CAPACITY, self.generations)
        self.cache = PrefixCache(self.pool)
        self.lent = LentPrefixes(self.pool, self.cache)
        self.content: dict[int, BlockHash | None] = {}
        self.running: list[list[int]] = []

    def compute(self, hashes: list[BlockHash]) -> None:
        """A request computes a prompt of its own, and runs on."""
        blocks = self.pool.allocate(len(hashes))
        if blocks is not None:
            self.content |= dict(zip(blocks, hashes, strict=True))
            self.cache.store(hashes, blocks)
            self.running.append(blocks)

    def rewrite(self, chance: random.Random) -> None:
        """Another one takes some blocks, writes, and is gone."""
        blocks = self.pool.allocate(chance.randint(1, CAPACITY)) or []
        self.content |= dict.fromkeys(blocks)
        self.pool.release(blocks)

    def check(self) -> None:
        fences = [fence.block_ids for fence in self.pool.open_fences]
        self.pool.check_integrity(Counter(b for ids in [*fences, *self.running] for b in ids))
        for block_hash, block_id in self.cache._block_of.items():
            assert self.content[block_id] == block_hash, "a wrong block is in the cache"


Pull = tuple[BorrowedPrefix, Fence | None, list[tuple[int, int]]]


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "a source that lies"])
@pytest.mark.parametrize("seed", range(4))
def test_no_race_makes_a_wrong_block_visible(seed: int, is_pinned: bool) -> None:
    """25,000 moves. Without the pin, generations alone tell; with it they never need to."""
    chance = random.Random(seed)
    source, target = Pool(), Pool()
    pulls: list[Pull] = []
    num_kept = num_stale = 0
    for _ in range(25_000):
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
                found = source.lent.match(hashes)
                if len(found) < len(hashes):
                    target.lent.drop(prefix)
                    continue
                pin = source.lent.lend(found) if is_pinned else None
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
                target.lent.drop(prefix)
                if pin is not None:
                    source.lent.give_back(pin)
        source.check()
        target.check()
    assert num_kept > 100 and (num_stale > 0) == (not is_pinned)
