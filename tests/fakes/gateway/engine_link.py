"""Engines as sessions see them: links that record what is sent, a router over them, a sink."""

from __future__ import annotations

import asyncio
import enum
import math
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import BatonError, Unavailable
from baton.core.request.request import FinishReason, Request, Ticket
from baton.gateway.request.engine_link import Avoid, Blocked, Demand, MustWait, Route
from baton.gateway.request.output_chunk import OutputChunk


class Work(enum.Enum):
    """The work that a dispatch requests from an engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    LOCAL = "local"  # prefill and decode, without a hand-off


@dataclass
class FakeLink:
    """Records every dispatch and cancel: a session's link, or an engine's connection."""

    incarnation: str
    fingerprint: str = "fp"
    reported_s: float = math.inf
    dispatched: list[tuple[Request, Work, Ticket | None, float]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)  # attempts
    promises: list[tuple[int, str, float | None]] = field(default_factory=list)
    adapter_orders: list[tuple[str, str]] = field(default_factory=list)
    adapter_answers: list[asyncio.Future[str | BatonError]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"node-{self.incarnation}"

    def dispatch(self, request: Request, *more: Any) -> None:
        """Record a dispatch, with the route as a link gets it, or without."""
        *_, ticket, deadline_remaining_s = more
        work = Work.LOCAL
        if ticket is not None:
            is_source = ticket.source_incarnation == self.incarnation
            work = Work.PREFILL if is_source else Work.DECODE
        self.dispatched.append((request, work, ticket, deadline_remaining_s))

    def cancel(self, request_id: str, attempt: int) -> None:
        self.cancelled.append(attempt)

    def set_promise(self, epoch: int, leader: str, tbt_target_s: float | None) -> None:
        self.promises.append((epoch, leader, tbt_target_s))

    def load_adapter(self, name: str, path: str) -> asyncio.Future[str | BatonError]:
        self.adapter_orders.append((name, path))
        self.adapter_answers.append(asyncio.get_running_loop().create_future())
        return self.adapter_answers[-1]


@dataclass
class FakeRouter:
    """Chooses the first engines that are not to be avoided; tests edit the lists.

    `blocked`: why no engine is chosen, although there are some. `demands`: the demands received.
    """

    prefill: list[FakeLink]
    decode: list[FakeLink]
    blocked: Blocked | None = None
    demands: list[Demand] = field(default_factory=list)
    holds_first: bool = False

    def choose(self, demand: Demand, *, avoid: Avoid, fingerprint: str | None) -> Route:
        self.demands.append(demand)
        for prefill in self.prefill:
            for decode in self.decode:
                pair = (prefill.incarnation, decode.incarnation)
                is_bad = not avoid.isdisjoint((pair, *pair))
                if not is_bad and fingerprint in (None, prefill.fingerprint):
                    if self.blocked is not None:
                        raise MustWait(self.blocked)
                    return Route(prefill, decode, holds_first=self.holds_first)
        raise Unavailable("no such engines")


@dataclass
class FakeSink:
    """Collects the stream and checks it: no gap, no duplicate, one end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    last: OutputChunk | None = None
    error: BatonError | None = None
    is_full: bool = False

    def emit(self, chunk: OutputChunk) -> bool:
        assert not self.is_over, "nothing comes after the end"
        if self.is_full and chunk.result is None:
            return False
        assert chunk.index == len(self.token_ids), "no gap and no double"
        assert chunk.token_ids or chunk.result is not None, "an empty chunk says nothing"
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if chunk.result is not None:
            self.last = chunk
        return True

    def fail(self, error: BatonError) -> None:
        assert not self.is_over, "a request ends once"
        self.error = error

    @property
    def is_over(self) -> bool:
        return self.last is not None or self.error is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.result.finish_reason if self.last and self.last.result else None


class Letters:
    """A detokenizer whose tokens are letters."""

    def step(self, token_id: int) -> str:
        return chr(token_id)
