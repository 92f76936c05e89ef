"""The router of one request: the engine table, asked with what each engine has cached of a prompt.

Hashing costs some microseconds a block, so it stops where no engine has the chain, gives the event
loop its turns, and is done once a request. No network: the mirror is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.errors import Unavailable
from ...core.membership import Role
from ...core.request.token_ids import BlockHash, block_hashes, root_hash, salted
from ..request.engine_link import Avoid, Demand, Route
from .engine_table import EngineTable

_SLICE_BLOCKS = 64  # about 0.03 ms of hashing


@dataclass(frozen=True, slots=True)
class PromptRouter:
    """`engine_link.Router`. `hashes`: of the prompt's first full blocks, by fingerprint;
    `token_ids` and `cache_salt`, the adapter in it: what prompts that are computed now are compared
    by.

    `computes_all`: a prefill engine is to score the prompt's own tokens, cached or not. `adapter`:
    the digest of the request's LoRA adapter, if it has one.
    """

    table: EngineTable
    hashes: Mapping[str, Sequence[BlockHash]]
    caller_id: int = 0
    is_constrained: bool = False
    computes_all: bool = False
    adapter: str = ""
    token_ids: Sequence[int] = ()
    cache_salt: str = ""

    def choose(self, demand: Demand, *, avoid: Avoid, fingerprint: str | None) -> Route:
        listed = self._listed_tokens(demand.num_tokens)
        lendable = self._lendable(listed)
        in_flight = {} if self.computes_all else self._in_flight(demand.num_tokens)
        cached_tokens = _most(listed, in_flight)
        in_host = {
            name: listed[name] - num_tokens
            for name, num_tokens in lendable.items()
            if num_tokens < listed[name] == cached_tokens[name]
        }
        decisions = self.table.decisions
        try:
            route = self.table.choose(
                demand,
                avoid=avoid,
                fingerprint=fingerprint,
                caller_id=self.caller_id,
                cached_tokens=cached_tokens,
                is_constrained=self.is_constrained,
                adapter=self.adapter,
                host_tokens=in_host,
                lendable_tokens=lendable,
                in_flight_tokens=max(in_flight.values(), default=0),
            )
        except Unavailable:
            decisions["unavailable"] += 1
            raise
        if avoid:
            decisions["retry"] += 1
        elif route.is_local:
            decisions["local"] += 1
        elif cached_tokens.get(route.prefill.incarnation):
            decisions["cached_prefix"] += 1
        else:
            decisions["least_loaded"] += 1
        return route

    def lendable_tokens(self, num_tokens: int) -> dict[str, int]:
        """By incarnation, what other engines could fetch: what the index lists, in front of the
        first block that is in host memory alone."""
        return self._lendable(self._listed_tokens(num_tokens))

    def _lendable(self, listed: Mapping[str, int]) -> dict[str, int]:
        found: dict[str, int] = {}
        if self.computes_all:
            return found
        for incarnation, num_tokens in listed.items():
            engine = self.table.engines[incarnation]
            size = engine.member.block_size
            chain = self.hashes[engine.fingerprint][: num_tokens // size]
            in_host = self.table.mirror.first_in_host(incarnation, chain)
            found[incarnation] = num_tokens if in_host is None else in_host * size
        return found

    def cached_tokens(self, num_tokens: int) -> dict[str, int]:
        """By incarnation, how many tokens each engine is likely to have."""
        listed = self._listed_tokens(num_tokens)
        return listed if self.computes_all else _most(listed, self._in_flight(num_tokens))

    def _listed_tokens(self, num_tokens: int) -> dict[str, int]:
        """By the index."""
        cached: dict[str, int] = {}
        for fingerprint, chain in self.hashes.items():
            engines = _engines_of(self.table, fingerprint)
            for incarnation, num_blocks in self.table.mirror.cached_blocks(engines, chain).items():
                member = self.table.engines[incarnation].member
                if member.role is Role.PREFILL:  # it computes one token at least
                    if self.computes_all:
                        continue
                    num_blocks = min(num_blocks, (num_tokens - 1) // member.block_size)
                cached[incarnation] = num_blocks * member.block_size
        return cached

    def _in_flight(self, num_tokens: int) -> dict[str, int]:
        """Of prompts like this one that engines compute now, or are about to."""
        if not self.table.prompts:
            return {}
        found: dict[str, int] = {}
        for fingerprint in self.hashes:
            size = next(
                e.member.block_size
                for e in self.table.engines.values()
                if e.fingerprint == fingerprint
            )
            common = self.table.prompts.common_blocks(
                fingerprint, self.cache_salt, self.token_ids, size
            )
            for incarnation, num_blocks in common.items():
                found[incarnation] = min(num_blocks, (num_tokens - 1) // size) * size
        return found


def _most(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    if not other:
        return {**one}
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in one.keys() | other.keys()}


async def route_prompt(
    table: EngineTable,
    token_ids: Sequence[int],
    cache_salt: str = "",
    *,
    caller_id: int = 0,
    is_constrained: bool = False,
    computes_all: bool = False,
    adapter: str = "",
) -> PromptRouter:
    """The router for a prompt: hashes as much of it as some engine may have cached.

    `cache_salt` is the one that the engines get with the request.
    """
    block_sizes = {e.fingerprint: e.member.block_size for e in table.engines.values()}
    hashes = {
        fingerprint: await _hash_while_cached(
            table, token_ids, root_hash(fingerprint, cache_salt, adapter), fingerprint, block_size
        )
        for fingerprint, block_size in block_sizes.items()
    }
    return PromptRouter(
        *(table, hashes, caller_id, is_constrained, computes_all, adapter),
        token_ids,
        salted(cache_salt, adapter),
    )


async def _hash_while_cached(
    table: EngineTable,
    token_ids: Sequence[int],
    root: BlockHash,
    fingerprint: str,
    block_size: int,
) -> list[BlockHash]:
    """The chain, to the end of the slice in which the last engine's cache of it ends."""
    mirror = table.mirror
    hashes: list[BlockHash] = []
    parent = root
    num_slice_tokens = _SLICE_BLOCKS * block_size
    for start in range(0, len(token_ids), num_slice_tokens):
        if not mirror.holds_any(_engines_of(table, fingerprint), hashes[-1:]):
            break
        hashes += block_hashes(parent, token_ids[start : start + num_slice_tokens], block_size)
        if not hashes:
            break  # shorter than a block
        parent = hashes[-1]
        await asyncio.sleep(0)
    return hashes


def _engines_of(table: EngineTable, fingerprint: str) -> list[str]:
    return [e.incarnation for e in table.engines.values() if e.fingerprint == fingerprint]
