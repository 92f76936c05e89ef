"""Prefixes that come out of other engines' caches before their prompts are computed here, and those
that others get out of ours.

    begin ─► borrow room ─► Intended ─► source pins ─► copies ─┬─► in the cache ──┬─► `on_over`:
      └─ no room, all here, no link ─► False                   └─► lacks, dies, ──┘   compute
                                                                   hangs, refuses

A fetch is never waited for beyond its limit, and fails no request. Its room is taken before the
source is requested anything, so nobody holds another's blocks while waiting for memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NoReturn

from ...core.errors import NodeLost, StaleBlocks
from ...core.ports import Clock, Entropy
from ...core.request.request import PrefixSource, Request, Ticket
from ...engine.engine import Engine
from ...engine.kv.block_pool import Fence, Reservation
from ...engine.kv.lent_prefixes import BorrowedPrefix
from ...kv_transfer.protocol.events import (
    Chunk,
    Complete,
    DropReservation,
    Failed,
    Intended,
    IntentCancelled,
    Offered,
    PinPrefix,
    PullerEvent,
    SourceEvent,
    Withdrawn,
)
from ...kv_transfer.protocol.messages import HandoffState
from ...kv_transfer.protocol.puller import Puller
from ...proto.v1 import node_pb2

LOAN_KEY = ""  # of what is offered though no request here computes it
_LEASE_SHARE = 0.75  # is waited for at most: an engine that is to decode awaits the prompt for one


class PrefixLoans:
    """What one engine's cache holds for pullers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fences: dict[str, Fence] = {}  # by transfer

    def __len__(self) -> int:
        return len(self._fences)

    def lend(self, wanted: PinPrefix) -> tuple[SourceEvent, ...]:
        """All of them, or none: nobody waits here for memory or for a step. The source's answer."""
        ticket, lent = wanted.ticket, self._engine.prefixes.lend(wanted.block_hashes)
        transfer_id = ticket.transfer_id
        if lent is None:
            return (Withdrawn(transfer_id, StaleBlocks("the prefix cannot be lent")),)
        self._fences[transfer_id], refs = lent
        num_tokens = len(refs) * self._engine.limits.block_size
        state = HandoffState(first_undrafted=self._engine.prefixes.first_undrafted(refs))
        chunk = Chunk(transfer_id, refs, num_tokens, state)
        return Offered(ticket, LOAN_KEY, deadline_s=math.inf), chunk

    def take_back(self, transfer_id: str) -> None:
        if (fence := self._fences.pop(transfer_id, None)) is not None:
            self._engine.prefixes.give_back(fence)


@dataclass(slots=True)
class _Fetch:
    request: Request
    prefix: BorrowedPrefix
    began_s: float
    on_over: Callable[[], None] | None  # None: it was called


class PrefixFetches:
    """One engine's. `by_transfer`: until their blocks are given back; `counts`: since its
    incarnation began."""

    def __init__(
        self,
        engine: Engine,
        puller: Puller,
        clock: Clock,
        entropy: Entropy,
        feed: Callable[[PullerEvent], None],
        *,
        incarnation: str,
        lease_s: float,
    ) -> None:
        """`feed`: the `puller`, and carry out what it answers."""
        self._engine = engine
        self._puller, self._feed = puller, feed
        self._clock = clock
        self._entropy = entropy
        self._incarnation = incarnation
        self._most_limit_s = _LEASE_SHARE * lease_s
        self.by_transfer: dict[str, _Fetch] = {}
        self.counts = node_pb2.Counters()

    @property
    def requests(self) -> list[Request]:
        """Those that wait for their prefix."""
        return [fetch.request for fetch in self.by_transfer.values() if fetch.on_over is not None]

    def begin(self, request: Request, source: PrefixSource, on_over: Callable[[], None]) -> bool:
        """Pull the prefix that the request names; False: it is to be computed at once.

        `on_over` is called once, when the prefix is here or will not come, unless `forget` is.
        """
        if not self._puller.is_linked(source.incarnation):
            self.counts.failed_fetches[NodeLost.code] += 1
            return False
        if request.sampling.prompt_logprobs is not None:
            return False
        size = self._engine.limits.block_size
        num_blocks = min(source.num_blocks, (request.num_known_tokens - 1) // size)
        hashes = self._engine.block_hashes(request, num_blocks * size)
        prefix = self._engine.prefixes.borrow(hashes)
        if prefix is None:
            return False
        now_s = self._clock.monotonic_s()
        ticket = Ticket(self._entropy.new_id(), source.incarnation, self._incarnation)
        self.by_transfer[ticket.transfer_id] = _Fetch(request, prefix, now_s, on_over)
        until_s = now_s + min(source.limit_s, self._most_limit_s)
        room = Reservation(request.key, prefix.block_ids, prefix.num_cached_blocks, num_blocks)
        self._feed(Intended(ticket, request.key, hashes, num_blocks, until_s, room))
        return True

    def forget(self, key: str, others: Container[str]) -> None:
        """The request is over. If a prefix is awaited for it, and for no other sample of its prompt
        that is among `others`, it is not any more."""
        for transfer_id, fetch in self.by_transfer.items():
            keys = [sample.key for sample in (fetch.request, *fetch.request.forks)]
            if (
                fetch.on_over is not None
                and key in keys
                and not any(each in others for each in keys)
            ):
                fetch.on_over = None
                self._feed(IntentCancelled(transfer_id))
                return

    def reserve(self, key: str) -> NoReturn:
        raise AssertionError("a prefix has its room before it is intended")

    def complete(self, complete: Complete) -> None:
        fetch = self.by_transfer.pop(complete.transfer_id)
        self._engine.prefixes.keep(fetch.prefix, complete.state.first_undrafted)
        self.counts.num_fetches += 1
        num_pulled = complete.reservation.num_known_blocks - fetch.prefix.num_cached_blocks
        self.counts.fetched_blocks += num_pulled
        self.counts.fetched_bytes += num_pulled * self._engine.limits.block_bytes
        self.counts.fetch_s += self._clock.monotonic_s() - fetch.began_s
        self._over(fetch)

    def failed(self, failed: Failed) -> None:
        """Its room stays until nothing writes to it: `dropped`."""
        self.counts.failed_fetches[failed.error.code] += 1
        self._over(self.by_transfer[failed.transfer_id])

    def dropped(self, dropped: DropReservation) -> None:
        self._engine.prefixes.drop(self.by_transfer.pop(dropped.transfer_id).prefix)

    @staticmethod
    def _over(fetch: _Fetch) -> None:
        on_over, fetch.on_over = fetch.on_over, None
        if on_over is not None:
            on_over()
