"""The assumption of the prefix cache: two prefixes never have the same hash.

The cache compares hashes, not tokens. With 128 bits of blake2b two among 2**40 blocks ever computed
are equal with a probability of 2**-49, so a collision is considered impossible; only the hash
itself may collide, never its input. With a hash of a few values only, the cache must still stay
consistent, and be wrong exactly where an oracle sees two prefixes collide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from effort import examples
from engines.integrity import check_pool
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request import token_ids
from baton.core.request.token_ids import BlockHash, block_hashes, root_hash
from baton.engine.kv.block_pool import BlockPool
from baton.engine.kv.generations import Generations
from baton.engine.kv.prefix_cache import PrefixCache

BLOCK_SIZE = 2
NUM_BLOCKS = 10

Prefix = tuple[int, ...]
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=4 * BLOCK_SIZE).map(tuple)
scripts = st.lists(st.tuples(prompts, st.booleans()), min_size=1, max_size=25)


def prefixes(tokens: Prefix) -> list[Prefix]:
    """One prefix per full block: all tokens up to the block's end."""
    return [tokens[: i + BLOCK_SIZE] for i in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)]


@dataclass
class Model:
    """A pool that records the prefix of each block's KV, as the oracle of its content.

    `hash_values`: the number of different hashes; None: the real ones.
    """

    hash_values: int | None
    content: dict[int, Prefix] = field(default_factory=dict)  # block -> the prefix of its KV
    live: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS, Generations(NUM_BLOCKS))
        self.cache = PrefixCache(self.pool)

    def hashes(self, tokens: Prefix) -> list[BlockHash]:
        honest = block_hashes(root_hash("toy"), tokens, BLOCK_SIZE)
        if self.hash_values is None:
            return honest
        return [BlockHash(bytes([h[0] % self.hash_values])) for h in honest]

    def serve(self, tokens: Prefix) -> list[Prefix] | None:
        """The prefixes in the prompt's cached blocks; computes and stores the others. None: no
        room."""
        hashes = self.hashes(tokens)
        matched = self.cache.match(hashes)
        self.pool.acquire(matched)
        found = [self.content[block] for block in matched]
        fresh = self.pool.allocate(len(hashes) - len(matched))
        if fresh is None:
            self.pool.release(matched)
            return None
        for index, block in enumerate(fresh, start=len(matched)):
            self.content[block] = prefixes(tokens)[index]
            self.cache.store([hashes[index]], [block])
        self.live.append(matched + fresh)
        return found

    def check_integrity(self) -> None:
        owners: dict[int, int] = {}
        for blocks in self.live:
            for block in blocks:
                owners[block] = owners.get(block, 0) + 1
        check_pool(self.pool, owners)


def play(model: Model, script: list[tuple[Prefix, bool]]) -> list[tuple[Prefix, list[Prefix]]]:
    """Serve prompts, some of which are released at once; returns each with its cache hits'
    prefixes."""
    served = []
    for tokens, leaves in script:
        found = model.serve(tokens)
        model.check_integrity()
        if found is not None:
            served.append((tokens, found))
            if leaves:
                model.pool.release(model.live.pop())
        elif model.live:
            model.pool.release(model.live.pop(0))
        model.check_integrity()
    while model.live:
        model.pool.release(model.live.pop())
    model.check_integrity()
    assert model.pool.counts.held == 0
    return served


@examples(50, 150)
@given(script=scripts)
def test_with_its_own_hash_every_hit_is_the_prompt_s_own_prefix(
    script: list[tuple[Prefix, bool]],
) -> None:
    for tokens, found in play(Model(hash_values=None), script):
        assert found == prefixes(tokens)[: len(found)]


@examples(50, 150)
@given(script=scripts, hash_values=st.integers(1, 6))
def test_with_colliding_hashes_blocks_stay_accounted_and_only_collisions_are_wrong(
    script: list[tuple[Prefix, bool]], hash_values: int
) -> None:
    """A hit always has the hash that was looked up: the cache confuses no blocks."""
    model = Model(hash_values)
    for tokens, found in play(model, script):
        for requested, held in zip(prefixes(tokens), found, strict=False):
            assert model.hashes(requested)[-1] == model.hashes(held)[-1]


def test_a_collision_would_be_wrong_kv() -> None:
    """A collision gives wrong KV, since nothing after the hash would detect it: the reason for 128
    bits."""
    model = Model(hash_values=1)
    model.serve((1, 1))
    assert model.serve((2, 2)) == [(1, 1)]


def recorded_inputs(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record every byte string that is hashed from this moment on."""
    inputs: list[bytes] = []

    class Recorder:
        def __init__(self, data: bytes = b"", *, digest_size: int) -> None:
            self.data, self.digest_size = data, digest_size

        def copy(self) -> Recorder:
            return Recorder(self.data, digest_size=self.digest_size)

        def update(self, data: bytes) -> None:
            self.data += data

        def digest(self) -> bytes:
            inputs.append(self.data)
            return hashlib.blake2b(self.data, digest_size=self.digest_size).digest()

    monkeypatch.setattr(token_ids, "hashlib", SimpleNamespace(blake2b=Recorder))
    return inputs


def test_different_roots_and_blocks_never_hash_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Moving a character between two adjacent texts of one input changes the input."""
    inputs = recorded_inputs(monkeypatch)
    words = ["", "a", "aa", "1:", "1:a", "2:aa", ":", "é"]
    roots = set()
    for fingerprint in words:
        for salt in words:
            inputs.clear()
            root_hash(fingerprint, salt)
            roots.add(inputs[0])  # the tenant's tag follows
    assert len(roots) == len(words) ** 2
    inputs.clear()
    parents = [BlockHash(bytes([i] * 16)) for i in range(3)]
    blocks: list[Sequence[int]] = [
        (0, 1),
        (1, 0),
        (256, 0),
        (0, 256),
        (2**31 - 1, 0),
        (2**32 - 1, 0),
    ]
    for parent in parents:
        for tokens in blocks:
            block_hashes(parent, tokens, BLOCK_SIZE)
    assert len(set(inputs)) == len(parents) * len(blocks)


@pytest.mark.parametrize("token_id", [2**32, -1])
def test_a_token_id_that_does_not_fit_is_not_cut_short(token_id: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes(root_hash("toy"), (token_id, 0), BLOCK_SIZE)


def test_a_hash_has_128_bits() -> None:
    assert {len(h) for h in block_hashes(root_hash("toy"), range(8), BLOCK_SIZE)} == {16}
