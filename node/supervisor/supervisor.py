"""A node: its gRPC server, its engines, their entries in the directory, and its shutdown.

    listen ─► start engines ─► announce ─► "ready: ..." ─► serve until a signal ─► drain ─► stop

`run` is called by launch_prefill and launch_decode. Never imports torch: the model is in the engine
processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import grpc
import msgspec
from grpc_health.v1 import health_pb2_grpc

from ...cluster.exposure import check_exposure, check_secret
from ...cluster.known_nodes import KnownNodes, fetch_members
from ...cluster.redis_client import RedisClient
from ...cluster.redis_directory import RedisDirectory
from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls, watch_ends
from ...core.channels.addresses import addresses_of, engine_addresses_of
from ...core.config import ClusterConfig, NodeConfig
from ...core.engine_config import EngineConfig
from ...core.errors import StartupFailed
from ...core.membership import Directory, Member, Role
from ...core.model_dir import resolve_model_dir
from ...core.ports import Clock
from ...core.process import descriptors
from ...core.process.event_loop import StopSignals, keep_running, show_turns
from ...core.process.logs import print_line, set_up_logging
from ...prefix_index.publisher import Publisher
from ...prefix_index.redis_link import RedisIndexLink
from ...proto import codec
from ...proto.v1 import engine_pb2, node_pb2_grpc
from .engine_handle import KILLED_S, EngineCommand, EngineHandle, EngineSlot
from .placement import engine_configs, engine_environment, engine_tls
from .rpc import NodeHealth, NodeServicer, make_server

ENTRY_TTL_S = 6.0
DRAIN_S = 20.0  # how long running requests may take after SIGTERM
GRACE_S = 2.0  # how long an engine may take to shut down
_LOOK_S = 0.25  # interval at which Redis is checked to be reachable


async def run(role: Role, engine: EngineConfig, node: NodeConfig, cluster: ClusterConfig) -> int:
    """Serve until SIGTERM (drains first) or SIGINT (does not); returns the exit code.

    Raises StartupFailed if the node cannot start, after all its parts have ended.
    """
    signals = StopSignals(
        sigint_hurries=True
    )  # first: asyncio's own Ctrl-C handler would cancel a starting server
    set_up_logging(f"{node.name or role.value} supervisor", as_json=node.log_json)
    descriptors.raise_limit()
    resolve_model_dir(engine.model)  # a wrong path is reported before an engine process is started
    tls = ClusterTls.of(cluster)
    missing = () if tls else ("--cluster-ca", "--cluster-cert", "--cluster-key")
    for host in {node.host, engine.master_addr or node.host}:
        check_exposure(f"{role.value} node", host, missing, is_accepted=node.insecure_bind)
    check_secret(f"{role.value} node", cluster)
    server, port = _listen(node, tls)
    node = dataclasses.replace(node, port=port, name=node.name or f"{role.value}-{port}")
    secret = ClusterSecret.of(cluster)
    redis = RedisClient(cluster.redis_url, cluster.cluster, secret)
    sought = (Role.PREFILL,) if role is Role.DECODE else ()  # pullers dial, sources are dialled
    directory = KnownNodes(
        RedisDirectory(redis), sought, partial(fetch_members, secret, tls), secret, Clock()
    )
    supervisor = Supervisor(role, engine, node, secret, directory, RedisIndexLink(redis), tls)
    try:
        await supervisor.serve(server, signals)
    finally:
        await directory.close()
    return 0


def _listen(node: NodeConfig, tls: ClusterTls | None) -> tuple[grpc.aio.Server, int]:
    """A server at --port, or at a free port if it is taken: the directory contains the port."""
    try:
        return make_server(node.host, node.port, tls)
    except StartupFailed as error:
        if node.port == 0 or node.advertise is not None:
            raise
        server, port = make_server(node.host, 0, tls)
        print_line(f"{error.message}; listening on port {port} instead")
        return server, port


@dataclass(eq=False)
class Supervisor:
    """One node. It processes no requests: it relays messages, and watches and restarts engines."""

    _role: Role
    engine: InitVar[EngineConfig]
    _node: NodeConfig
    _secret: ClusterSecret
    _directory: Directory
    _index: RedisIndexLink
    _tls: ClusterTls | None = None
    _members: engine_pb2.Members = field(default_factory=engine_pb2.Members)  # as last sent to all
    _is_draining: bool = False

    def __post_init__(self, engine: EngineConfig) -> None:
        self._addresses = addresses_of(self._node)
        self._address = self._addresses[0]
        self._health = NodeHealth(self._is_ready, self._node.heartbeat_s)
        configs = engine_configs(engine, self._node)
        self._slots = [
            self._make_slot(config, None if len(configs) == 1 else index)
            for index, config in enumerate(configs)
        ]

    def engines(self) -> Sequence[EngineHandle]:
        """The engines that are alive now."""
        engines = [slot.engine for slot in self._slots]
        return [engine for engine in engines if engine is not None and not engine.is_over]

    def members(self) -> Sequence[Member]:
        """The entries of this node for the directory: none while it drains."""
        return [] if self._is_draining else [self._member(each) for each in self.engines()]

    def _is_ready(self) -> bool:
        return not self._is_draining and all(slot.is_ready for slot in self._slots)

    def _make_slot(self, engine: EngineConfig, index: int | None) -> EngineSlot:
        """`index` distinguishes several engines of a node."""
        name = f"{self._node.name}" if index is None else f"{self._node.name}.{index}"
        node = _node_of_engine(self._node, name, index or 0)
        secret = self._secret
        settings = {
            "engine": engine,
            "node": node,
            "tls": None if self._tls is None else engine_tls(self._tls),
            "keys": {"dialing": secret.dialing_key, "accepted": secret.keys_by_id()},
        }
        command = EngineCommand(
            module=f"baton.{self._role.value}_node.engine_main",
            configuration=msgspec.json.encode(settings).decode(),
            environment=engine_environment(engine),
            node=node,
            device="" if engine.device == "auto" else engine.device,
        )

        def report(line: str) -> None:
            print_line(line if index is None else f"[{index}] {line}")

        on_change = self._health.changed.set
        return EngineSlot(command, report, on_change, self._presence, Clock())

    async def _pass_members_on(self) -> None:
        """Send engines the directory's list: which engines to dial, and which may dial them."""
        watch = self._directory.watch()
        coming = asyncio.ensure_future(anext(watch))
        listed: tuple[Member, ...] = ()
        try:
            while True:
                await asyncio.wait({coming}, timeout=_LOOK_S)
                if coming.done():
                    listed, coming = coming.result(), asyncio.ensure_future(anext(watch))
                self._pass_on(listed)
        finally:
            coming.cancel()

    def _pass_on(self, listed: Sequence[Member]) -> None:
        members = engine_pb2.Members(
            engines=map(_listed_engine, listed), is_away=self._directory.is_away
        )
        if members != self._members:
            self._members = members
            for engine in self.engines():
                engine.send(engine_pb2.EngineInput(members=members))

    async def serve(self, server: grpc.aio.Server, signals: StopSignals) -> None:
        """Run the node until a stop signal. Raises StartupFailed, and what a slot's task raised."""
        parts = (self.engines, self.members, self._secret, self._addresses)
        servicer = NodeServicer(*parts, has_tls=self._tls is not None)
        node_pb2_grpc.add_NodeServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(  # type: ignore[no-untyped-call]
            self._health.servicer, server
        )
        await server.start()
        files = () if self._tls is None else (self._tls.files,)
        beside = (
            keep_running("health", self._health.run),
            keep_running("the watch over the directory", self._pass_members_on),
            keep_running("the watch over certificates", partial(watch_ends, files)),
        )
        looking = asyncio.gather(*beside, show_turns())
        stopping = asyncio.create_task(signals.stop.wait())
        running: list[asyncio.Task[None]] = []
        try:
            if await self._start_engines(stopping):
                running = [asyncio.create_task(slot.run()) for slot in self._slots]
                print_line(f"ready: {self._role.value} {self._node.name} {self._address}")
                await _first_done(stopping, *running)
                await self._drain(signals.hurry, running)
        finally:
            await self._stop_engines(running)
            looking.cancel()
            stopping.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await server.stop(None)

    async def _start_engines(self, stopping: asyncio.Task[bool]) -> bool:
        """Start all at once; False if a stop signal arrives first. Raises StartupFailed."""
        starting = [asyncio.create_task(slot.start()) for slot in self._slots]
        all_started = asyncio.gather(*starting)
        try:
            await _first_done(all_started, stopping)
            if all_started.done():
                all_started.result()
            return all_started.done()
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, all_started, return_exceptions=True)

    async def _drain(self, hurry: asyncio.Event, running: list[asyncio.Task[None]]) -> None:
        """Accept no new requests and let running ones finish, for DRAIN_S or until `hurry`."""
        self._is_draining = True
        self._health.changed.set()
        if hurry.is_set():
            return
        print_line("draining")
        leaves = (self._directory.withdraw(engine.incarnation) for engine in self.engines())
        leaving = asyncio.gather(*leaves)
        for slot, task in zip(self._slots, running, strict=True):
            slot.drain(task)
        hurrying = asyncio.create_task(hurry.wait())
        drained = asyncio.gather(leaving, *running, return_exceptions=True)
        await _first_done(drained, hurrying, timeout_s=DRAIN_S)
        hurrying.cancel()
        leaving.cancel()

    async def _stop_engines(self, running: list[asyncio.Task[None]]) -> None:
        """End the remaining engines; raises what a slot's task raised."""
        if not running:  # the node did not start, but some of its engines may have
            for engine in self.engines():
                engine.kill()
            ended = asyncio.gather(*(engine.run() for engine in self.engines()))
            with suppress(TimeoutError):
                await asyncio.wait_for(ended, KILLED_S)
            return
        stops = (s.stop(task, GRACE_S) for s, task in zip(self._slots, running, strict=True))
        await asyncio.gather(*stops)

    @asynccontextmanager
    async def _presence(self, engine: EngineHandle) -> AsyncIterator[None]:
        """While it is alive, an engine is in the directory, and its cache in the prefix index."""
        publisher = Publisher(engine.cache_journal, self._index, Clock())
        publishing = asyncio.create_task(keep_running("the prefix index", publisher.run))
        engine.send(engine_pb2.EngineInput(members=self._members))
        await self._directory.announce(self._member(engine), ENTRY_TTL_S)
        try:
            yield
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            await self._directory.withdraw(engine.incarnation)

    def _member(self, engine: EngineHandle) -> Member:
        ready, node = engine.ready, engine.command.node
        fields = codec.same_fields(ready.welcome, Member) | {
            "role": self._role,
            "address": self._address,
            "engine_address": engine_addresses_of(node, ready.port)[0],
            "host_id": ready.host_id.hex(),
            "device": engine.command.device,
        }
        return Member(**fields)


async def _first_done(*waits: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _node_of_engine(node: NodeConfig, name: str, index: int) -> NodeConfig:
    """The node's configuration for its engine `index`: several engines have a port each."""
    node = dataclasses.replace(node, name=name)
    if index and node.engine_port:
        node = dataclasses.replace(node, engine_port=node.engine_port + index)
    if index and node.advertise_engine:
        first = [address.rpartition(":") for address in node.advertise_engine.split(",")]
        shifted = [f"{host}:{int(port) + index}" for host, _, port in first]
        node = dataclasses.replace(node, advertise_engine=",".join(shifted))
    return node


def _listed_engine(member: Member) -> engine_pb2.ListedEngine:
    fields = codec.same_fields(member, engine_pb2.ListedEngine) | {
        "role": member.role.value,
        "address": member.engine_address,
        "host_id": bytes.fromhex(member.host_id),
    }
    return engine_pb2.ListedEngine(**fields)
