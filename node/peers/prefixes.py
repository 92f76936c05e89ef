"""Prefixes that are fetched out of other engines' caches before a prompt is computed, and prefixes
that are lent out of the local cache.

    begin ─► reserve blocks ─► Intended ─► source pins ─► copies ─┬─► cached ─────┬─► `on_over`:
      └─ no blocks, all cached, no link ─► False                  └─► failed, ────┘   compute
                                                                      timed out

A request waits for a fetch no longer than its limit, and a failed fetch fails no request. Blocks
are reserved before the request to the source, so no engine holds another's blocks while it waits
for memory.
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
    ChunkReady,
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

LOAN_KEY = ""  # the key of an offered prefix, which no request computes
# The longest wait, in leases: the engine that decodes waits one lease for the prompt.
_LEASE_SHARE = 0.75


@dataclass(slots=True)
class _Fetch:
    request: Request
    prefix: BorrowedPrefix
    began_s: float
    on_over: Callable[[], None] | None  # None: it was called, or is not wanted any more


class Prefixes:
    """Prefixes on their way into one engine's cache, and those in it that are held for pullers.

    `by_transfer`: the fetches, until their blocks are returned; `loans`: held blocks, by transfer;
    `counts`: of fetches, since the engine's incarnation began.
    """

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
        """`feed`: pass an event to `puller` and execute its effects."""
        self._engine = engine
        self._puller, self._feed = puller, feed
        self._clock = clock
        self._entropy = entropy
        self._incarnation = incarnation
        self._most_limit_s = _LEASE_SHARE * lease_s
        self.by_transfer: dict[str, _Fetch] = {}
        self.loans: dict[str, Fence] = {}
        self.counts = node_pb2.Counters()

    # -- out of the local cache ----------------------------------------------------------------

    def lend(self, wanted: PinPrefix) -> tuple[SourceEvent, ...]:
        """Hold all of the blocks, or none; never wait. Returns the events for the source."""
        ticket, lent = wanted.ticket, self._engine.prefixes.lend(wanted.block_hashes)
        transfer_id = ticket.transfer_id
        if lent is None:
            return (Withdrawn(transfer_id, StaleBlocks("the prefix cannot be lent")),)
        self.loans[transfer_id], refs = lent
        num_tokens = len(refs) * self._engine.limits.block_size
        state = HandoffState(first_undrafted=self._engine.prefixes.first_undrafted(refs))
        chunk = ChunkReady(transfer_id, refs, num_tokens, state)
        return Offered(ticket, LOAN_KEY, deadline_s=math.inf), chunk

    def take_back(self, transfer_id: str) -> None:
        if (fence := self.loans.pop(transfer_id, None)) is not None:
            self._engine.prefixes.give_back(fence)

    # -- into the local cache ------------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """Requests that wait for their prefix."""
        return [fetch.request for fetch in self.by_transfer.values() if fetch.on_over is not None]

    def begin(self, request: Request, source: PrefixSource, on_over: Callable[[], None]) -> bool:
        """Fetch the prefix that the request names. Returns False if it must be computed at once.

        `on_over` is called once, when the fetch has ended in any way, unless `forget` is called.
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
        """The request is over: cancel its fetch, unless another sample of its prompt among `others`
        waits for it."""
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
        """Its blocks are kept until no copy writes to them: see `dropped`."""
        self.counts.failed_fetches[failed.error.code] += 1
        self._over(self.by_transfer[failed.transfer_id])

    def dropped(self, dropped: DropReservation) -> None:
        self._engine.prefixes.drop(self.by_transfer.pop(dropped.transfer_id).prefix)

    @staticmethod
    def _over(fetch: _Fetch) -> None:
        on_over, fetch.on_over = fetch.on_over, None
        if on_over is not None:
            on_over()
