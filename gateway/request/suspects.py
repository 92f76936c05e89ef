"""Requests that may be what kills engines, and how that is found out without losing many engines.

    an engine dies ─► all that it held are suspects ─► on trial, on an engine without another trial
                                                        │  it gets further than then: cleared
                                                        └─ the engine dies: it has killed two
So a request that kills engines takes no other suspect with it, which would count as having killed
two as well. Other requests go to engines without a trial, if any. Covers this gateway's requests
only: of two gateways' suspects an engine sends the second one back (node/requests/trials.py).
The partner of an engine may notice its death first, and fail the attempt for that: the report of
the death that explains it follows. Until then no suspect is sent to that engine: it would count as
having killed one that was dead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...core.errors import BatonError, EngineFailed
from .attempt import Attempt
from .engine_link import Avoid

_MAX_CONVICTED = 256
LATE_S = 1.0  # by which that report may come


class Suspects:
    """The suspects of one gateway that are on trial, each with its call and engine, by request id.

    Samples of one call are alike: one is tried at a time, and `convicted` are the errors of calls
    of which one was given up. `silent`: engines of which requests wait for a sign of life, by
    request id.
    """

    def __init__(self) -> None:
        self.trials: dict[str, tuple[str, str]] = {}
        self.silent: dict[str, str] = {}
        self.convicted: OrderedDict[str, BatonError] = OrderedDict()

    @property
    def engines(self) -> frozenset[str]:
        return frozenset([engine for _, engine in self.trials.values()])

    def tries(self, call_id: str) -> bool:
        """Whether a sample of this call is on trial."""
        return any(call == call_id for call, _ in self.trials.values())


class _Unexplained(NamedTuple):
    """An attempt that failed with neither engine to blame. `num_tokens`: output tokens by then."""

    attempt: Attempt
    num_tokens: int
    failed_s: float


@dataclass(slots=True, eq=False)
class Suspicion:
    """Whether one request is a suspect. `side`: of the pair (prefill, decode), where it goes on
    trial; None: it is no suspect. `output_ids`: its tokens so far."""

    call_id: str
    request_id: str
    output_ids: Sequence[int]
    max_engine_failures: int
    suspects: Suspects
    side: int | None = None
    _num_deaths: int = 0
    _cleared_at: int = 0  # output tokens
    _unexplained: _Unexplained | None = None

    @property
    def is_convicted(self) -> bool:
        return self._num_deaths >= self.max_engine_failures

    def must_wait(self) -> bool:
        """Whether another sample of its call is on trial. Raises the error of a convicted call."""
        if self.side is None:
            return False
        if error := self.suspects.convicted.get(self.call_id):
            raise error
        return self.suspects.tries(self.call_id)

    @property
    def avoid(self) -> Avoid:
        """A suspect goes to no engine that has a trial, or that may have died just now."""
        if self.side is None:
            return Avoid()
        return self.suspects.engines | {*self.suspects.silent.values()}

    def attempt_began(self, attempt: Attempt) -> None:
        """A suspect's attempt is its trial."""
        if self.side is not None:
            attempt.on_trial = engine = attempt.pair[self.side]
            self.suspects.trials[self.request_id] = (self.call_id, engine)
            # The next token is the prefill engine's, the one behind it the decode engine's.
            self._cleared_at = attempt.base_index + 1 + self.side

    def attempt_failed(
        self, attempt: Attempt, error: BatonError, blamed: str | None, now_s: float
    ) -> None:
        """By the engine `blamed`; None: by the pair."""
        self._unexplained = None
        if blamed is None:
            self._unexplained = _Unexplained(attempt, len(self.output_ids), now_s)
        elif isinstance(error, EngineFailed):
            self._suspect(attempt, blamed, error)

    def explained_by(self, died: str, error: EngineFailed, now_s: float) -> int | None:
        """Returns the side on which this engine's death explains why the previous attempt failed:
        that was on it, lately, and the request has got no further since. None: it does not."""
        before = self._unexplained
        if before is None or died not in before.attempt.pair:
            return None
        if now_s - before.failed_s >= LATE_S or len(self.output_ids) > before.num_tokens:
            return None
        self._unexplained = None
        return self._suspect(before.attempt, died, error)

    def _suspect(self, attempt: Attempt, died: str, error: EngineFailed) -> int:
        """Returns its side. An engine that does both died in decode if it had sent a token."""
        self._num_deaths += 1
        side = int(attempt.has_tokens) if attempt.is_local else attempt.pair.index(died)
        self.side = side
        if self.is_convicted:
            convicted = self.suspects.convicted
            convicted[self.call_id] = error  # kept while samples of the call may wait
            if len(convicted) > _MAX_CONVICTED:
                convicted.popitem(last=False)
        return side

    def got_further(self, attempt: Attempt) -> None:
        """Clear the request if it is now further than where its engine died: another one killed
        that."""
        if self.side is not None and attempt.reaches(self._cleared_at):
            self.side, self._num_deaths = None, 0
            self.end_trial()

    def wait_for(self, silent: str) -> None:
        """The request waits for a sign of life of this engine."""
        self.suspects.silent[self.request_id] = silent

    def end_trial(self) -> None:
        """The trial is over, or the wait."""
        self.suspects.trials.pop(self.request_id, None)
        self.suspects.silent.pop(self.request_id, None)
