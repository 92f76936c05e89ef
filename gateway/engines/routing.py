"""Where a request is computed: a pure function of what is known of the engines.

A plan is a pair, whose prefill engine hands its KV to the decode engine, or one engine for both.
All plans have an estimate in seconds, and the least is taken:

    pair    until the prefill engine is done with it  + requests on the decode engine + its pull
    alone   until the engine is done with it          + requests on it

How long a prompt takes follows from what its engine measured (core/step_cost.py): one that keeps a
promise to its decodes (`tbt_target_s`) takes prompts beside them, a little a step; without decodes
it is as fast as one without a promise. An engine without a promise does what its role says.

What an engine has cached of the prompt costs nothing. A prefill engine without credit for the
request comes after every one that has it, but is not left out. A decode engine without a place for
it, and a prefill engine that has enough of its caller's prompts, are: the request waits here, where
its queue is fair and a place that becomes free anywhere is the next one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...core.errors import Unavailable
from ...core.membership import Role
from ...core.step_cost import PromptSpeed
from ..request.engine_link import Avoid, Blocked, MustWait

# What one more request on an engine weighs: it makes every step to come a little longer.
REQUEST_S = 0.0014
PULL_TOKEN_S = REQUEST_S / 4096  # of an 8B model over NVLink
_UNMEASURED = PromptSpeed(0.0, 1e-4)
_NO_RATES: Mapping[str, float] = MappingProxyType({})

# Links below this share of the fastest are another kind of link; above it, measured otherwise.
SLOW_LINK_SHARE = 0.5


class EngineState(NamedTuple):
    """A live engine's last heartbeat, what this gateway has sent it since, and one request's share.

    `waiting_tokens`: prompt tokens to compute ahead of a new request, by our best estimate;
    `num_requests`: on a decode engine, of all gateways; `num_dispatched`: all we ever sent (ties go
    to the one that was asked less). `link_gbytes_per_s`: what a decode engine's links gave when
    they were opened, by source. `speed`: at which it computes prompts now; None: not known.
    `keeps_promise`: it takes whole requests, whatever its role.
    Of the request that is routed: `cached_tokens`, as far as we know; `takes_prompt`: it may have
    another prompt of its caller; `has_place`: for its decodes.
    """

    incarnation: str
    role: Role
    fingerprint: str
    block_size: int
    num_requests: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    credit_blocks: int = 0
    is_draining: bool = False
    links: frozenset[str] = frozenset()
    link_gbytes_per_s: Mapping[str, float] = _NO_RATES
    num_dispatched: int = 0
    cached_tokens: int = 0
    speed: PromptSpeed | None = None
    keeps_promise: bool = False
    takes_prompt: bool = True
    has_place: bool = True

    def has_blocks(self, num_tokens: int) -> bool:
        return self.free_blocks >= self.blocks_for(num_tokens)

    def prompt_seconds(self, num_tokens: int) -> float:
        """Until it has computed the request's prompt, behind all that waits there."""
        speed, num_cached = self.speed or _UNMEASURED, min(self.cached_tokens, num_tokens - 1)
        waiting_s = self.waiting_tokens * speed.token_s
        return waiting_s + speed.prompt_seconds(num_tokens - num_cached, num_cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


class Plan(NamedTuple):
    """The incarnations of who computes the prompt and who goes on: the same where one does both."""

    prefill: str
    decode: str


def _prefill_rank(engine: EngineState, num_tokens: int) -> tuple[bool, float, int, str]:
    has_credit = engine.credit_blocks >= engine.blocks_for(num_tokens)
    seconds = engine.prompt_seconds(num_tokens)
    return (not has_credit, seconds, engine.num_dispatched, engine.incarnation)


def _decode_seconds(engine: EngineState, num_tokens: int) -> float:
    """What its other requests, and the pull, cost a request that is decoded there."""
    num_pulled = num_tokens - engine.cached_tokens
    return engine.num_requests * REQUEST_S + num_pulled * PULL_TOKEN_S


def _decode_rank(
    engine: EngineState, num_tokens: int, *, is_slow: bool
) -> tuple[bool, float, bool, int, int, str]:
    seconds = _decode_seconds(engine, num_tokens)
    return (
        not engine.has_blocks(num_tokens),
        seconds,
        is_slow,
        -engine.free_blocks,
        engine.num_dispatched,
        engine.incarnation,
    )


def _alone_rank(engine: EngineState, num_tokens: int) -> tuple[bool, float, int, str]:
    seconds = engine.prompt_seconds(num_tokens) + engine.num_requests * REQUEST_S
    has_blocks = engine.has_blocks(num_tokens)
    return (not has_blocks, seconds, engine.num_dispatched, engine.incarnation)


def choose_plan(
    engines: Iterable[EngineState],
    num_tokens: int,
    *,
    avoid: Avoid = Avoid(),  # noqa: B008 (frozen)
    fingerprint: str | None = None,
) -> Plan:
    """For a request of `num_tokens` known tokens.

    `fingerprint`: where given, its engines must have it; tokens already streamed came from such a
    model. Raises Unavailable, naming the missing role or link, or MustWait.
    """
    usable = [
        engine
        for engine in engines
        if not engine.is_draining
        and engine.incarnation not in avoid.incarnations
        and fingerprint in (None, engine.fingerprint)
    ]
    prefill = [engine for engine in usable if engine.role is Role.PREFILL]
    decode = _linked([e for e in usable if e.role is Role.DECODE], prefill, avoid)
    alone = [engine for engine in usable if engine.keeps_promise]
    if not decode and not alone:
        raise Unavailable(_what_is_missing(usable))
    decode = [engine for engine in decode if engine.has_place]
    alone = [engine for engine in alone if engine.has_place]
    if not decode and not alone:
        raise MustWait(Blocked.PLACE)
    pair = _best_pair([e for e in prefill if e.takes_prompt], decode, num_tokens, avoid)
    alone = [engine for engine in alone if engine.takes_prompt]
    one = min(alone, key=lambda e: _alone_rank(e, num_tokens)) if alone else None
    if one is not None and (pair is None or not _is_better(pair, one, num_tokens)):
        return Plan(one.incarnation, one.incarnation)
    if pair is None:
        raise MustWait(Blocked.TURN)
    return Plan(pair[0].incarnation, pair[1].incarnation)


_Pair = tuple[EngineState, EngineState]


def _linked(
    decode: list[EngineState], prefill: list[EngineState], avoid: Avoid
) -> list[EngineState]:
    """The decode engines that are linked to one of these prefill engines, in a pair to be tried."""
    names = frozenset(engine.incarnation for engine in prefill)
    if not avoid.pairs:
        return [engine for engine in decode if not names.isdisjoint(engine.links)]
    return [
        engine
        for engine in decode
        if any((name, engine.incarnation) not in avoid.pairs for name in names & engine.links)
    ]


def _what_is_missing(engines: Iterable[EngineState]) -> str:
    roles = {engine.role for engine in engines}
    if missing := [role.value for role in Role if role not in roles]:
        return f"no {' and no '.join(missing)} node is ready"
    return "no decode node is linked to a prefill node"


def _best_pair(
    prefill: list[EngineState], decode: list[EngineState], num_tokens: int, avoid: Avoid
) -> _Pair | None:
    """First the prefill engine; of those linked to it, the decode engine."""
    for best in sorted(prefill, key=lambda engine: _prefill_rank(engine, num_tokens)):
        source = best.incarnation
        linked = [
            engine
            for engine in decode
            if source in engine.links and (source, engine.incarnation) not in avoid.pairs
        ]
        if linked:
            return best, _best_decode(source, linked, num_tokens)
    return None


def _best_decode(source: str, linked: list[EngineState], num_tokens: int) -> EngineState:
    fastest = max(decode.link_gbytes_per_s.get(source, 0.0) for decode in linked)

    def rank(decode: EngineState) -> tuple[bool, float, bool, int, int, str]:
        rate = decode.link_gbytes_per_s.get(source, 0.0)
        return _decode_rank(decode, num_tokens, is_slow=rate < SLOW_LINK_SHARE * fastest)

    return min(linked, key=rank)


def _is_better(pair: _Pair, one: EngineState, num_tokens: int) -> bool:
    """Whether the pair is sooner done than the one engine; where only one has room, that one."""
    prefill, decode = pair
    pair_s = prefill.prompt_seconds(num_tokens) + _decode_seconds(decode, num_tokens)
    one_s = one.prompt_seconds(num_tokens) + one.num_requests * REQUEST_S
    return (not decode.has_blocks(num_tokens), pair_s) < (not one.has_blocks(num_tokens), one_s)
