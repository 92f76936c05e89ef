"""Requests that were on an engine when it died: one of them may have killed it, and may again.

    an engine dies ─► all that it held are suspects ─► on trial, on an engine where no other one is
                                                        │  gets further than where it was: cleared
                                                        └─ the engine dies: it has killed two
So what kills engines takes no other suspect with it, which would count as having killed two as
well. Others are sent to engines without a trial, if any. Knows of this gateway's requests alone: of
two gateways' suspects an engine sends the second one back (node/requests/trials.py).
An engine's partner may notice its death first, and fail the attempt for that: the report of the
death that explains it comes behind, and the next attempt waits for it (dispatch_wait.py).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from ...core.errors import BatonError, EngineFailed
from .engine_link import Avoid

_MAX_CONVICTED = 256
LATE_S = 1.0  # by which that report may come


class Suspects:
    """Which engines have a suspect on trial. Samples of one call are alike: one is tried at a time,
    and `convicted` are the errors of calls of which one was given up."""

    def __init__(self) -> None:
        self.trials: dict[str, tuple[str, str]] = {}  # call and engine, by request id
        self.convicted: OrderedDict[str, BatonError] = OrderedDict()

    @property
    def engines(self) -> frozenset[str]:
        return frozenset([engine for _, engine in self.trials.values()])

    def keep_clear(self, avoid: Avoid) -> Avoid:
        """`avoid`, and every engine with a trial."""
        if not self.trials:
            return avoid
        return Avoid(avoid.incarnations | self.engines, avoid.pairs)

    def tries(self, call_id: str) -> bool:
        """Whether a sample of this call is on trial."""
        return any(call == call_id for call, _ in self.trials.values())


class _Unexplained(NamedTuple):
    """An attempt that failed with neither engine to blame."""

    pair: tuple[str, str]
    num_tokens: int
    has_first: bool
    failed_s: float


class EngineDeaths:
    """One request's: how many engines died under it, and whether it is a suspect for that.

    Pairs are of (prefill, decode); `num_tokens` are its output tokens so far.
    """

    def __init__(self, request_id: str, suspects: Suspects, max_deaths: int) -> None:
        self._request_id = request_id
        self._suspects = suspects
        self._max_deaths = max_deaths
        self._num_deaths = 0
        self.suspect_side: int | None = None  # of a pair: where it is on trial
        self._began_at = 0  # output tokens
        self._cleared_at = 0
        self._unexplained: _Unexplained | None = None

    @property
    def is_suspect(self) -> bool:
        return self.suspect_side is not None

    def tried_on(self, pair: tuple[str, str]) -> str | None:
        """Of a pair: the engine that it is on trial on."""
        return None if self.suspect_side is None else pair[self.suspect_side]

    @property
    def is_convicted(self) -> bool:
        return self._num_deaths >= self._max_deaths

    def attempt_began(self, call_id: str, pair: tuple[str, str], num_tokens: int) -> None:
        """On these engines, behind so many tokens; a suspect's trial begins."""
        self._began_at = num_tokens
        if self.suspect_side is not None:
            self._suspects.trials[self._request_id] = (call_id, pair[self.suspect_side])
            # The next token is the prefill engine's, the one behind it the decode engine's.
            self._cleared_at = num_tokens + 1 + self.suspect_side

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
        """`blamed` None: the pair."""
        self.ended()
        self._unexplained = None
        has_first = num_tokens > self._began_at
        if blamed is None:
            self._unexplained = _Unexplained(pair, num_tokens, has_first, now_s)
        elif isinstance(error, EngineFailed):
            self._suspect(call_id, pair, blamed, error, has_first=has_first)

    def died_late(
        self, call_id: str, died: str, *, num_tokens: int, now_s: float
    ) -> EngineFailed | None:
        """An engine died that the running attempt is not on: what made the one before fail, if it
        was that one's, lately, and the request has got no further since."""
        before = self._unexplained
        if before is None or died not in before.pair:
            return None
        if now_s - before.failed_s >= LATE_S or num_tokens > before.num_tokens:
            return None
        self._unexplained = None
        error = EngineFailed("an engine died under the request")
        self._suspect(call_id, before.pair, died, error, has_first=before.has_first)
        return error

    def got_to(self, num_tokens: int) -> None:
        """Further than where its engine died: what killed that was another request."""
        if self.suspect_side is not None and num_tokens >= self._cleared_at:
            self.suspect_side = None
            self._num_deaths = 0
            self.ended()

    def ended(self) -> None:
        """Its attempt or its trial has, however."""
        self._suspects.trials.pop(self._request_id, None)

    def _suspect(
        self,
        call_id: str,
        pair: tuple[str, str],
        died: str,
        error: EngineFailed,
        *,
        has_first: bool,
    ) -> None:
        """`has_first`: the attempt had brought its first token, so that an engine that does both
        died while it decoded."""
        self._num_deaths += 1
        is_both = pair[0] == pair[1]
        self.suspect_side = int(has_first) if is_both else pair.index(died)
        if self._num_deaths == self._max_deaths:
            convicted = self._suspects.convicted
            convicted[call_id] = error  # remembered while samples of the call may wait
            if len(convicted) > _MAX_CONVICTED:
                convicted.popitem(last=False)
