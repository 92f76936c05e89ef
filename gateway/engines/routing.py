"""Chooses the engines of a request: a pure function of the engines' states.

A plan is a pair, whose prefill engine hands its KV off to the decode engine, or one engine alone.
Each plan has a cost in seconds, and the least is taken:

    pair    until the prefill engine has computed the prompt  + requests on the decode engine + pull
    alone   until the engine has computed the prompt          + requests on it

Each engine's part of the cost (engine_state.py) is independent of the other's, so the best pair is
found among engines sorted by their parts, not among all pairs. With a source of chance, one of the
plans is drawn that are alike: each part within ALIKE of the best, with as much of the prompt
cached. Else all gateways with the same heartbeats would choose the same engine until the next ones.

A prefix that is cached on the device costs nothing, in host memory a copy, on another engine a
pull, if that is quicker than computing it (prefix_sources.py). A prefill engine without credit for
the request is taken only if none has credit. A decode engine without a place for it, and a prefill
engine that has enough prompts of its caller, are left out: the request waits in the gateway, whose
queue is fair, and where the next free place on any engine can be given to it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from ...core.errors import Unavailable
from ...core.membership import Role
from ..request.engine_link import Avoid, Blocked, MustWait
from .engine_state import REQUEST_S, EngineState

ALIKE = 1.05  # times the least cost: measurements are no more exact

# Links below this share of the fastest are of a slower kind; above it, differences are noise.
SLOW_LINK_SHARE = 0.5


class Plan(NamedTuple):
    """The incarnations of the prefill and the decode engine; the same where one does both."""

    prefill: str
    decode: str


# Plain tuples, since a choice makes hundreds; the least is the best.
# A prefill engine's part: lacks credit, seconds, incarnation, cached tokens.
_Source: TypeAlias = tuple[bool, float, str, int]
# A decode engine's part: lacks blocks, seconds, has a slow link, -free_blocks, engine.
_Puller: TypeAlias = tuple[bool, float, bool, int, EngineState]
# A plan of one engine: lacks blocks, seconds, incarnation, cached tokens, cost of the prompt.
_Single: TypeAlias = tuple[bool, float, str, int, float]


def _puller(engine: EngineState, num_tokens: int) -> _Puller:
    free, seconds = engine.free_blocks, engine.decode_seconds(num_tokens)
    lacks_blocks = free < -(-num_tokens // engine.block_size)
    return lacks_blocks, seconds, False, -free, engine


def _prompt_parts(
    engines: Iterable[EngineState], num_tokens: int
) -> tuple[list[_Source], list[_Single]]:
    """The parts of prefill engines and the plans of engines alone, where they take the prompt."""
    sources: list[_Source] = []
    singles: list[_Single] = []
    for engine in engines:
        if not engine.takes_prompt:
            continue
        name, num_cached = engine.incarnation, engine.cached_tokens
        num_blocks = -(-num_tokens // engine.block_size)
        prompt_s = engine.prompt_cost(num_tokens)
        if engine.role is Role.PREFILL:
            lacks_credit = engine.credit_blocks < num_blocks
            sources.append((lacks_credit, prompt_s, name, num_cached))
        if engine.takes_whole and engine.has_place:
            seconds = prompt_s + engine.num_requests * REQUEST_S
            lacks_blocks = engine.free_blocks < num_blocks
            singles.append((lacks_blocks, seconds, name, num_cached, prompt_s))
    return sources, singles


def choose_plan(
    engines: Iterable[EngineState],
    num_tokens: int,
    *,
    avoid: Avoid = frozenset(),
    fingerprint: str | None = None,
    chance: random.Random | None = None,
) -> Plan:
    """The plan for a request of `num_tokens` known tokens.

    `fingerprint`: if given, the engines must have it, since streamed tokens came from that model.
    `chance`: draws from plans that are alike; without it the first of them is taken. Raises
    Unavailable, naming the missing role or link, or MustWait.
    """
    usable = [engine for engine in engines if not engine.is_draining]
    if fingerprint is not None:
        usable = [engine for engine in usable if engine.fingerprint == fingerprint]
    if avoid:  # a pair of an engine with itself: not alone
        usable = [
            e._replace(takes_whole=False) if (e.incarnation,) * 2 in avoid else e
            for e in usable
            if e.incarnation not in avoid
        ]
    role = Role.PREFILL
    prefill = [engine for engine in usable if engine.role is role]
    decode = _linked([e for e in usable if e.role is not role], prefill, avoid)
    alone = [engine for engine in usable if engine.takes_whole]
    if not decode and not alone:
        raise Unavailable(_what_is_missing(usable))
    decode = [engine for engine in decode if engine.has_place]
    if not decode and not any(engine.has_place for engine in alone):
        raise MustWait(Blocked.PLACE)
    takers = [engine for engine in prefill if not engine.takes_whole] + alone
    sources, singles = _prompt_parts(takers, num_tokens)
    pairs = _Pairs(sources, [_puller(engine, num_tokens) for engine in decode], avoid)
    pair, single = pairs.best(), min(singles, default=None)
    if pair is None and single is None:
        raise MustWait(Blocked.TURN)
    if chance is not None:
        return _draw(pairs, pair, singles, single, chance)
    if single is not None and (pair is None or single[:2] <= pair.rank):
        return Plan(single[2], single[2])
    assert pair is not None
    return Plan(pair.source[2], pair.puller[4].incarnation)


class Policy:
    """Chooses by the least cost; routing_policies.py has others. `chance`: see `choose_plan`;
    `is_blind`: cached prefixes are ignored."""

    def __init__(self, chance: random.Random | None = None, *, is_blind: bool = False) -> None:
        self._chance = chance
        self.is_blind = is_blind

    def choose(
        self,
        engines: Sequence[EngineState],
        num_tokens: int,
        caller_id: int,
        *,
        avoid: Avoid,
        fingerprint: str | None,
    ) -> Plan:
        """See `choose_plan`, also for errors."""
        return choose_plan(
            engines, num_tokens, avoid=avoid, fingerprint=fingerprint, chance=self._chance
        )


class _Pair(NamedTuple):
    source: _Source
    puller: _Puller

    @property
    def rank(self) -> tuple[bool, float]:
        """Lacks blocks, seconds: compared with the same of a plan of one engine."""
        return self.puller[0], self.source[1] + self.puller[1]


class _Pairs:
    """All plans of two engines."""

    def __init__(self, sources: list[_Source], pullers: list[_Puller], avoid: Avoid) -> None:
        self._sources = sorted(sources)
        self._pullers = sorted(pullers)
        self._avoided = avoid

    def best(self) -> _Pair | None:
        """A pair with credit if any has it; of those, with blocks; of those, the one of least cost.
        Sources are sorted: once one's own part costs too much, none after it can be better."""
        best: _Pair | None = None
        least_s = min((puller[1] for puller in self._pullers), default=0.0)
        for source in self._sources:
            if best is not None:
                lacks_blocks, seconds = best.rank
                if source[0] > best.source[0] or (
                    not lacks_blocks and source[1] + least_s >= seconds
                ):
                    break
            if linked := self._linked(source[2]):
                pair = _Pair(source, min(linked))
                if best is None or pair.rank < best.rank:
                    best = pair
        return best

    def alike_sources(self, best: _Pair, most_s: float) -> list[_Source]:
        """Sources like the best pair's, with as much of the prompt cached, within `most_s`."""
        kind = best.source[0], best.source[3]
        return [s for s in self._sources if s[1] <= most_s and (s[0], s[3]) == kind]

    def alike_pullers(self, source: str, best: _Pair, most_s: float) -> list[EngineState]:
        """Likewise decode engines that are linked to the source; may be empty."""
        lacks_blocks, _, is_slow, *_, decode = best.puller
        kind = lacks_blocks, is_slow, decode.cached_tokens
        return [
            puller[4]
            for puller in self._linked(source)
            if puller[1] <= most_s and (puller[0], puller[2], puller[4].cached_tokens) == kind
        ]

    def _linked(self, source: str) -> list[_Puller]:
        """The pullers that are linked to the source, marked where their link is slow."""
        linked = [puller for puller in self._pullers if source in puller[4].links]
        if self._avoided:
            linked = [p for p in linked if (source, p[4].incarnation) not in self._avoided]
        rates = [puller[4].link_gbytes_per_s.get(source, 0.0) for puller in linked]
        least = SLOW_LINK_SHARE * max(rates, default=0.0)
        if min(rates, default=0.0) >= least:
            return linked
        pairs = zip(linked, rates, strict=True)
        return [(*puller[:2], rate < least, *puller[3:]) for puller, rate in pairs]


