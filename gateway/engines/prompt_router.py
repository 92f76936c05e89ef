"""The router of one request: the engine table, asked with what each engine has cached of a prompt.

Hashing costs some microseconds a block, so it stops where no engine has the chain, gives the event
loop its turns, and is done once a request. No network: the mirror is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...core.errors import Unavailable
from ...core.membership import Role
from ...core.request.token_ids import BlockHash, block_hashes, root_hash, salted
from ...prefix_index.prefix_sources import CachedPrefix
from ..request.engine_link import Avoid, Demand, Route
from .engine_table import EngineTable
from .linked_engine import LinkedEngine

_SLICE_BLOCKS = 64  # about 0.03 ms of hashing


@dataclass(slots=True)
class PromptRouter:
    """`engine_link.Router`. `cache_salt`: the one that the engines get with the request;
    `computes_all`: an engine is to score the prompt's own tokens, cached or not; `adapter`:
    the digest of the request's LoRA adapter, if it has one. `hashes`: of the prompt's first full
    blocks, by fingerprint, once they were found.
    """

    table: EngineTable
    token_ids: Sequence[int] = ()
    cache_salt: str = ""
    caller_id: int = 0
    is_constrained: bool = False
    computes_all: bool = False
    adapter: str = ""
    hashes: dict[str, list[BlockHash]] = field(default_factory=dict)

    async def hash_prompt(self) -> None:
        """As much of it as some engine may have cached, by engines of each kind."""
        for fingerprint in {engine.fingerprint for engine in self.table.engines.values()}:
            self.hashes[fingerprint] = await self._hash_while_cached(fingerprint)

    async def _hash_while_cached(self, fingerprint: str) -> list[BlockHash]:
        """The chain, to the end of the slice in which the last engine's cache of it ends."""
        hashes: list[BlockHash] = []
        parent = root_hash(fingerprint, self.cache_salt, self.adapter)
        start = 0
        while start < len(self.token_ids) and (engines := self._alike(fingerprint)):
            names = [engine.incarnation for engine in engines]
            if not self.table.mirror.holds_any(names, hashes[-1:]):
                break
            size = engines[0].member.block_size
            end = start + _SLICE_BLOCKS * size
            hashes += block_hashes(parent, self.token_ids[start:end], size)
            if not hashes:
                break  # shorter than a block
            parent, start = hashes[-1], end
            await asyncio.sleep(0)
        return hashes

    def choose(self, demand: Demand, *, avoid: Avoid, fingerprint: str | None) -> Route:
        cached = self.cached(demand.num_tokens)
        decisions = self.table.decisions
        try:
            route = self.table.choose(
                demand,
                avoid=avoid,
                fingerprint=fingerprint,
                caller_id=self.caller_id,
                cached=cached,
                is_constrained=self.is_constrained,
                adapter=self.adapter,
            )
        except Unavailable:
            decisions["unavailable"] += 1
            raise
        prefix = cached.get(route.prefill.incarnation)
        if avoid:
            decisions["retry"] += 1
        elif route.is_local:
            decisions["local"] += 1
        elif prefix is not None and prefix.num_tokens:
            decisions["cached_prefix"] += 1
        else:
            decisions["least_loaded"] += 1
        return route

    def cached(self, num_tokens: int) -> dict[str, CachedPrefix]:
        """By incarnation, what engines have of the request's first `num_tokens`, by the index, or
        are about to have, by the prompts that they compute now."""
        found: dict[str, CachedPrefix] = {}
        mirror, prompts = self.table.mirror, self.table.prompts
        salt = salted(self.cache_salt, self.adapter)
        for fingerprint, chain in self.hashes.items():
            if not (engines := self._alike(fingerprint)):
                continue
            size = engines[0].member.block_size
            listed = mirror.cached_blocks([engine.incarnation for engine in engines], chain)
            in_flight = prompts.common_blocks(fingerprint, salt, self.token_ids, size)
            if not listed and not in_flight:
                continue
            for engine in engines:
                name = engine.incarnation
                blocks = listed.get(name, 0), in_flight.get(name, 0)
                if any(blocks):
                    found[name] = self._prefix(engine, chain, num_tokens, *blocks)
        return found

    def _prefix(
        self,
        engine: LinkedEngine,
        chain: Sequence[BlockHash],
        num_tokens: int,
        num_listed: int,
        num_in_flight: int,
    ) -> CachedPrefix:
        """`num_listed`: the blocks that the index has. One token at least is computed."""
        size, is_prefill = engine.member.block_size, engine.member.role is Role.PREFILL
        most = (num_tokens - 1) // size
        if self.computes_all:
            return CachedPrefix(0 if engine.takes_prompts else num_listed * size)
        num_in_flight = min(num_in_flight, most)
        if is_prefill:
            num_listed = min(num_listed, most)
        on_device = self.table.mirror.first_in_host(engine.incarnation, chain[:num_listed])
        lendable = num_listed if on_device is None else on_device
        in_host = num_listed - lendable if num_listed >= num_in_flight else 0
        blocks = max(num_listed, num_in_flight), in_host, lendable, num_in_flight
        return CachedPrefix(*(num_blocks * size for num_blocks in blocks))

    def _alike(self, fingerprint: str) -> list[LinkedEngine]:
        return [e for e in self.table.engines.values() if e.fingerprint == fingerprint]
