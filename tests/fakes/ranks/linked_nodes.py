"""A prefill and a decode node as processes, with test sessions to both engines, and hand-offs."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deployments import marked_processes
from node_driver import OUR_MARK, NodeProcess, Session, members, session

from baton.core.membership import Member, Role
from baton.core.request.request import Request, Ticket
from baton.core.request.sampling_params import SamplingParams


@dataclass
class Nodes:
    prefill: NodeProcess
    decode: NodeProcess
    redis_url: str
    flags: tuple[str, ...] = ()  # of both nodes


def wait_for_no_process(timeout_s: float = 10.0) -> None:
    """Wait until no process is left: with a killed supervisor rank 0 ends, and with it the other
    ranks."""
    deadline_s = time.monotonic() + timeout_s
    while marked_processes(OUR_MARK):
        assert time.monotonic() < deadline_s, "a process is left"
        time.sleep(0.02)


def request_of(num_prompt_tokens: int, *, max_tokens: int = 8, **sampling: float) -> Request:
    """A random prompt of token ids below 253."""
    start = os.urandom(1)[0]
    prompt = tuple((start + i * i) % 253 for i in range(num_prompt_tokens))
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})
    return Request(os.urandom(16).hex(), 0, prompt, params)


@dataclass
class Pair:
    """Sessions with both engines."""

    prefill: Session
    decode: Session

    async def hand_off(self, request: Request) -> None:
        assert self.prefill.welcome is not None and self.decode.welcome is not None
        engines = (self.prefill.welcome.incarnation, self.decode.welcome.incarnation)
        ticket = Ticket(request.request_id, *engines)
        await self.prefill.dispatch(request, ticket)
        await self.decode.dispatch(request, ticket)

    async def finish(self, request: Request) -> list[int]:
        key, received = request.key, self.decode.received
        await self.decode.until(lambda: key in received and received[key].is_over)
        assert not received[key].error
        # The sessions are not ordered: what the source sent first may be read last.
        first = self.prefill.received
        await self.prefill.until(lambda: key in first and bool(first[key].tokens))
        return first[key].tokens + received[key].tokens


@asynccontextmanager
async def connected(nodes: Nodes, *, without: str = "") -> AsyncIterator[Pair]:
    """Sessions with the current engines, once they are linked.

    `without`: an engine that has ended, as the directory will show soon.
    """
    addresses = {nodes.prefill.address, nodes.decode.address}

    def ours(seen: Sequence[Member]) -> dict[Role, Member]:
        here = [m for m in seen if m.address in addresses and m.incarnation != without]
        return {member.role: member for member in here}

    by_role = ours(await members(nodes.redis_url, lambda seen: ours(seen).keys() == {*Role}))
    prefill, decode = by_role[Role.PREFILL], by_role[Role.DECODE]
    async with (
        session(prefill.incarnation) as to_prefill,
        session(decode.incarnation) as to_decode,
    ):
        await to_decode.until(
            lambda: prefill.incarnation in {x.incarnation for x in to_decode.heartbeat.links}
        )
        await to_prefill.until(lambda: to_prefill.num_heartbeats > 0)
        yield Pair(to_prefill, to_decode)
