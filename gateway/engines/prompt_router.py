"""Chooses the engines for one request, from the engine table and from the prefixes of the prompt
that engines have cached.

Hashing takes some microseconds per block, so it ends where no engine has the chain, yields to the
event loop between slices, and is done once per request. No network: the mirror is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ...core.errors import Unavailable
from ...core.membership import Role
from ...core.request.token_ids import BlockHash, block_hashes, root_hash, salted
from ...prefix_index.prefix_sources import NOTHING, NOTHING_CACHED, CachedPrefix, Fetch
from ..request.engine_link import Avoid, Demand, Route
from ..validation.validation import ValidatedRequest
from .engine_state import EngineState, state_of
from .engine_table import EngineTable
from .linked_engine import LinkedEngine
from .plan_record import ChosenPlan, SampledPlan
from .routing import Plan

_SLICE_BLOCKS = 64  # about 0.03 ms of hashing


@dataclass(slots=True)
class PromptRouter:
    """Implements `engine_link.Router`. `hashes`: the block hashes of the prompt by the engines'
    fingerprint, from the first block on, set by `hash_prompt`."""

    table: EngineTable
    request: ValidatedRequest
    hashes: dict[str, list[BlockHash]] = field(default_factory=dict)

    async def hash_prompt(self) -> None:
        """Hash as much of the prompt as some engine may have cached, for each fingerprint. A prompt
        shorter than a block is in no cache."""
        num_tokens, engines = len(self.request.prompt_token_ids), self.table.engines.values()
        for fingerprint in {e.fingerprint for e in engines if num_tokens >= e.member.block_size}:
            self.hashes[fingerprint] = await self._hash_while_cached(fingerprint)

    async def _hash_while_cached(self, fingerprint: str) -> list[BlockHash]:
        """The hash chain, up to the end of the first slice that no engine has as a whole."""
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
        """See engine_link.Router. Engines with a suspect on trial are taken only if no other can
        be."""
        table, num_tokens, cached = self.table, demand.num_tokens, self.cached(demand.num_tokens)
        states = self.states(demand, avoid, NOTHING_CACHED if table.policy.is_blind else cached)
        try:
            plan, fetch = self.plan(states, demand, avoid, fingerprint)
        except Unavailable:
            table.plans.num_unavailable += 1
            raise
        prefill, decode = (table.engines[name] for name in plan)
        at_prefill, at_decode = (cached.get(name, NOTHING).num_tokens for name in plan)
        prefix_from = "" if fetch is None else table.engines[fetch.source].name
        is_retry = demand.is_retry or bool(avoid)
        chosen = ChosenPlan(prefill is decode, at_prefill > 0, is_retry, prefix_from)
        table.plans.chosen[chosen] += 1
        table.plans.last = SampledPlan(states, num_tokens, plan)
        holds_first = decode.welcome.tbt_target_s > 0
        return Route(prefill, decode, (at_prefill, at_decode), fetch, holds_first)

    def states(
        self, demand: Demand, avoid: Avoid, cached: Mapping[str, CachedPrefix]
    ) -> list[EngineState]:
        """The states of the engines that can serve the request up to its last token."""
        table, request = self.table, self.request
        total_tokens = demand.num_tokens + demand.max_output_tokens
        costs, fetches = table.step_costs(), table.fetches(cached, avoid)
        in_flight_tokens = max((prefix.in_flight_tokens for prefix in cached.values()), default=0)
        of_request = demand, request.caller_id, request.adapter_digest, in_flight_tokens
        return [
            state_of(
                engine,
                *of_request,
                cached=cached.get(name, NOTHING),
                fetch=fetches.get(name),
                others_cost=costs.get(engine.fingerprint),
            )
            for name, engine in table.engines.items()
            if engine.member.max_model_len >= total_tokens
            and (request.sampling.constraint is None or engine.member.can_constrain)
            and (request.adapter is None or engine.welcome.max_loras)
        ]

    def plan(
        self, states: list[EngineState], demand: Demand, avoid: Avoid, fingerprint: str | None
    ) -> tuple[Plan, Fetch | None]:
        """The plan, and the prefix that its prefill engine is to fetch from another engine."""
        num_tokens, caller_id, policy = demand.num_tokens, self.request.caller_id, self.table.policy
        choose = partial(policy.choose, states, num_tokens, caller_id, fingerprint=fingerprint)
        try:
            plan = choose(avoid=avoid | self.table.suspects.engines)
        except Unavailable:  # after MustWait it waits for a place on an engine without a suspect
            plan = choose(avoid=avoid)
        state = next(state for state in states if state.incarnation == plan.prefill)
        return plan, state.worth_fetching(num_tokens)

    def cached(self, num_tokens: int) -> dict[str, CachedPrefix]:
        """By incarnation, what engines have of the request's first `num_tokens` according to the
        index, or will have once the prompts in flight are computed."""
        found: dict[str, CachedPrefix] = {}
        mirror, prompts, request = self.table.mirror, self.table.prompts, self.request
        salt = salted(request.options.cache_salt, request.adapter_digest)
        for fingerprint, chain in self.hashes.items():
            if not (engines := self._alike(fingerprint)):
                continue
            size = engines[0].member.block_size
            listed = mirror.cached_blocks([engine.incarnation for engine in engines], chain)
            in_flight = prompts.common_blocks(fingerprint, salt, request.prompt_token_ids, size)
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
        """Limits the blocks found by what the engine can use: whoever computes the prompt computes
        at least one token. `num_listed`: blocks that the index lists."""
        size = engine.member.block_size
        most = (num_tokens - 1) // size
        if self.request.sampling.prompt_logprobs is not None:  # all are computed, for their scores
            return CachedPrefix(0 if engine.takes_prompts else num_listed * size)
        num_in_flight = min(num_in_flight, most)
        if engine.member.role is Role.PREFILL:
            num_listed = min(num_listed, most)
        on_device = self.table.mirror.num_on_device(engine.incarnation, chain[:num_listed])
        in_host = num_listed - on_device if num_listed >= num_in_flight else 0
        blocks = max(num_listed, num_in_flight), in_host, min(on_device, most), num_in_flight
        return CachedPrefix(*(num_blocks * size for num_blocks in blocks))

    def _alike(self, fingerprint: str) -> list[LinkedEngine]:
        return [e for e in self.table.engines.values() if e.fingerprint == fingerprint]
