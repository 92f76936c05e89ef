"""An engine's heartbeat: its content, when it is recounted, and the thread that sends it."""

from __future__ import annotations

import heapq
import math
import operator
import threading
from collections.abc import Callable
from typing import Any

from ...core.ports import Clock
from ...engine.engine import Engine
from ...proto import codec
from ...proto.v1 import node_pb2
from ..peers.peers import Peers
from ..requests.request_io import RequestIO
from ..requests.request_role import EngineRole
from .dispatch_gate import DispatchGate
from .promise_orders import PromiseOrders

STALL_S = 60.0
RECOUNT_S = 0.02  # age of the numbers; counting them in each small step would take too long
MAX_CALLERS = 64  # in a heartbeat: those with the most waiting tokens


def heartbeat(
    engine: Engine,
    role: EngineRole[Any],
    peers: Peers,
    requests: RequestIO,
    orders: PromiseOrders,
) -> node_pb2.Heartbeat:
    """The state and the counters that are sent to gateways."""
    load, totals = engine.stats.load(role.pending()), engine.stats.totals()
    counters = node_pb2.Counters(
        **codec.same_fields(totals, node_pb2.Counters),
        host_bytes_out=totals.host.bytes_out,
        host_bytes_in=totals.host.bytes_in,
        disk_hit_tokens=totals.disk.num_hit_blocks * engine.limits.block_size,
        disk_bytes_out=totals.disk.bytes_out,
        disk_bytes_in=totals.disk.bytes_in,
        disk_failures=totals.disk.num_failures,
        num_drafts=totals.speculation.num_drafts,
        num_draft_tokens=totals.speculation.num_draft_tokens,
        accepted_drafts=totals.speculation.accepted,
    )
    counters.MergeFrom(role.counts)
    counters.MergeFrom(peers.prefixes.counts)
    num_leaving = requests.num_with_ticket if role.is_source else 0  # handed off to other engines
    step_cost = None
    if (cost := engine.stats.step_cost()) is not None:
        fields = codec.same_fields(cost, node_pb2.StepCost)
        step_cost = node_pb2.StepCost(**fields, relative_error=engine.stats.step_cost_error)
    adapters = engine.adapters
    callers, decodes = load.waiting_by_caller.items(), load.decodes
    largest = heapq.nlargest(MAX_CALLERS, callers, key=operator.itemgetter(1))
    fields = codec.same_fields(load, node_pb2.Heartbeat) | {
        "num_waiting": load.num_waiting + role.num_coming,
        "num_blocks": engine.limits.num_blocks,
        "is_draining": requests.is_draining,
        "links": peers.windows.links(),
        "counters": counters,
        "num_requests": len(requests) - num_leaving,
        "num_stages": engine.limits.num_stages,
        "step_cost": step_cost,
        "expert_ranks": engine.stats.num_expert_ranks,
        "num_decodes": decodes.num_decodes,
        "decode_keys": decodes.keys,
        "tbt_target_s": engine.promise.target_s,
        "step_tokens": engine.limits.prompt_step_tokens,
        "is_promise_withdrawn": not engine.promise.is_promising,
        "promise_epoch": orders.epoch,
        "promise_leader": orders.leader,
        "decode_step_p99_s": engine.stats.decode_step_p99_s,
        "host_blocks": totals.host.num_blocks,
        "host_block_s": totals.host.block_s,
        "disk_blocks": totals.disk.num_blocks,
        "adapters": [] if adapters is None else adapters.digests,
        "running_adapters": [] if adapters is None else adapters.running_names,
        "waiting_adapters": [] if adapters is None else adapters.waiting_names,
        "waiting_by_caller": [
            node_pb2.CallerTokens(caller_id=caller_id, num_tokens=num_tokens)
            for caller_id, num_tokens in largest
            if num_tokens
        ],
    }
    return node_pb2.Heartbeat(**fields)


class EngineNumbers:
    """Counts the engine's numbers for the sender when they are out of date. Used by the loop's
    thread only."""

    def __init__(
        self,
        engine: Engine,
        role: EngineRole[Any],
        peers: Peers,
        requests: RequestIO,
        orders: PromiseOrders,
        gate: DispatchGate,
        sender: HeartbeatSender,
        clock: Clock,
    ) -> None:
        self._engine, self._role, self._peers, self._requests = engine, role, peers, requests
        self._orders, self._gate = orders, gate
        self._sender, self._clock = sender, clock
        self.num_steps = 0
        self.has_changed = False  # there was input since the last count
        self._recount_s = 0.0  # when the last count expires
        self._had_prompts = False  # at the last count

    def recount(self) -> float:
        """Pass new numbers to the sender; returns inf, or when to call again if it is too early.

        It is never too early when the first prompt has begun to wait, or the last one has stopped
        waiting: other gateways would also send theirs here, or still assume a queue.
        """
        now_s, has_prompts = self._clock.monotonic_s(), self._engine.stats.has_prompts
        if now_s < self._recount_s and has_prompts == self._had_prompts:
            return self._recount_s
        self._recount_s, self._had_prompts = now_s + RECOUNT_S, has_prompts
        self.has_changed = False
        numbers = heartbeat(self._engine, self._role, self._peers, self._requests, self._orders)
        numbers.num_steps = self.num_steps
        numbers.num_requests += self._gate.num_waiting
        self._sender.count(numbers)
        return math.inf


class HeartbeatSender:
    """Sends the loop's latest numbers at a fixed interval, and at once if what gateways route by
    has changed: see `_progress`. A turn that takes longer than `STALL_S` is a hang: heartbeats
    stop, gateways avoid the engine, and the supervisor replaces the process.

    The engine loop's thread writes, the sender's own thread reads; fields are replaced whole.
    """

    def __init__(
        self, beat: Callable[[node_pb2.Heartbeat], None], interval_s: float, clock: Clock
    ) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._clock = clock
        self._numbers = node_pb2.Heartbeat()
        self._turn_started_s: float | None = None
        self._is_stopped = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def turn_started(self) -> None:
        self._turn_started_s = self._clock.monotonic_s()

    def turn_ended(self) -> None:
        """The loop is about to wait or to start the next turn."""
        self._turn_started_s = None

    def count(self, numbers: node_pb2.Heartbeat) -> None:
        """Set new numbers, which must not be modified later."""
        has_moved = _progress(numbers) != _progress(self._numbers)
        self._numbers = numbers
        if has_moved:
            self._woken.set()

    def is_stalled(self) -> bool:
        started_s = self._turn_started_s
        return started_s is not None and self._clock.monotonic_s() - started_s > STALL_S

    def stop(self) -> None:
        self._is_stopped = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._woken.wait(self._interval_s)
            self._woken.clear()
            if self._is_stopped:
                return
            if not self.is_stalled():
                try:
                    self._beat(self._numbers)
                except OSError:
                    return  # the supervisor is gone, which ends the loop as well


def _progress(numbers: node_pb2.Heartbeat) -> tuple[object, ...]:
    """What gateways must know before the next regular heartbeat."""
    waiting_tokens, links = numbers.waiting_tokens, [link.incarnation for link in numbers.links]
    num_steps = numbers.num_steps if waiting_tokens else 0
    return waiting_tokens, num_steps, links, numbers.is_promise_withdrawn, numbers.promise_epoch
