"""What a session sees of an engine: a link to send work over, and the outputs that come back.

Plain values and Protocols; linked_engine.py is the real link, tests have fake ones.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from ...core.errors import BatonError
from ...core.request.request import FinishReason, Request, Ticket, TokenLogprobs
from ...core.request.timeline import Stamp
from ...prefix_index.prefix_sources import Fetch


@dataclass(frozen=True, slots=True)
class TransferSummary:
    """What the hand-off moved. `cached_tokens`: prompt tokens that the puller had already."""

    num_bytes: int
    cached_tokens: int
    transport: str


class EngineOutput(NamedTuple):
    """What one step of an engine brought for one attempt of a request.

    One is made for each token: a named tuple takes a fifth of a frozen dataclass's time.
    `logprobs` are parallel to `token_ids`, or empty; `prompt_logprobs` are of the prompt's tokens
    from `first_prompt_index` on.
    """

    request_id: str
    attempt: int
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: BatonError | None = None
    stamps: tuple[Stamp, ...] = ()
    cached_tokens: int | None = None
    transfer: TransferSummary | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    first_prompt_index: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


# One token of one attempt and nothing else: request id, attempt, index, token id. Nearly all that
# steps bring is that; a request's first token is not, which has a stamp, nor its last.
PlainToken: TypeAlias = tuple[str, int, int, int]


class EngineLink(Protocol):
    """One engine, as long as its stream lives: linked_engine.LinkedEngine."""

    @property
    def incarnation(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def heard_s(self) -> float:
        """When its last heartbeat came, on the monotonic clock."""
        ...

    def dispatch(
        self, request: Request, route: Route, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        """Give it its part of the route. `ticket`: of the hand-off, if the route has two engines.
        Never blocks and never raises."""

    def cancel(self, request_id: str, attempt: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Route:
    """Who computes the prompt and who goes on: perhaps one engine alone. `cached_tokens`: of the
    request, by the prefix index, at each of the two; `fetch`: what is to come from another engine's
    cache before the prompt is computed. `holds_first`: the first token is streamed when the decode
    engine goes on, which promises its gaps: until then some steps may pass."""

    prefill: EngineLink
    decode: EngineLink
    cached_tokens: tuple[int, int] = (0, 0)
    fetch: Fetch | None = None
    holds_first: bool = False


# Engines, and (prefill, decode) pairs of them, that failed a request a moment ago: incarnations.
Avoid: TypeAlias = frozenset[str | tuple[str, str]]


class Blocked(enum.Enum):
    """Why a request cannot be dispatched now."""

    ENGINE = "engine"  # no pair that may serve it is there
    PLACE = "place"  # no decode engine has a place for it: nor for others
    TURN = "turn"  # its caller's own prompts are ahead of it: others may pass


class MustWait(Exception):
    """Engines are there, and the request is not to go to any of them now."""

    def __init__(self, reason: Blocked) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be routed. `num_tokens`: known ones, of each of the `num_sequences` samples, which
    may get `max_output_tokens` more each.

    `is_retry`: an engine failed it: it does not wait for its caller's other prompts.
    `tbt_target_s`: of its own; 0: none.
    """

    num_tokens: int
    num_sequences: int = 1
    max_output_tokens: int = 1
    is_retry: bool = False
    tbt_target_s: float = 0.0


class Router(Protocol):
    """Picks the engines for a request."""

    def choose(self, demand: Demand, *, avoid: Avoid, fingerprint: str | None) -> Route:
        """A pair, or one engine for both, that has a place, none of `avoid`, of this fingerprint.

        Raises Unavailable, naming what is missing, or MustWait.
        """
        ...
