"""What one request would cost on one engine, in seconds: from its last heartbeat, from what this
gateway has sent it since, and from the prefix of the prompt that it has cached. routing.py compares
engines by these costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...core.membership import Role
from ...core.step_cost import StepCost
from ...prefix_index.prefix_sources import CachedPrefix, Fetch
from ..request.engine_link import Demand
from .linked_engine import LinkedEngine
from .reported_load import PromptSpeed

# What one more request on an engine costs the others: every step becomes a little longer.
REQUEST_S = 0.0014
PULL_TOKEN_S = REQUEST_S / 4096  # of an 8B model over NVLink
READ_ADAPTER_S = 0.1  # a LoRA adapter of rank 16 of an 8B model, from files
_UNMEASURED = PromptSpeed(0.0, 1e-4)
_NO_RATES: Mapping[str, float] = MappingProxyType({})

# The surcharge, as a share of their time, for tokens that another engine computes at this moment.
# Without it the second of two equal prompts would be computed again elsewhere, to save the time of
# its own last tokens.
REPEATED = 0.25

# The surcharge, as a multiple of its time, for a prompt where as much waits already: later prompts
# will wait for it too. Where engines are not equally fast, prompts thus leave the fast one earlier.
DELAYING = 1.5


class EngineState(NamedTuple):
    """The state of a linked engine for one request.

    Of the engine: `waiting_tokens`: prompt tokens to compute ahead of a new request, by our best
    estimate; `num_requests`: decodes of all gateways; `link_gbytes_per_s`: the bandwidth of a
    decode engine's links as measured when they were opened, by source; `speed`: of prompts now;
    None: not known; `takes_whole`: it takes prompts together with their decodes, whatever its role.

    Of the request: `cached_tokens`: by our best estimate; `fetch`: how the engine could get more of
    its prefix from another one; `host_tokens`: the last of `cached_tokens`, which are in host
    memory only, and `host_s`, the time to copy them back; `in_flight_tokens`: tokens that some
    engine is computing now for another prompt; `takes_prompt`: the engine accepts another prompt of
    its caller; `has_place`: for its decodes; `adapter_s`: the time to load its LoRA adapter.
    """

    incarnation: str
    role: Role
    fingerprint: str
    block_size: int
    free_blocks: int = 0
    credit_blocks: int = 0
    is_draining: bool = False
    links: frozenset[str] = frozenset()
    link_gbytes_per_s: Mapping[str, float] = _NO_RATES
    takes_whole: bool = False
    # The fields above change with heartbeats only.
    num_requests: int = 0
    waiting_tokens: int = 0
    cached_tokens: int = 0
    speed: PromptSpeed | None = None
    takes_prompt: bool = True
    has_place: bool = True
    fetch: Fetch | None = None
    host_tokens: int = 0
    host_s: float = 0.0
    in_flight_tokens: int = 0
    adapter_s: float = 0.0

    def prompt_seconds(self, num_tokens: int) -> float:
        """Until the request's prompt is computed, behind all prompts that wait there."""
        own_s = self._own_seconds(num_tokens)
        if self.fetch is None:
            return own_s + self.adapter_s
        return min(own_s, self._fetching_seconds(num_tokens)) + self.adapter_s

    def worth_fetching(self, num_tokens: int) -> Fetch | None:
        """The fetch, if the prompt is computed sooner with it."""
        own_s = self._own_seconds(num_tokens)
        return self.fetch if self._fetching_seconds(num_tokens) < own_s else None

    def _own_seconds(self, num_tokens: int) -> float:
        """With its own cache: blocks in host memory are copied back, or computed again if that is
        quicker, as the engine will decide."""
        copied_s = self.host_s + self._seconds_behind(self.cached_tokens, num_tokens)
        if not self.host_tokens:
            return copied_s
        on_device = self.cached_tokens - self.host_tokens
        return min(copied_s, self._seconds_behind(on_device, num_tokens))

    def _fetching_seconds(self, num_tokens: int) -> float:
        if self.fetch is None:
            return math.inf
        return self.fetch.seconds + self._seconds_behind(self.fetch.num_tokens, num_tokens)

    def _seconds_behind(self, cached_tokens: int, num_tokens: int) -> float:
        speed = self.speed or _UNMEASURED
        num_left = max(1, num_tokens - cached_tokens)
        computed_s = speed.prompt_seconds(num_left, num_tokens - num_left, self.waiting_tokens)
        if self.in_flight_tokens > cached_tokens:
            computed_s += REPEATED * (self.in_flight_tokens - cached_tokens) * speed.token_s
        return computed_s

    def prompt_cost(self, num_tokens: int) -> float:
        """The cost of the request's prompt in seconds: until it is computed, and a surcharge for
        the prompts that will wait for it, where others wait already."""
        speed = self.speed or _UNMEASURED
        known_tokens = max(self.cached_tokens, self.fetch.num_tokens if self.fetch else 0)
        delaying = min(self.waiting_tokens, num_tokens - known_tokens)
        token_s = max(speed.token_s, speed.steady_token_s)
        return self.prompt_seconds(num_tokens) + DELAYING * max(0, delaying) * token_s

    def decode_seconds(self, num_tokens: int) -> float:
        """The cost of decoding there in seconds: its other requests, the pull, the adapter."""
        num_pulled = num_tokens - self.cached_tokens + self.host_tokens
        pull_s = num_pulled * PULL_TOKEN_S if num_pulled > 0 else 0.0
        return self.num_requests * REQUEST_S + pull_s + self.adapter_s


