"""Whether a prompt's prefix is worth fetching from another engine's cache, and what that takes.

    seconds = FETCH_S + bytes / link's rate

The first pull of a pair opens the source's pool, which takes longer once, or even too long: then
that one prompt is computed. Nobody knows the rate of a link before that; engines of which none
hands anything off have opened none, and would never if they were not taken for slow ones.

Pure: what engines have cached and how they are linked is given. Gateways weigh the seconds
against computing those tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

FETCH_S = 0.004  # messages both ways between two steps, whatever is fetched
UNMEASURED_GBYTES_PER_S = 10.0  # of a link, while none is measured: a network's
_MOST_HOLDERS = 3  # that are considered for one prompt
_LEAST_LIMIT_S = 0.25
_LIMIT_RATIO = 4.0  # of the estimate: then it is computed


class CachedPrefix(NamedTuple):
    """What one engine has of a prompt's beginning, or is about to have, in tokens.

    `num_tokens`: as far as we know; `host_tokens`: the last of them, where these are in host memory
    alone; `lendable_tokens`: the first of them, that others could fetch; `in_flight_tokens`: that
    it computes now for another prompt.
    """

    num_tokens: int = 0
    host_tokens: int = 0
    lendable_tokens: int = 0
    in_flight_tokens: int = 0


NOTHING = CachedPrefix()
NOTHING_CACHED: Mapping[str, CachedPrefix] = MappingProxyType({})  # by incarnation


class Fetch(NamedTuple):
    """From whom, how many of the prompt's tokens are cached afterwards, and how long it takes."""

    source: str
    num_tokens: int
    seconds: float

    @property
    def limit_s(self) -> float:
        """After which it is not waited for any more."""
        return _LEAST_LIMIT_S + _LIMIT_RATIO * self.seconds


@dataclass(frozen=True, slots=True)
class Holders:
    """Who has most of one prompt: (tokens, incarnation), most first.

    `rates`: of each engine's open links, in GB/s by source; `usual_rate`: of a link that nobody has
    measured; None: it is not taken.
    """

    most: Sequence[tuple[int, str]]
    rates: Mapping[str, Mapping[str, float]]
    usual_rate: float | None

    @classmethod
    def of(
        cls,
        cached_tokens: Mapping[str, int],
        rates: Mapping[str, Mapping[str, float]],
        unmeasured: float | None = UNMEASURED_GBYTES_PER_S,
    ) -> Holders:
        """`cached_tokens` by incarnation, of engines that may be asked for them; `unmeasured`: the
        rate of any link where none is known."""
        most = sorted(((num, name) for name, num in cached_tokens.items() if num), reverse=True)
        known = (min(found) for by in rates.values() if (found := _known(by.values())))
        return cls(most[:_MOST_HOLDERS], rates, next(known, unmeasured))

    def best_fetch(self, target: str, cached_tokens: int, token_bytes: float) -> Fetch | None:
        """The fetch that leaves `target`, which has `cached_tokens` itself, the most of the prompt;
        of equals the fastest. None: nobody has more, or no link may be taken."""
        best: Fetch | None = None
        for num_tokens, source in self.most:
            if num_tokens <= cached_tokens or (best is not None and num_tokens < best.num_tokens):
                break
            if source == target:
                continue
            rate = self.rates.get(target, {}).get(source)
            rate = rate or self.rates.get(source, {}).get(target) or self.usual_rate
            if not rate:
                continue
            pull_s = (num_tokens - cached_tokens) * token_bytes / (rate * 1e9)
            fetch = Fetch(source, num_tokens, FETCH_S + pull_s)
            if best is None or fetch.seconds < best.seconds:
                best = fetch
        return best


def _known(rates: Iterable[float]) -> list[float]:
    return [rate for rate in rates if rate > 0]
