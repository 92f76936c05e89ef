"""Chooses the engines for one request, by all that the table knows of them and by what each has
cached of the prompt.

Hashing costs some microseconds a block, so it stops where no engine has the chain, gives the event
loop its turns, and is done once a request. No network: the mirror is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...core.errors import Unavailable
from ...core.membership import Role
from ...core.request.sampling_params import SamplingParams
from ...core.request.token_ids import BlockHash, block_hashes, column, root_hash, salted
from ...prefix_index.prefix_sources import NOTHING, NOTHING_CACHED, CachedPrefix, Fetch
from ..request.engine_link import Avoid, Demand, MustWait, Route
from ..validation.validation import ValidatedRequest
from .engine_table import EngineTable
from .linked_engine import LinkedEngine
from .routing import EngineState

_SLICE_BLOCKS = 64  # about 0.03 ms of hashing


@dataclass(slots=True)
class PromptRouter:
    """`engine_link.Router`. `hashes`: of the prompt's first full blocks, by fingerprint, once they
    were found."""

    table: EngineTable
    request: ValidatedRequest
    hashes: dict[str, list[BlockHash]] = field(default_factory=dict)

    async def hash_prompt(self) -> None:
        """As much of it as some engine may have cached, by engines of each kind. One shorter than
        a block is in no cache."""
        num_tokens, engines = len(self.request.prompt_token_ids), self.table.engines.values()
        for fingerprint in {e.fingerprint for e in engines if num_tokens >= e.member.block_size}:
            self.hashes[fingerprint] = await self._hash_while_cached(fingerprint)

    async def _hash_while_cached(self, fingerprint: str) -> list[BlockHash]:
        """The chain, to the end of the slice in which the last engine's cache of it ends."""
        hashes: list[BlockHash] = []
        request, start = self.request, 0
        token_ids = request.prompt_token_ids
        parent = root_hash(fingerprint, request.options.cache_salt, request.adapter_digest)
        while start < len(token_ids) and (engines := self._alike(fingerprint)):
            names = [engine.incarnation for engine in engines]
            if not self.table.mirror.holds_any(names, hashes[-1:]):
                break
            size = engines[0].member.block_size
            end = start + _SLICE_BLOCKS * size
            hashes += block_hashes(parent, token_ids[start:end], size)
            if not hashes:
                break  # shorter than a block of another size
            parent, start = hashes[-1], end
            await asyncio.sleep(0)
        return hashes

    def choose(self, demand: Demand, *, avoid: Avoid, fingerprint: str | None) -> Route:
        """See engine_link.Router. An engine where a suspect is on trial comes after all others."""
        table, num_tokens, cached = self.table, demand.num_tokens, self.cached(demand.num_tokens)
        states = self._states(demand, avoid, NOTHING_CACHED if table.policy.is_blind else cached)
        try:
            prefill, decode, fetch = self._plan(states, demand, avoid, fingerprint)
        except Unavailable:
            table.plans.decisions["unavailable"] += 1
            raise
        at_prefill, at_decode = (cached.get(name, NOTHING).num_tokens for name in (prefill, decode))
        pair = table.engines[prefill], table.engines[decode]
        holds_first = pair[1].own_target_s > 0
        route = Route(*pair, (at_prefill, at_decode), fetch, holds_first)
        prefix_from = "" if fetch is None else table.engines[fetch.source].name
        is_retry = demand.is_retry or bool(avoid)
        table.plans.note(states, num_tokens, route, prefix_from, is_retry=is_retry)
        return route

    def _states(
        self, demand: Demand, avoid: Avoid, cached: Mapping[str, CachedPrefix]
    ) -> list[EngineState]:
        """Of the engines that could serve it at all, to its last token."""
        table, request = self.table, self.request
        total_tokens = demand.num_tokens + demand.max_output_tokens
        adapter, is_constrained = request.adapter_digest, request.sampling.constraint is not None
        costs, holders = table.borrowed_costs(), table.holders(demand.num_tokens, cached, avoid)
        in_flight_tokens = max((prefix.in_flight_tokens for prefix in cached.values()), default=0)
        return [
            engine.state(
                demand,
                request.caller_id,
                prefix := cached.get(engine.incarnation, NOTHING),
                costs.get(engine.fingerprint) if costs else None,
                engine.best_fetch(holders, prefix) if holders else None,
                in_flight_tokens,
                adapter,
            )
            for engine in table.engines.values()
            if engine.member.max_model_len >= total_tokens
            and (engine.member.can_constrain or not is_constrained)
            and (engine.max_loras or not adapter)
        ]

    def _plan(
        self, states: list[EngineState], demand: Demand, avoid: Avoid, fingerprint: str | None
    ) -> tuple[str, str, Fetch | None]:
        """Who computes the prompt and who goes on, and what the first is to get from another."""
        num_tokens, caller_id, policy = demand.num_tokens, self.request.caller_id, self.table.policy
        choose = partial(policy.choose, states, num_tokens, caller_id, fingerprint=fingerprint)
        try:
            prefill, decode = choose(avoid=avoid | self.table.suspects.engines)
        except Unavailable:  # not where it must wait: then it waits for a place beside no suspect
            prefill, decode = choose(avoid=avoid)
        state = next(state for state in states if state.incarnation == prefill)
        return prefill, decode, state.worth_fetching(num_tokens)

    def cached(self, num_tokens: int) -> dict[str, CachedPrefix]:
        """By incarnation, what engines have of the request's first `num_tokens`, by the index, or
        are about to have, by the prompts that they compute now."""
        found: dict[str, CachedPrefix] = {}
        mirror, prompts, request = self.table.mirror, self.table.prompts, self.request
        salt = salted(request.options.cache_salt, request.adapter_digest)
        for fingerprint, chain in self.hashes.items():
            if not (engines := self._alike(fingerprint)):
                continue
            size = engines[0].member.block_size
            listed = mirror.cached_blocks([engine.incarnation for engine in engines], chain)
            in_flight = prompts.common_blocks(fingerprint, salt, request.prompt_token_ids, size)
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
        if self.request.sampling.prompt_logprobs is not None:  # all of it is computed, for scores
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


_ANY = ValidatedRequest(column((0,)), SamplingParams(), "")


def why_not_ready(table: EngineTable) -> str:
    """What is missing before any request can be served; empty if nothing is."""
    router, demand, avoid = PromptRouter(table, _ANY), Demand(1), Avoid()
    try:
        router._plan(router._states(demand, avoid, NOTHING_CACHED), demand, avoid, None)
    except Unavailable as error:
        return error.message
    except MustWait:
        pass  # busy is ready
    return ""
