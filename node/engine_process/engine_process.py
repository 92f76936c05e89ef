"""The engine process: loads the model and runs the loop. It never outlives its supervisor.

    configure ─► model, KV pool, generations ─► exporter ─► role ─► listen, ready ─► loop ─► end

`main` is called by `python -m baton.prefill_node.engine_main FD` and its decode counterpart, each
with its role. Failures are reported in a `failed` frame, as text for people, and to gateways.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable
from functools import partial

from google.protobuf.message import DecodeError

from ...core.channels.addresses import host_id
from ...core.channels.channel import FrameSocket
from ...core.channels.frames import BrokenStream
from ...core.errors import BatonError, EngineFailed, StartupFailed
from ...core.membership import Role as RoleName
from ...core.ports import Clock, Entropy
from ...core.process.children import end_waits_on_time
from ...core.process.collector import settle
from ...core.process.logs import set_up_logging
from ...engine.assembly import Assembly, grammars_of
from ...engine.execution.runner import ModelRunner
from ...engine.first_steps import BUDGET_S
from ...engine.hosts.head import ClusterTrust
from ...engine.kv.generations import SharedGenerations
from ...engine.parallel.rank_processes import Ranks, start_ranks
from ...kv_transfer.device_transports import transports, wrapping
from ...kv_transfer.protocol.messages import Hello
from ...kv_transfer.protocol.puller import Puller
from ...kv_transfer.protocol.source import Source
from ...kv_transfer.ranks.mirrored_generations import generations_of
from ...kv_transfer.ranks.ranked import WindowOpener
from ...proto import codec
from ...proto.v1 import engine_pb2, node_pb2
from ..channels.inbox import Inbox
from ..peers.peers import Peers
from ..peers.prefixes import Prefixes
from ..peers.windows import Windows
from ..requests.request_io import RequestIO
from .cache_report import CacheReport
from .dispatch_gate import DispatchGate
from .engine_links import EngineLinks
from .engine_loop import EngineLoop, Item
from .heartbeat import EngineNumbers, HeartbeatSender
from .pools import exported, pool_parts
from .promise_orders import PromiseOrders
from .role_plan import RolePlan
from .startup_messages import (
    LoadReport,
    Settings,
    describe_pool,
    limits_of,
    read_settings,
    welcome_of,
)

log = logging.getLogger(__name__)

LINK_WAIT_S = 5.0  # how long a pull intent waits for its link to be set up
_SWITCH_S = 0.0005
_FOLLOWER_MODULE = "baton.node.engine_process.rank_process"


def main(plan: RolePlan) -> int:
    """Run until the supervisor orders a shutdown or is gone; returns the exit code."""
    end_waits_on_time()
    # A pull's thread needs the interpreter for some microseconds, many times per copy; by default
    # the loop's thread would keep it for 5 ms each time.
    sys.setswitchinterval(_SWITCH_S)
    for number in (signal.SIGINT, signal.SIGTERM):  # left to the supervisor, which ends us
        signal.signal(number, signal.SIG_IGN)
    set_up_logging(plan.name.value, as_json=False)  # until the configuration has arrived
    frames = FrameSocket(socket.socket(fileno=int(sys.argv[1])))
    try:
        _run(plan, frames)
    except ConnectionError as error:
        log.warning("the connection to the supervisor ended: %s", error)
    except Exception as error:  # reported, whatever ends the process
        if not isinstance(error, StartupFailed):
            log.exception("the engine process ends")
        _report_failure(frames, error)
        return 1
    finally:
        frames.end()  # at once, not after the interpreter's own shutdown
    return 0


def _run(plan: RolePlan, frames: FrameSocket) -> None:
    """Start the other ranks, if any, and serve. Raises the error that ends the process."""
    settings = read_settings(frames)
    set_up_logging(settings.node.name or plan.name.value, as_json=settings.node.log_json)
    engine_config = plan.adjust(settings.engine)
    report = LoadReport(frames)
    links: list[EngineLinks] = []  # one item, once the engine listens

    def lost(error: BatonError) -> None:
        _report_failure(frames, error)
        for each in links:
            each.end(error)
        frames.end()
        os._exit(1)  # the loop's thread may wait for a device that never completes

    trust = ClusterTrust(plan.name.value, settings.engine, settings.keys.accepted, settings.tls)
    ranks = start_ranks(engine_config, _FOLLOWER_MODULE, lost, report.line, trust)
    try:
        _serve(plan, frames, ranks, settings, report, links)
    except BaseException as error:  # kill: ranks within a step do not notice a close
        ranks.explain(error)  # `lost` reports it, and ends the process
        ranks.kill()
        raise
    ranks.close()


def _serve(
    plan: RolePlan,
    frames: FrameSocket,
    ranks: Ranks,
    settings: Settings,
    report: LoadReport,
    all_links: list[EngineLinks],
) -> None:
    """Load the model, announce the engine, run the loop. Raises the error that ends the process."""
    inbox: Inbox[Item] = Inbox()
    engine_config, node_config, tls = ranks.config, settings.node, settings.tls
    runner = ModelRunner(engine_config, report.on_progress, ranks.communicator)
    for note in runner.startup_notes:
        report.line(note)
    clock, incarnation = Clock(), Entropy().new_id()
    generations = SharedGenerations(runner.kv.num_blocks, incarnation)
    if plan.name is RoleName.PREFILL:  # chunks are announced to pullers at their launch
        runner.count_steps(generations)
    parts = pool_parts(
        runner, engine_config.tensor_parallel_size, incarnation, Entropy(), ranks.hosts
    )
    offered = contextlib.ExitStack()
    access = offered.enter_context(
        exported(runner, ranks.followers, generations.fd, parts, node_config, tls)
    )
    limits = limits_of(plan, engine_config, node_config, runner)
    grammars = grammars_of(runner)
    welcome = welcome_of(plan, engine_config, node_config, runner, limits, incarnation)
    welcome.can_constrain = grammars.refusal is None
    links = EngineLinks(inbox, welcome, node_config, settings.keys, tls)
    all_links.append(links)

    def has_room() -> bool:
        """If there is none, the loop is woken as soon as there is."""
        found = frames.has_room()
        inbox.watch_writes(frames, not found)
        return found

    cache_report = CacheReport(frames.send, has_room)
    mirrored = generations_of(generations, ranks.followers)
    assembly = Assembly(
        engine_config, runner, ranks.followers, limits, mirrored, grammars, cache_report
    )
    engine = assembly.engine
    engine.stats.count_experts = runner.expert_tokens
    if engine_config.enable_expert_parallel:
        engine.stats.num_expert_ranks = engine_config.tensor_parallel_size
    report.line(describe_pool(limits))
    if runner.runs_ahead:
        took_s = engine.measure_first_steps(BUDGET_S)
        runner.forget_expert_tokens()
        report.line(f"first steps measured in {took_s:.1f} s")
    assembly.begin()  # not before: it would slow the measured steps down
    offered.callback(assembly.close)
    name = node_config.name or plan.name.value
    vocab_size = runner.model_config.vocab_size
    requests = RequestIO(links.channels.to_gateway, clock, name, vocab_size)
    hello = Hello(incarnation, runner.fingerprint)
    mine = transports(runner.kv, node_config, tls, is_spread=any(ranks.hosts))
    opener = WindowOpener(mine, parts, ranks.followers, host_id(), wrapping(tls))
    puller = Puller(hello, clock, LINK_WAIT_S)
    make_prefixes = partial(
        Prefixes,
        engine,
        puller,
        clock,
        Entropy(),
        incarnation=incarnation,
        lease_s=node_config.lease_s,
    )
    peers = Peers(
        Source(hello, clock, node_config.lease_s, access),
        puller,
        partial(Windows, opener.open, inbox.put),
        links.channels,
        requests.flush,
        make_prefixes,
        clock,
    )
    role = plan.build(engine, requests, peers, clock)
    inbox.watch(frames, lambda: _read(frames))
    links.start()
    frames.send(engine_pb2.EngineOutput(ready=links.ready(welcome)))

    def beat(numbers: node_pb2.Heartbeat) -> None:
        links.channels.links.heartbeat(numbers)
        if frames.has_room():  # else the supervisor does not read: gateways must not wait for it
            frames.send(engine_pb2.EngineOutput(heartbeat=numbers))

    heartbeats = HeartbeatSender(beat, node_config.heartbeat_s, clock)
    heartbeats.start()
    gate = DispatchGate(
        grammars, engine.adapters, assembly.adapters, role.end, inbox.put, links.channels.to_gateway
    )
    orders = PromiseOrders(engine.promise)
    numbers = EngineNumbers(engine, role, peers, requests, orders, gate, heartbeats, clock)
    gc.enable()  # it was off for the start
    settle(collects_some=True)
    loop = EngineLoop(
        engine,
        role,
        peers,
        requests,
        cache_report,
        inbox,
        frames.send,
        heartbeats,
        numbers,
        clock,
        links.channels,
        gate,
        orders,
        links.dialer,
    )
    try:
        loop.run()
    except Exception as error:
        links.channels.links.end(_public(error))
        raise
    finally:
        gate.close()
        heartbeats.stop()
        links.close()
        offered.close()


def _read(frames: FrameSocket) -> Iterable[Item]:
    """All messages that the supervisor has sent, in order; if it is gone, a shutdown follows."""
    items: list[Item] = []
    try:
        payloads, is_over = frames.receive_ready()
        items += map(engine_pb2.EngineInput.FromString, payloads)
    except (BrokenStream, DecodeError) as error:
        log.error("the supervisor sent an invalid message: %s", error)
        is_over = True
    return [*items, engine_pb2.EngineInput(shutdown=True)] if is_over else items


def _report_failure(frames: FrameSocket, error: Exception) -> None:
    """Report to the supervisor; a hint is sent as the message's second line."""
    public = _public(error)
    if isinstance(error, StartupFailed):
        public = StartupFailed(f"{error.message}\n{error.hint}")
    with contextlib.suppress(OSError):
        frames.send(engine_pb2.EngineOutput(failed=codec.error_to_wire(public)))


def _public(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    return EngineFailed(f"{type(error).__name__}: {error}")
