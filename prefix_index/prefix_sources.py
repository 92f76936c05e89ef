"""From which engine's cache a prompt's prefix could be fetched, and how long that takes.

    seconds = FETCH_S + bytes / link's rate

The first pull of a pair opens the source's pool, which takes longer, once, or even too long: then
that one prompt is computed. The rate of a link is unknown before. Engines without hand-offs have
opened no links, and would never open any if these did not count as slow ones.

Pure functions of what engines have cached and of their links. The gateway compares the seconds with
the time to compute those tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

FETCH_S = 0.004  # messages in both directions between two steps, for any size
UNMEASURED_GBYTES_PER_S = 10.0  # assumed while no link is measured: a network's rate
_MOST_HOLDERS = 3  # considered for one prompt
_LEAST_LIMIT_S = 0.25
_LIMIT_RATIO = 4.0  # times the estimate


class CachedPrefix(NamedTuple):
    """The part of a prompt's beginning that one engine has, or will have soon, in tokens.

    `num_tokens`: by our best estimate; `host_tokens`: the last of them, which are in host memory
    only; `lendable_tokens`: the first of them, which other engines can fetch; `in_flight_tokens`:
    being computed there for another prompt.
    """

    num_tokens: int = 0
    host_tokens: int = 0
    lendable_tokens: int = 0
    in_flight_tokens: int = 0


NOTHING = CachedPrefix()
NOTHING_CACHED: Mapping[str, CachedPrefix] = MappingProxyType({})  # by incarnation


class Fetch(NamedTuple):
    """`num_tokens`: of the prompt that are cached afterwards; `seconds`: the time it takes."""

    source: str
    num_tokens: int
    seconds: float

    @property
    def limit_s(self) -> float:
        """When the engine gives up the fetch and computes the tokens."""
        return _LEAST_LIMIT_S + _LIMIT_RATIO * self.seconds

    @classmethod
    def over(cls, gbytes_per_s: float, source: str, num_tokens: int, num_bytes: float) -> Fetch:
        """The fetch of `num_bytes`, after which `num_tokens` are cached, over a link."""
        return cls(source, num_tokens, FETCH_S + num_bytes / (gbytes_per_s * 1e9))


@dataclass(frozen=True, slots=True)
class Holders:
    """The engines that have most of one prompt: (tokens, incarnation), most first.

    `rates`: of each engine's open links, in GB/s by source; `usual_rate`: assumed for links that
    are not measured.
    """

    most: Sequence[tuple[int, str]]
    rates: Mapping[str, Mapping[str, float]]
    usual_rate: float

    @classmethod
    def of(
        cls, cached_tokens: Mapping[str, int], rates: Mapping[str, Mapping[str, float]]
    ) -> Holders:
        """`cached_tokens`: by incarnation, that may be fetched."""
        most = sorted(((num, name) for name, num in cached_tokens.items() if num), reverse=True)
        known = (min(found) for by in rates.values() if (found := _known(by.values())))
        return cls(most[:_MOST_HOLDERS], rates, next(known, UNMEASURED_GBYTES_PER_S))

    def best_fetch(self, target: str, cached_tokens: int, token_bytes: float) -> Fetch | None:
        """The fetch after which `target`, which has `cached_tokens` itself, has most of the prompt;
        of equals the fastest. None: no engine has more."""
        best: Fetch | None = None
        for num_tokens, source in self.most:
            if num_tokens <= cached_tokens or (best is not None and num_tokens < best.num_tokens):
                break
            if source == target:
                continue
            rate = self.rates.get(target, {}).get(source)
            rate = rate or self.rates.get(source, {}).get(target) or self.usual_rate
            num_bytes = (num_tokens - cached_tokens) * token_bytes
            fetch = Fetch.over(rate, source, num_tokens, num_bytes)
            if best is None or fetch.seconds < best.seconds:
                best = fetch
        return best


def _known(rates: Iterable[float]) -> list[float]:
    return [rate for rate in rates if rate > 0]