def state_of(
    engine: LinkedEngine,
    demand: Demand,
    caller_id: int,
    adapter: str,
    in_flight_tokens: int,
    *,
    cached: CachedPrefix,
    fetch: Fetch | None,
    others_cost: StepCost | None,
) -> EngineState:
    """For routing one request of this caller. `in_flight_tokens`: see EngineState; `adapter`: its
    digest, or empty.

    `others_cost`: the step cost of an engine of the same fingerprint, used where this one has not
    measured prompts yet, or it would never get any. Fields about prompts are left empty where it
    takes none, fields about decodes where it runs none.
    """
    load, account, waiting_tokens, speed = engine.load, engine.account, 0, None
    is_prefill = engine.member.role is Role.PREFILL
    takes_prompt = has_place = False
    if is_prefill or load.takes_whole:
        waiting_tokens, speed = account.tokens_ahead, account.speed
        if others_cost is not None and not engine.is_measured:
            speed = load.prompt_speed_by(others_cost)
        takes_prompt = demand.is_retry or account.takes_more_of(caller_id)
    if not is_prefill or load.takes_whole:
        has_place = _has_place(engine, demand, cached.num_tokens)
    host_tokens = cached.host_tokens
    host_s = host_tokens * load.host_block_s / engine.member.block_size if host_tokens else 0.0
    of_now = (account.num_requests, waiting_tokens, cached.num_tokens)
    adapter_s = READ_ADAPTER_S if adapter and adapter not in load.adapters else 0.0
    of_prompt = (fetch, host_tokens, host_s, in_flight_tokens, adapter_s)
    return EngineState._make(
        engine.reported_state + of_now + (speed, takes_prompt, has_place) + of_prompt
    )


def _has_place(engine: LinkedEngine, demand: Demand, cached_tokens: int) -> bool:
    num_tokens, num_sequences = demand.num_tokens - cached_tokens, demand.num_sequences
    num_blocks = engine.blocks_for(num_tokens, demand.max_output_tokens, num_sequences)
    return engine.account.has_place(num_sequences, num_blocks) and fits_promise(engine, demand)


def fits_promise(engine: LinkedEngine, demand: Demand) -> bool:
    """Whether the engine could keep its promise with these sequences as well; the request's own
    target counts if it is stricter."""
    load, account, most = engine.load, engine.account, engine.most_decodes
    if account.has_refused:
        return False
    if demand.tbt_target_s and load.tbt_target_s is not None:
        target_s = max(demand.tbt_target_s, load.tbt_target_s / 2)  # as the engine will
        most = min(most, load.decodes_within(target_s))
    num_requests, num_stages = account.num_requests, max(1, load.num_stages)
    num_forks = max(0, load.decodes.num_decodes - -(-load.num_requests // num_stages))
    if not num_forks + num_requests:
        return True
    # Some of the requests do not decode yet.
    return num_forks + -(-(num_requests + demand.num_sequences) // num_stages) <= most
