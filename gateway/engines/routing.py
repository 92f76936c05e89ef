"""Which prefill and which decode engine serve a request: a pure function of what is known of them.

Among all pairs whose link is up, the cheapest: first the prefill engine that has the fewest tokens
to compute until this prompt is done, then the decode engine with the fewest requests and tokens to
pull; of equals, one with a link to that prefill engine that is not much slower than the fastest.
What an engine has cached of the prompt costs nothing. A prefill engine without credit for the
request comes after every one that has it, but is not left out. A decode engine without a place for
it, and a prefill engine that has enough of its caller's prompts, are: the request waits here, where
its queue is fair and a place that becomes free anywhere is the next one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...core.errors import Unavailable
from ...core.membership import Role
from ..request.engine_link import Avoid, Blocked, MustWait

# What one more request on a decode engine weighs against tokens to pull. A pull is short (4096
# tokens of an 8B model: 1.4 ms over NVLink); a request makes every step to come a little longer.
DECODE_REQUEST_TOKENS = 4096

# Links below this share of the fastest are another kind of link; above it, measured otherwise.
SLOW_LINK_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class EngineState:
    """A live engine's last heartbeat, what this gateway has sent it since, and one request's share.

    `waiting_tokens`: prompt tokens to compute ahead of a new request, by our best estimate;
    `num_requests`: on a decode engine, of all gateways; `num_dispatched`: all we ever sent (ties go
    to the one that was asked less). `link_gbytes_per_s`: what a decode engine's links gave when
    they were opened, by source.
    Of the request that is routed: `cached_tokens`, as far as we know; `is_open`: a prefill engine
    may take another prompt of its caller, a decode engine has a place for it.
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
    link_gbytes_per_s: Mapping[str, float] = field(default_factory=dict)
    num_dispatched: int = 0
    cached_tokens: int = 0
    is_open: bool = True

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


_Rank = tuple[bool, int, int, str]


def _prefill_rank(engine: EngineState, num_tokens: int) -> _Rank:
    has_credit = engine.credit_blocks >= engine.blocks_for(num_tokens)
    cost_tokens = engine.waiting_tokens + num_tokens - engine.cached_tokens
    return (not has_credit, cost_tokens, engine.num_dispatched, engine.incarnation)


def _decode_rank(
    engine: EngineState, num_tokens: int, *, is_slow: bool
) -> tuple[bool, int, bool, int, int, str]:
    has_room = engine.free_blocks >= engine.blocks_for(num_tokens)
    cost_tokens = engine.num_requests * DECODE_REQUEST_TOKENS + num_tokens - engine.cached_tokens
    return (
        not has_room,
        cost_tokens,
        is_slow,
        -engine.free_blocks,
        engine.num_dispatched,
        engine.incarnation,
    )


def choose_pair(
    engines: Iterable[EngineState],
    num_tokens: int,
    *,
    avoid: Avoid = Avoid(),  # noqa: B008 (frozen)
    fingerprint: str | None = None,
) -> tuple[str, str]:
    """The incarnations of (prefill, decode) for a request of `num_tokens` known tokens.

    `fingerprint`: where given, both must have it; tokens already streamed came from such a model.
    Raises Unavailable, naming the missing role or link, or MustWait.
    """
    usable = [
        engine
        for engine in engines
        if not engine.is_draining
        and engine.incarnation not in avoid.incarnations
        and fingerprint in (None, engine.fingerprint)
    ]
    by_role = {role: [e for e in usable if e.role is role] for role in Role}
    if missing := [role.value for role in Role if not by_role[role]]:
        raise Unavailable(f"no {' and no '.join(missing)} node is ready")
    pairs = [
        (prefill, decode)
        for prefill in by_role[Role.PREFILL]
        for decode in by_role[Role.DECODE]
        if prefill.incarnation in decode.links
        and (prefill.incarnation, decode.incarnation) not in avoid.pairs
    ]
    if not pairs:
        raise Unavailable("no decode node is linked to a prefill node")
    pairs = [(prefill, decode) for prefill, decode in pairs if decode.is_open]
    if not pairs:
        raise MustWait(Blocked.PLACE)
    pairs = [(prefill, decode) for prefill, decode in pairs if prefill.is_open]
    if not pairs:
        raise MustWait(Blocked.TURN)
    best = min((prefill for prefill, _ in pairs), key=lambda p: _prefill_rank(p, num_tokens))
    source = best.incarnation
    linked = [decode for prefill, decode in pairs if prefill is best]
    fastest = max(decode.link_gbytes_per_s.get(source, 0.0) for decode in linked)

    def rank(decode: EngineState) -> tuple[bool, int, bool, int, int, str]:
        rate = decode.link_gbytes_per_s.get(source, 0.0)
        return _decode_rank(decode, num_tokens, is_slow=rate < SLOW_LINK_SHARE * fastest)

    return source, min(linked, key=rank).incarnation
