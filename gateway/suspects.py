"""Requests that were on an engine when it died: one of them may have killed it, and may again.

    an engine dies ─► all that it held are suspects ─► on trial, on an engine where no other one is
                                                        │  gets further than where it was: cleared
                                                        └─ the engine dies: it has killed two
So what kills engines takes no other suspect with it, which would count as having killed two as
well. Others are sent to engines without a trial, if any. Knows of this gateway's requests alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from .engine_link import Avoid


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
    """Which engines have a suspect on trial."""

    def __init__(self) -> None:
        self._trials: dict[str, str] = {}  # engine by request id

    @property
    def engines(self) -> frozenset[str]:
        return frozenset(self._trials.values())

    def keep_clear(self, avoid: Avoid) -> Avoid:
        """`avoid`, and every engine with a trial."""
        if not self._trials:
            return avoid
        return Avoid(avoid.incarnations | self.engines, avoid.pairs)

    def try_on(self, request_id: str, pair: tuple[str, str], suspicion: Suspicion) -> None:
        """A suspect is dispatched; pair with `end`."""
        self._trials[request_id] = pair[suspicion.side]

    def end(self, request_id: str) -> None:
        """Its trial is over, however it ended; nothing if there is none."""
        self._trials.pop(request_id, None)
