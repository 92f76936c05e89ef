"""A session's view of the engines: the link to send requests over, the outputs that come back, and
the router that chooses engines.

Plain values and Protocols; the real link is engines/linked_engine.py.
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
    """What a hand-off moved. `cached_tokens`: prompt tokens that the puller had cached."""

    num_bytes: int
    cached_tokens: int
    transport: str


class EngineOutput(NamedTuple):
    """The output of one step of an engine for one attempt of a request.

    A named tuple, since one may be made for each token: it takes a fifth of the time of a frozen
    dataclass. `logprobs` are parallel to `token_ids`, or empty; `prompt_logprobs` are of the
    prompt's tokens from `first_prompt_index` on.
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


# An output of one token and nothing else: request id, attempt, index, token id. Nearly all outputs
# are such; those with a request's first token have stamps, and the last has a finish reason.
PlainToken: TypeAlias = tuple[str, int, int, int]


class EngineLink(Protocol):
    """One engine, for as long as its stream lives: linked_engine.LinkedEngine. `reported_s`: when
    its last heartbeat was received, on the monotonic clock."""

    incarnation: str
    name: str
    fingerprint: str
    reported_s: float

    def dispatch(
        self, request: Request, route: Route, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        """Send it its part of the route. `ticket`: for the hand-off, if the route has two engines.
        Never blocks and never raises."""

    def cancel(self, request_id: str, attempt: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Route:
    """The engine that computes the prompt and the one that decodes: perhaps the same.

    `cached_tokens`: tokens of the request in each engine's cache, by the prefix index. `fetch`: the
    prefix to pull from another engine's cache before the prompt is computed. `holds_first`: the
    first token is streamed only when the decode engine has started, some steps later: it promises
    the gaps between tokens.
    """

    prefill: EngineLink
    decode: EngineLink
    cached_tokens: tuple[int, int] = (0, 0)
    fetch: Fetch | None = None
    holds_first: bool = False


# Engines, and (prefill, decode) pairs, that failed a request a moment ago; by incarnation.
Avoid: TypeAlias = frozenset[str | tuple[str, str]]


class Blocked(enum.Enum):
    """Why a request cannot be dispatched now."""

    ENGINE = "engine"  # there is no pair of engines that may serve it
    PLACE = "place"  # no decode engine has a place for it, nor for other requests
    TURN = "turn"  # prompts of the same caller are ahead of it; other callers may pass


class MustWait(Exception):
    """There are engines for the request, but none may take it now."""

    def __init__(self, reason: Blocked) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs of its engines. `num_tokens`: known tokens of each of the
    `num_sequences` samples, which may get `max_output_tokens` more each.

    `is_retry`: an engine failed it, so it does not wait for other prompts of its caller.
    `tbt_target_s`: the request's own target; 0: none.
    """

    num_tokens: int
    num_sequences: int = 1
    max_output_tokens: int = 1
    is_retry: bool = False
    tbt_target_s: float = 0.0


class Router(Protocol):
    """Picks the engines for a request."""

    def choose(self, demand: Demand, *, avoid: Avoid, fingerprint: str | None) -> Route:
        """A pair, or one engine for both, with a place, not in `avoid`, and of this fingerprint.

        Raises Unavailable, which names what is missing, or MustWait.
        """
        ...
