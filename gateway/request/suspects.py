"""Requests that were on an engine when it died: one of them may have killed it, and may again.

    an engine dies ─► all that it held are suspects ─► on trial, on an engine where no other one is
                                                        │  gets further than where it was: cleared
                                                        └─ the engine dies: it has killed two
So what kills engines takes no other suspect with it, which would count as having killed two as
well. Others are sent to engines without a trial, if any. Knows of this gateway's requests alone.
An engine's partner may notice its death first, and fail the attempt for that: the news that
explains it comes behind.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ...core.errors import BatonError, EngineFailed
from .engine_link import Avoid

_MAX_CONVICTED = 256
_LATE_S = 1.0  # by which that news may come


@dataclass(frozen=True, slots=True)
class Suspicion:
    """`side`: of a (prefill, decode) pair, the engine that died; cleared with so many tokens."""

    side: int
    cleared_at: int

    @classmethod
    def of(cls, pair: tuple[str, str], blamed: str, num_tokens: int) -> Suspicion:
        """A request with `num_tokens` output tokens, whose engine `blamed` died. The next token is
        the prefill engine's, the one behind it the decode engine's."""
        side = pair.index(blamed)
        return cls(side, num_tokens + 1 + side)


class Suspects:
    """Which engines have a suspect on trial. Samples of one call are alike: one is tried at a time,
    and `convicted` are the errors of calls of which one was given up."""

    def __init__(self) -> None:
        self._trials: dict[str, tuple[str, str]] = {}  # call and engine, by request id
        self.convicted: OrderedDict[str, BatonError] = OrderedDict()

    @property
    def engines(self) -> frozenset[str]:
        return frozenset([engine for _, engine in self._trials.values()])

    def keep_clear(self, avoid: Avoid) -> Avoid:
        """`avoid`, and every engine with a trial."""
        if not self._trials:
            return avoid
        return Avoid(avoid.incarnations | self.engines, avoid.pairs)

    def tries(self, call_id: str) -> bool:
        """Whether a sample of this call is on trial."""
        return any(call == call_id for call, _ in self._trials.values())

    def try_on(self, request_id: str, call_id: str, engine: str) -> None:
        """A suspect is dispatched; pair with `end`."""
        self._trials[request_id] = (call_id, engine)

    def end(self, request_id: str) -> None:
        """Its trial is over, however it ended; nothing if there is none."""
        self._trials.pop(request_id, None)

    def convict(self, call_id: str, error: BatonError) -> None:
        """It has killed as many engines as one may; remembered while samples of it may wait."""
        self.convicted[call_id] = error
        if len(self.convicted) > _MAX_CONVICTED:
            self.convicted.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Unexplained:
    """An attempt that failed with neither engine to blame."""

    pair: tuple[str, str]
    num_tokens: int
    failed_s: float


class EngineDeaths:
    """One request's: how many engines died under it, and whether it is a suspect for that."""

    def __init__(self, request_id: str, suspects: Suspects, max_deaths: int) -> None:
        self._request_id = request_id
        self._suspects = suspects
        self._max_deaths = max_deaths
        self._num_deaths = 0
        self._suspicion: Suspicion | None = None
        self._unexplained: _Unexplained | None = None

    @property
    def is_suspect(self) -> bool:
        return self._suspicion is not None

    @property
    def is_convicted(self) -> bool:
        return self._num_deaths >= self._max_deaths

    def attempt_began(self, call_id: str, pair: tuple[str, str]) -> None:
        """On these engines; a suspect's trial begins."""
        if self._suspicion is not None:
            self._suspects.try_on(self._request_id, call_id, pair[self._suspicion.side])

    def attempt_failed(
        self,
        call_id: str,
        pair: tuple[str, str],
        blamed: str | None,
        error: BatonError,
        *,
        num_tokens: int,
        now_s: float,
    ) -> None:
        """With so many output tokens; `blamed` None: the pair."""
        self._suspects.end(self._request_id)
        self._unexplained = None
        if blamed is None:
            self._unexplained = _Unexplained(pair, num_tokens, now_s)
        elif isinstance(error, EngineFailed):
            self._suspect(call_id, pair, blamed, num_tokens, error)

    def died_late(
        self, call_id: str, died: str, *, num_tokens: int, now_s: float
    ) -> EngineFailed | None:
        """An engine died that the running attempt is not on: what made the one before fail, if it
        was that one's, lately, and the request has got no further since."""
        before = self._unexplained
        if before is None or died not in before.pair:
            return None
        if now_s - before.failed_s >= _LATE_S or num_tokens > before.num_tokens:
            return None
        self._unexplained = None
        error = EngineFailed("an engine died under the request")
        self._suspect(call_id, before.pair, died, before.num_tokens, error)
        return error

    def got_to(self, num_tokens: int) -> None:
        """Further than where its engine died: what killed that was another request."""
        if self._suspicion is not None and num_tokens >= self._suspicion.cleared_at:
            self._suspicion = None
            self._num_deaths = 0
            self._suspects.end(self._request_id)

    def ended(self) -> None:
        """The request has, however."""
        self._suspects.end(self._request_id)

    def _suspect(
        self,
        call_id: str,
        pair: tuple[str, str],
        died: str,
        num_tokens: int,
        error: EngineFailed,
    ) -> None:
        self._num_deaths += 1
        self._suspicion = Suspicion.of(pair, died, num_tokens)
        if self._num_deaths == self._max_deaths:
            self._suspects.convict(call_id, error)
