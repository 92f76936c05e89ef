"""The engine process's main loop: inbox -> role -> engine step -> outputs.

    supervisor ──────────┐                    ┌─ outputs: one message a gateway and step
    gateways, peers ─────┼─► inbox ─► turn ───┼─ changes of the cache, to the supervisor
    pulls ── completions ┘       tick, step   └─ numbers for the heartbeat

When idle, it waits for the inbox or the role's next deadline; when busy, it empties the inbox
between and during steps. Only its thread changes blocks, leases and tokens. Heartbeats have their
own thread, so that a long step does not look like a hang.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ...core.errors import BatonError, EngineFailed, Unavailable
from ...core.ports import Clock
from ...core.process.collector import collect_some
from ...engine.engine import Engine
from ...kv_transfer.protocol.events import PeerLinked, PeerLost, PeerMessage
from ...kv_transfer.protocol.messages import Refused
from ...proto.v1 import engine_pb2, node_pb2
from ..channels.engine_channels import EngineChannels
from ..channels.inbox import Inbox
from ..channels.links import ChannelItem, Kind, Link, LinkOver, Received
from ..channels.source_dialer import SourceDialer
from ..peers.peers import Peers
from ..requests.request_io import RequestIO
from ..requests.request_role import EngineRole
from .cache_report import CacheReport, Send
from .dispatch_gate import DispatchGate, Gated
from .heartbeat import EngineNumbers, HeartbeatSender
from .promise_orders import PromiseOrders

log = logging.getLogger(__name__)

LOOK_S = 0.0002  # interval at which a running step is polled for its end
WATCH_S = 0.00005  # the same while a pull waits

# From the supervisor, a completion of another thread, from the gate, from links.
Item: TypeAlias = engine_pb2.EngineInput | Callable[[], None] | Gated | ChannelItem


@dataclass(eq=False)
class EngineLoop:
    """Runs until a shutdown or until the engine has drained; raises if the engine fails."""

    _engine: Engine
    _role: EngineRole
    _peers: Peers
    _requests: RequestIO
    _cache_report: CacheReport
    _inbox: Inbox[Item]
    _send: Send
    _heartbeats: HeartbeatSender
    _numbers: EngineNumbers
    _clock: Clock
    _channels: EngineChannels
    _gate: DispatchGate
    _orders: PromiseOrders
    _dialer: SourceDialer
    _is_over: bool = False

    def run(self) -> None:
        """Raises EngineFailed if a step fails, ConnectionError if the supervisor is gone."""
        timeout_s = 0.0
        while not self._is_over:
            timeout_s = self.turn(timeout_s)

    def turn(self, timeout_s: float) -> float:
        """Wait for input at most `timeout_s`, handle all of it, run at most one step.

        Returns how long the next turn may wait; inf: until input arrives.
        """
        items = self._inbox.receive(timeout_s)
        self._heartbeats.turn_started()
        for item in items:
            self._handle(item)
        self._numbers.has_changed |= bool(items)
        deadline_s = self._role.tick()  # after the inbox: it may contain renewals
        self._peers.pulls.poll()
        has_work = self._engine.has_work and not self._is_over
        if has_work:
            self._requests.begin_step()
            output = self._engine.step(self._during_step)
            self._numbers.num_steps += 1
            self._role.after_step(output)
        self._flush()
        self._peers.pulls.poll()
        if self._requests.is_draining and self._role.is_idle() and not self._gate.num_waiting:
            self._is_over |= not self._channels.links.has_unsent
        deadline_s = min(deadline_s, self._numbers.recount())
        self._heartbeats.turn_ended()
        if has_work:
            return 0.0
        wait_s = max(0.0, deadline_s - self._clock.monotonic_s())
        return min(wait_s, WATCH_S) if self._peers.pulls.are_waiting else wait_s

    def _during_step(self) -> bool:
        """Handle input while a step runs on the device; returns whether there was any."""
        self._flush()  # queued messages need not wait for the end of the step
        self._engine.pool.evict_ahead()
        collect_some()
        items = self._inbox.receive(WATCH_S if self._peers.pulls.are_waiting else LOOK_S)
        for item in items:
            self._handle(item)
        self._peers.pulls.poll()
        if items:
            self._flush()
            self._numbers.has_changed = True
        if self._numbers.has_changed:
            self._numbers.recount()
        return bool(items)

    def _flush(self) -> None:
        """Outputs first."""
        self._requests.flush()
        self._cache_report.flush()

    def _handle(self, item: Item) -> None:
        """An exception ends only the request or peer that caused it."""
        try:
            match item:
                case Received(link, message):
                    if link.channel.is_closed:
                        pass
                    elif isinstance(message, node_pb2.GatewayMessage):
                        self._from_gateway(link.name, message)
                    elif isinstance(message, Refused):
                        self._end(link, message.error)
                    else:
                        self._peers.feeds[link.kind](PeerMessage(link.name, message))
                case Link():
                    self._add(item)
                case LinkOver(link, error):
                    self._end(link, error)
                case Gated(gateway):
                    dispatch = self._gate.released(item)
                    if item.is_read:
                        self._engine.unpark()
                    if dispatch is not None:
                        self._role.dispatch(gateway, dispatch)
                case engine_pb2.EngineInput():
                    self._from_supervisor(item)
                case _:
                    item()
        except EngineFailed:
            raise
        except Exception as error:
            self._handle_failure(item, error)

    def _from_supervisor(self, message: engine_pb2.EngineInput) -> None:
        match message.WhichOneof("body"):
            case "get_ledger":
                self._send(engine_pb2.EngineOutput(ledger=json.dumps(self.ledger())))
            case "members":
                self._dialer.list_members(message.members)
            case "drain":
                self._requests.is_draining = True
            case "shutdown":
                self._is_over = True
            case body:
                log.warning("the supervisor sent %s", body)

    def ledger(self) -> dict[str, object]:
        """Blocks, requests, transfers and links as JSON, for `baton fsck` and the tests."""
        parts = (self._engine.stats.ledger(), self._peers.ledger(), self._channels.links.ledger())
        return {"node": self._requests.node_name} | parts[0] | parts[1] | parts[2]

    # -- links -------------------------------------------------------------------------------------

    def _add(self, link: Link) -> None:
        """Add a new link, which replaces an older one of the same pair."""
        if (older := self._channels.links.add(link)) is not None:
            self._lost(older)
        if link.kind is not Kind.GATEWAY:
            self._peers.feeds[link.kind](PeerLinked(link.name, link.host, link.opens_late))

    def _end(self, link: Link, error: BatonError) -> None:
        if not link.channel.is_closed:
            log.info("the link with %s ended: %s", link, error.message)
            link.ended_by = error.message
            self._channels.links.remove(link)
            self._lost(link)

    def _lost(self, link: Link) -> None:
        self._dialer.link_over(link)
        if link.kind is Kind.GATEWAY:
            self._gate.gateway_lost(link.name)
            for key in self._requests.forget_gateway(link.name):
                self._role.end(key, None)
        else:
            self._peers.feeds[link.kind](PeerLost(link.name))

    def _from_gateway(self, gateway: str, message: node_pb2.GatewayMessage) -> None:
        match message.WhichOneof("body"):
            case "dispatch" if self._requests.is_draining:
                error = Unavailable(f"{self._requests.node_name} is draining")
                self._requests.refuse(gateway, message.dispatch, error)
            case "dispatch":
                dispatch = message.dispatch
                has_constraint = dispatch.sampling.WhichOneof("constraint") is not None
                may_wait = has_constraint or dispatch.HasField("adapter")
                if not may_wait or self._gate.admits(gateway, dispatch):
                    self._role.dispatch(gateway, dispatch)
            case "load_adapter":
                self._gate.load(gateway, message.load_adapter)
            case "cancel":
                self._role.end(_key(message.cancel), None)
            case "set_promise":
                self._orders.take(message.set_promise)
            case body:
                log.warning("a gateway sent %s", body)

    def _handle_failure(self, item: Item, error: Exception) -> None:
        """Fail the request that caused `error`, or end the link with the engine that did."""
        public = error if isinstance(error, BatonError) else BatonError("internal error")
        if (key := _key_of(item)) is not None:
            log.error("request %s failed", key, exc_info=error)
            self._role.end(key, public)
        elif isinstance(item, Received):
            log.error("message from %s failed", item.link, exc_info=error)
            if item.link.kind is Kind.GATEWAY:  # an order: its requests go on
                return
            self._channels.refuse(item.link, public)
            self._end(item.link, public)
        else:
            raise EngineFailed(f"{type(error).__name__}: {error}") from error


def _key(message: node_pb2.Dispatch | node_pb2.Cancel) -> str:
    """`core.request.request.Request.key` of the request in a gateway's message."""
    return f"{message.request_id}/{message.attempt}"


def _key_of(item: Item) -> str | None:
    message: object = getattr(item, "message", None)
    if isinstance(message, node_pb2.GatewayMessage) and (body := message.WhichOneof("body")):
        message = getattr(message, body)
    return _key(message) if isinstance(message, node_pb2.Dispatch | node_pb2.Cancel) else None
