"""Requests that were on an engine when it died: one of them may have killed it, and may again.

    an engine dies ─► all that it held are suspects ─► on trial, on an engine where no other one is
                                                        │  gets further than where it was: cleared
                                                        └─ the engine dies: it has killed two
So what kills engines takes no other suspect with it, which would count as having killed two as
well. Others are sent to engines without a trial, if any. Knows of this gateway's requests alone.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ..core.errors import BatonError
from .engine_link import Avoid

_MAX_CONVICTED = 256


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
