"""An engine of a simulated cluster: the production `Engine` over a simulated device, with both ends
of the hand-off, and the heartbeats and outputs that gateways receive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from baton.core.errors import PromiseRefused
from baton.core.membership import Member, Role
from baton.core.request.request import PrefixSource, Request, Ticket
from baton.core.request.timeline import Event, Stamp
from baton.core.request.token_ids import block_hashes, root_hash
from baton.core.step_cost import StepCost
from baton.engine.engine import Engine
from baton.engine.engine_parts import EngineParts
from baton.engine.first_steps import BUDGET_S
from baton.engine.kv.generations import Generations
from baton.engine.kv.limits import EngineLimits
from baton.engine.scheduling.outputs import StepOutput
from baton.gateway.engines.linked_engine import LinkedEngine
from baton.gateway.engines.reported_load import ReportedLoad
from baton.gateway.request.engine_link import EngineOutput
from baton.prefix_index.prefix_sources import FETCH_S
from baton.proto.v1 import node_pb2
from baton.proto.v1.node_pb2 import Counters

from .caches import LINK_GBYTES_PER_S, TOKEN_BYTES, PlayedCopier, PublishedCache
from .device import Device, PlayedDevice, VirtualClock
from .gateway import PlayedGateway

HANDOFF_S = 0.003
FINGERPRINT = "fp"
_RECOUNT_S = 0.02  # as in node/engine_process/heartbeat.py
_KV_TOKEN_S = TOKEN_BYTES / 300e9  # for an 8B model over NVLink
_NUM_BLOCKS, _BLOCK_SIZE = 50_000, 16


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """`tbt_target_s`: the engine's promise, if any. `cost`, `blocks`: if they differ from the
    defaults. `device`: a real device instead of a simulated one; `eos_ids`: tokens that end its
    outputs. `measures_first_steps`: as engines on GPUs do."""

    role: Role
    tbt_target_s: float | None = None
    max_num_batched_tokens: int = 2048
    prefill_chunk_tokens: int = 0
    max_num_seqs: int = 256
    cost: StepCost | None = None
    blocks: Blocks | None = None
    device: Device | None = None
    eos_ids: tuple[int, ...] = ()
    measures_first_steps: bool = True


@dataclass(frozen=True, slots=True)
class Blocks:
    """The KV blocks of an engine with prefix caching; `num_host` of them in host memory."""

    size: int
    num: int
    num_host: int = 0


class Cluster(Protocol):
    """The rest of the cluster, as an engine uses it. `moves`: (time, engine, whether it
    promises)."""

    clock: VirtualClock
    gateways: list[PlayedGateway]
    engines: dict[str, PlayedEngine]
    link_rates: dict[str, float]
    moves: list[tuple[float, str, bool]]

    def at(self, due_s: float, play: Callable[[], None]) -> None: ...

    def after(self, seconds: float, play: Callable[[], None]) -> None: ...

    def hear(self, name: str, load: ReportedLoad) -> None: ...

    def publish(self, cache: PublishedCache) -> None: ...


class PlayedEngine:
    """An `Engine` over a simulated device, with both ends of the hand-off.

    Its own clock runs ahead within a step; the outputs of a step are sent at its end.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        cost: StepCost,
        setup: EngineSetup,
        sources: frozenset[str],
    ) -> None:
        self.name = name
        self._cluster = cluster
        self._links = sources if setup.role is Role.DECODE else frozenset[str]()
        self._device: Device = setup.device or PlayedDevice(setup.cost or cost)
        blocks = setup.blocks or Blocks(_BLOCK_SIZE, _NUM_BLOCKS)
        self.block_size, block_bytes = blocks.size, blocks.size * TOKEN_BYTES
        self.cache = None if setup.blocks is None else PublishedCache(name)
        self._copier = None
        if blocks.num_host:
            self._copier = PlayedCopier(self._device, blocks.num_host, block_bytes)
        limits = EngineLimits(
            blocks.num,
            blocks.size,
            1 << 17,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            prefill_chunk_tokens=setup.prefill_chunk_tokens,
        )
        self.engine = Engine(
            EngineParts(
                self._device,
                limits,
                Generations(blocks.num),
                fingerprint=FINGERPRINT,
                eos_token_ids=setup.eos_ids,
                enable_prefix_caching=self.cache is not None,
                cache_observer=self.cache,
                clock=self._device,
                host_copier=self._copier,
            )
        )
        if setup.measures_first_steps:
            self._device.now_s = cluster.clock.now_s
            self.engine.measure_first_steps(BUDGET_S)
            _ = self._device.now_s  # reading stops the clock
        self.engine.promise.tbt_target_s = setup.tbt_target_s
        self._tickets: dict[str, Ticket] = {}  # of requests whose KV is held for a hand-off
        self._intents: dict[str, Request] = {}  # by key
        self._arrived: dict[str, int] = {}  # first tokens, by key, of requests without blocks yet
        self._is_busy = False
        self._num_steps = 0
        self._reported = (0, 0)  # waiting tokens and number of steps at the last heartbeat
        self._recount_s = 0.0  # when the next early heartbeat is allowed
        self._count_s = math.inf  # when a pending change is reported
        self.num_refusals = 0
        self.is_draining = False
        self.most_waiting = 0  # requests, at heartbeats
        self.busy_s = 0.0
        self.num_fetches = 0
        self._woken_s = -1.0
        member = Member(
            *(name, setup.role, name, "", "demo", FINGERPRINT), 1 << 17, blocks.size, blocks.num
        )
        self._gateway_of: dict[str, PlayedGateway] = {}  # by key
        for gateway in cluster.gateways:
            link = _Link(self, gateway)
            gateway.table.add(
                LinkedEngine(
                    member,
                    link,
                    self.load(),
                    node_pb2.Welcome(
                        max_num_seqs=limits.max_num_seqs,
                        block_bytes=block_bytes,
                        num_host_blocks=blocks.num_host,
                        tbt_target_s=setup.tbt_target_s or 0.0,
                    ),
                    cluster.clock,
                )
            )

    def take(self, gateway: PlayedGateway, request: Request, ticket: Ticket | None) -> None:
        """Accept a dispatched request."""
        self._gateway_of[request.key] = gateway
        if ticket is not None and ticket.puller_incarnation == self.name:
            self._intents[request.key] = request
            return
        if ticket is None and request.may_refuse:
            try:
                self.engine.promise.check(request)
            except PromiseRefused as refused:
                self._refuse(request, refused)
                return
        if ticket is not None:
            self._tickets[request.key] = ticket
        if request.prefix_source is not None and request.output_token_ids:
            self._move_in(request)
            return
        if request.prefix_source is None or not self._fetch(request, request.prefix_source):
            self._add(request)

    def _add(self, request: Request) -> None:
        self.engine.add(request, hold=request.key in self._tickets)
        self._step()
        self._count_soon()

    def _count_soon(self) -> None:
        """Schedule an early heartbeat after a change; it is immediate if prompts begin or cease to
        wait."""
        now_s = self._cluster.clock.now_s
        is_early = self.engine.stats.has_prompts == bool(self._reported[0])
        due_s = max(now_s, self._recount_s) if is_early else now_s
        if due_s < self._count_s:
            self._count_s = due_s
            self._cluster.at(due_s, self._recount)

    def _recount(self) -> None:
        now_s = self._cluster.clock.now_s
        if now_s < self._count_s:
            return  # already reported
        self._count_s, self._recount_s = math.inf, now_s + _RECOUNT_S
        if not self.engine.stats.has_prompts and not self._reported[0]:
            return
        before, load = self._reported, self.load()
        if self._reported != before:
            self._cluster.hear(self.name, load)

    def _fetch(self, request: Request, source: PrefixSource) -> bool:
        """Fetch a prefix from another engine's cache before the prompt is computed, as
        node/peers/prefixes.py does. Returns False, immediately, if the prefix cannot be fetched."""
        tokens = request.known_token_ids[: source.num_blocks * self.block_size]
        hashes = block_hashes(root_hash(FINGERPRINT, request.cache_salt), tokens, self.block_size)
        prefix = self.engine.prefixes.borrow(hashes)
        if prefix is None:
            return False
        lender = self._cluster.engines[source.incarnation].engine
        if (lent := lender.prefixes.lend(hashes[prefix.num_cached_blocks :])) is None:
            self.engine.prefixes.drop(prefix)
            return False
        num_bytes = len(lent[1]) * self.block_size * TOKEN_BYTES
        pull_s = FETCH_S + num_bytes / (LINK_GBYTES_PER_S * 1e9)

        def over() -> None:
            lender.prefixes.give_back(lent[0])
            self.engine.prefixes.keep(prefix)
            self.num_fetches += 1
            self._add(request)

        self._cluster.after(pull_s, over)
        return True

    def _refuse(self, request: Request, error: PromiseRefused) -> None:
        gateway = self._gateway_of.pop(request.key)
        self.num_refusals += 1
        answer = EngineOutput(request.request_id, request.attempt, error=error)
        self._cluster.after(0.0, lambda: gateway.received(self.name, [answer]))

    def _move_in(self, request: Request) -> None:
        """A running request moves here: its next token follows once its KV is copied."""
        *before, last = request.output_token_ids
        moved = replace(request, output_token_ids=before, prefix_source=None)
        self._cluster.after(_pull_s(request), lambda: self._arrive(moved, last))

    def forget(self, key: str) -> None:
        """Drop a request that ended with its first token or has moved away."""
        self._intents.pop(key, None)
        self._tickets.pop(key, None)
        self._arrived.pop(key, None)
        if self._gateway_of.pop(key, None) is not None:
            self.engine.abort(key)

    def load(self) -> ReportedLoad:
        load, totals = self.engine.stats.load(self._intents.values()), self.engine.stats.totals()
        num_here = load.num_running + load.num_waiting + len(self._intents)
        self._reported = load.waiting_tokens, self._num_steps if load.waiting_tokens else 0
        self.most_waiting = max(self.most_waiting, load.num_waiting)
        return ReportedLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_tokens=load.waiting_tokens,
            waiting_pairs=load.waiting_pairs,
            free_blocks=load.free_blocks,
            credit_blocks=load.credit_blocks,
            is_draining=self.is_draining,
            links=self._links,
            link_gbytes_per_s=self._cluster.link_rates,
            host_block_s=totals.host.block_s,
            num_steps=self._num_steps,
            num_requests=max(0, num_here - len(self._tickets)),  # held requests continue elsewhere
            room_blocks=load.room_blocks,
            output_tokens=load.output_tokens,
            mean_output_tokens=load.mean_output_tokens,
            step_cost=self.engine.stats.step_cost(),
            decodes=load.decodes,
            tbt_target_s=self.engine.promise.target_s,
            step_tokens=self.engine.limits.prompt_step_tokens,
            is_promise_withdrawn=not self.engine.promise.is_promising,
            counters=Counters(
                num_prompts=totals.num_prompts,
                num_prompt_tokens=totals.num_prompt_tokens,
                num_decode_tokens=totals.num_decode_tokens,
            ),
            waiting_by_caller=load.waiting_by_caller,
        )

    def set_promise(self, *, is_promising: bool) -> None:
        """Set whether the engine promises, from the next step on."""
        self.engine.promise.is_promising = is_promising
        self._cluster.moves.append((self._cluster.clock.now_s, self.name, is_promising))

    def _step(self) -> None:
        if self._is_busy or not self.engine.has_work:
            return
        self._device.now_s = began_s = self._cluster.clock.now_s
        output = self.engine.step()
        self._report_started(output)
        self._note_cache()
        if self._device.now_s == began_s and self._wait_for_copies():
            return
        self._num_steps += 1
        self.busy_s += self._device.now_s - began_s
        self._is_busy = True
        self._cluster.at(self._device.now_s, lambda: self._step_ended(output))

    def _wait_for_copies(self) -> bool:
        """If no step was launched, wake at the end of the next copy. Returns whether there is a
        copier."""
        now_s = self._cluster.clock.now_s
        end_s = None if self._copier is None else self._copier.next_end_s(now_s)
        if end_s is not None and end_s != self._woken_s:
            self._woken_s = end_s
            self._cluster.at(end_s, self._step)
        return self._copier is not None

    def _note_cache(self) -> None:
        if (cache := self.cache) and (due_s := cache.due_s(self._device.now_s)) is not None:
            self._cluster.at(due_s, lambda: self._cluster.publish(cache))

    def _report_started(self, output: StepOutput) -> None:
        """Report the handed-over decodes that start with this step."""
        if self.engine.promise.tbt_target_s is None:
            return
        for key in output.started:
            if key in self._tickets or (gateway := self._gateway_of.get(key)) is None:
                continue
            request_id, _, attempt = key.partition("/")
            stamp = Stamp(Event.DECODE_STARTED, 0, self.name)
            begun = EngineOutput(request_id, int(attempt), stamps=(stamp,))
            self._cluster.at(
                self._cluster.clock.now_s, partial(gateway.received, self.name, [begun])
            )

    def _step_ended(self, output: StepOutput) -> None:
        self._is_busy = False
        assert not output.failed, output.failed
        self._start_arrived()
        self._step()
        self._count_soon()
        outputs: dict[PlayedGateway, list[EngineOutput]] = {}
        for token in output.tokens:
            if token.key not in self._gateway_of:
                continue  # it moved away during the step
            request_id, _, attempt = token.key.partition("/")
            ticket = self._tickets.pop(token.key, None)
            outputs.setdefault(self._gateway_of[token.key], []).append(
                EngineOutput(
                    request_id, int(attempt), token.index, (token.token_id,), token.finish_reason
                )
            )
            if token.finish_reason is not None or ticket is not None:
                del self._gateway_of[token.key]
            if token.finish_reason is None and ticket is not None:
                self._hand_off(token.key, ticket, token.token_id)
        for gateway, received in outputs.items():
            gateway.received(self.name, received)

    def _hand_off(self, key: str, ticket: Ticket, token_id: int) -> None:
        puller = self._cluster.engines[ticket.puller_incarnation]
        request = puller._intents.pop(key)
        self._cluster.after(_pull_s(request), lambda: self._pulled(puller, request, token_id))

    def _pulled(self, puller: PlayedEngine, request: Request, token_id: int) -> None:
        self.engine.abort(request.key)
        self._step()
        puller._arrive(request, token_id)

    def _arrive(self, request: Request, token_id: int) -> None:
        if request.key in self._gateway_of:  # it was not cancelled
            self._arrived[request.key] = token_id
            self.engine.reserve(request)
            self._start_arrived()
        self._step()

    def _start_arrived(self) -> None:
        while (reservation := self.engine.next_reservation()) is not None:
            self.engine.start(reservation, self._arrived.pop(reservation.key))


def _pull_s(request: Request) -> float:
    return HANDOFF_S + request.num_known_tokens * _KV_TOKEN_S


@dataclass(frozen=True, slots=True)
class _Link:
    """`EngineSender` of one gateway."""

    engine: PlayedEngine
    gateway: PlayedGateway

    def dispatch(
        self, request: Request, ticket: Ticket | None, deadline_remaining_s: float
    ) -> None:
        self.engine.take(self.gateway, request, ticket)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.engine.forget(f"{request_id}/{attempt}")

    def set_promise(self, epoch: int, leader: str, tbt_target_s: float | None) -> None:
        self.engine.set_promise(is_promising=tbt_target_s is not None)