def _draw(
    pairs: _Pairs,
    pair: _Pair | None,
    singles: Sequence[_Single],
    single: _Single | None,
    chance: random.Random,
) -> Plan:
    """Draw one of the plans that are like the best in both parts. The sum is not compared: where
    prompts wait, ALIKE of it would hide any number of decodes."""
    is_single = single is not None and (pair is None or single[:2] <= pair.rank)
    if single is not None and is_single:
        lacks_blocks, seconds, _, num_cached, prompt_s = single
        rest_s = seconds - prompt_s
    else:
        assert pair is not None
        lacks_blocks, num_cached = pair.puller[0], pair.source[3]
        prompt_s, rest_s = pair.source[1], pair.puller[1]
    kind, most_prompt_s, most_rest_s = (lacks_blocks, num_cached), prompt_s * ALIKE, rest_s * ALIKE
    drawn = [  # who computes the prompt, and whether it also decodes
        (name, True)
        for lacks, seconds, name, cached, prompt_s in singles
        if prompt_s <= most_prompt_s
        and seconds - prompt_s <= most_rest_s
        and (lacks, cached) == kind
    ]
    if pair is not None and (pair.puller[0], pair.source[3]) == kind:
        drawn += [(source[2], False) for source in pairs.alike_sources(pair, most_prompt_s)]
    while True:
        name, is_alone = drawn.pop(chance.randrange(len(drawn)))
        if is_alone:
            return Plan(name, name)
        assert pair is not None
        if pullers := pairs.alike_pullers(name, pair, most_rest_s):
            return Plan(name, chance.choice(pullers).incarnation)


def _linked(
    decode: list[EngineState], prefill: list[EngineState], avoid: Avoid
) -> list[EngineState]:
    """The decode engines with a link to one of these prefill engines, in a pair not to avoid."""
    names = frozenset(engine.incarnation for engine in prefill)
    if not avoid:
        return [engine for engine in decode if not names.isdisjoint(engine.links)]
    return [
        engine
        for engine in decode
        if any((name, engine.incarnation) not in avoid for name in names & engine.links)
    ]


def _what_is_missing(engines: Iterable[EngineState]) -> str:
    roles = {engine.role for engine in engines}
    if missing := [role.value for role in Role if role not in roles]:
        return f"no {' and no '.join(missing)} node is ready"
    return "no decode node is linked to a prefill node"
