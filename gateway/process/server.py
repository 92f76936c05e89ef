"""The gateway process: builds all parts, listens, publishes its health, and shuts down in order.

`serve` returns a running Gateway (tests, embedding); `run` is the process around it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ...cluster.exposure import check_secret
from ...cluster.known_nodes import KnownNodes, fetch_members
from ...cluster.lease import RedisLease
from ...cluster.redis_client import RedisClient
from ...cluster.redis_directory import RedisDirectory
from ...cluster.secret import ClusterSecret
from ...cluster.tls import watch_ends
from ...core.config import ClusterConfig, GatewayConfig
from ...core.errors import StartupFailed, Unavailable
from ...core.membership import Role
from ...core.ports import Clock, Entropy
from ...core.process import descriptors
from ...core.process.collector import settle
from ...core.process.event_loop import StopSignals, keep_running, show_turns
from ...core.process.logs import print_line, set_up_logging
from ...core.version import version
from ...prefix_index.follower import Follower
from ...prefix_index.mirror import PrefixMirror
from ...prefix_index.redis_link import RedisIndexLink
from ..adapters.adapter_registry import AdapterRegistry
from ..adapters.shared_list import SharedList
from ..admission.front_door import FrontDoor
from ..admission.queue_limit import QueueLimit
from ..engines.cluster_view import ClusterView, why_not_ready
from ..engines.engine_table import EngineTable
from ..engines.routing_policies import make_policy
from ..grpc.server import GrpcServer
from ..http.app import HttpServer, build_app
from ..http.chat.chat_model import CHAT_MODEL
from ..http.protocol.access import Access
from ..http.protocol.app_state import AppState
from ..moves.mover import RequestMover
from ..promises.promise_decider import PromiseDecider
from ..promises.promise_leader import LEASE_S, PromiseLeader
from ..request.dispatch_queue import DispatchQueue
from ..request.session_table import SessionTable
from ..request.setbacks import SessionLimits
from ..security.security import Security
from ..telemetry.telemetry import Telemetry
from ..telemetry.window.redis_windows import RedisWindows
from ..telemetry.window.window_share import WindowShare
from ..validation.served_model import ServedModel
from .startup_message import startup_lines

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005  # for which a thread with a large body or text holds the GIL at most
_STOP_GRACE_S = 5.0
_LAST_OUTPUTS_S = 1.0


class Gateway:
    """A running gateway. `port`: of gRPC; `http_port`: of HTTP, once started."""

    def __init__(
        self,
        config: GatewayConfig,
        cluster: ClusterConfig,
        session_limits: SessionLimits | None = None,
    ) -> None:
        """`session_limits` None: from `config`. Raises StartupFailed."""
        clock = Clock()
        security = Security.of(config, cluster, clock)
        self._config = config
        self._model = ServedModel.load(config)
        secret = ClusterSecret.of(cluster)
        redis = RedisClient(cluster.redis_url, cluster.cluster, secret)
        calls = partial(fetch_members, secret, security.cluster_tls)
        self._directory = KnownNodes(RedisDirectory(redis), tuple(Role), calls, secret, clock)
        index = RedisIndexLink(redis)
        policy = make_policy(config.routing_policy, random.Random())
        self._table = EngineTable(PrefixMirror(clock), policy)
        self._follower = Follower(index, self._table.mirror)
        queue = DispatchQueue(self._table.released)
        self._sessions = SessionTable(clock, config.max_num_requests, queue)
        model = self._model.limits.model
        self._adapters = AdapterRegistry(
            self._table, model, config.lora_modules, SharedList(redis, model)
        )
        self._view = ClusterView(
            self._directory,
            model,
            secret,
            clock,
            self._table,
            self._sessions,
            self._note_readiness,
            config.heartbeat_timeout_s,
            self._adapters.linked,
            security.cluster_tls,
        )
        self._leader = None
        name = Entropy().new_id()
        if config.move_promises:
            lease = RedisLease(redis, "promises", name, LEASE_S, clock)
            decider = PromiseDecider(self._table, clock, config.slo_ttft_s, queue.num_tokens)
            self._leader = PromiseLeader(decider, lease, name)
        self._mover = RequestMover(self._table, self._sessions, clock)
        self._telemetry = Telemetry(
            config,
            model,
            self._table,
            self._view,
            clock,
            lambda: index.is_up,
            lambda: len(queue),
            security.certificate_ends_s,
        )
        store = RedisWindows(redis)
        self._share = WindowShare(self._telemetry.window, store, name, self._about, clock)
        self._certificates = security.certificates
        self._door = FrontDoor(
            self._model,
            self._sessions,
            self._table,
            security.tenancy,
            clock,
            Entropy(),
            session_limits or _session_limits(config),
            config.max_request_s,
            self._telemetry.feed,
            QueueLimit(self._table, queue, config.max_queue_s),
            self._adapters,
            keeps_prompts=config.log_prompts,
        )
        self._is_ready = asyncio.Event()
        self._readiness_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._grpc = GrpcServer(
            config, security.certificate, self._door, security.keys, self._table, self._view
        )
        self.host = config.host
        started_unix_s = clock.unix_ns() // 1_000_000_000
        parts = AppState(
            self._door,
            self._table,
            self._view,
            self._can_serve,
            config,
            started_unix_s,
            self._telemetry,
            self._share.scope,
        )
        app = build_app(parts, Access(security.keys, security.sessions, config))
        self._has_chat_template = app[CHAT_MODEL].template is not None
        own_port = config.own_http_port
        if own_port is None and config.reuse_port:
            own_port = 0
        self._http = HttpServer(
            app,
            config.host,
            config.http_port,
            security.certificate,
            shares_port=config.reuse_port,
            own_port=own_port,
        )

    @property
    def port(self) -> int:
        return self._grpc.port

    @property
    def http_port(self) -> int:
        return self._http.port

    @property
    def own_http_port(self) -> int | None:
        """A port that this gateway shares with no other; None: `http_port` is not shared."""
        return self._http.own_port

    def _can_serve(self) -> bool:
        return self._is_ready.is_set() and not self._door.is_draining

    def _about(self) -> dict[str, Any]:
        port = self.http_port if self.own_http_port is None else self.own_http_port
        return {
            "name": f"{socket.gethostname()}:{port}",
            "version": version(),
            "is_ready": self._can_serve(),
            "is_draining": self._door.is_draining,
        }

    async def start(self) -> None:
        """Begin to listen and to look for engines."""
        await self._grpc.prepare()
        await self._http.start()
        await self._grpc.start()
        beside: dict[str, Callable[[], Awaitable[None]]] = {
            "the view of the cluster": self._view.run,
            "the mirror of the prefix index": self._follower.run,
            "the list of LoRA adapters": self._load_adapters,
            "health": self._publish_readiness,
            "the watch over certificates": partial(watch_ends, self._certificates),
            "the window of all gateways": self._share.run,
        }
        if self._leader is not None:
            beside["the leader of promises"] = self._leader.run
        if self._config.move_requests:
            beside["the mover of requests"] = self._mover.run
        self._tasks = [asyncio.create_task(keep_running(*part)) for part in beside.items()]

    async def startup_lines(self) -> tuple[str, str]:
        """Wait, without limit, until a linked pair of engines can serve; the lines to print."""
        await self._is_ready.wait()
        return startup_lines(
            self._config,
            self._model.limits.model,
            http_port=self.http_port,
            grpc_port=self.port,
            own_http_port=self.own_http_port,
            has_chat_template=self._has_chat_template,
        )

    async def stop(
        self, grace_s: float = _STOP_GRACE_S, hurry: asyncio.Event | None = None
    ) -> None:
        """Refuse new requests, let those in flight end within `grace_s` or until `hurry`, and end
        the rest with an error to their callers."""
        self._door.is_draining = True
        await self._grpc.refuse()
        if not await self._becomes_idle(grace_s, hurry):
            log.warning("cut off: requests that have not ended (%d)", len(self._sessions))
            self._sessions.end_all(Unavailable("this gateway is shutting down"))
            await self._becomes_idle(_LAST_OUTPUTS_S)
        await asyncio.gather(self._grpc.stop(), self._http.stop())
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._leader is not None:
            await self._leader.close()
        await self._share.close()
        await self._view.close()
        await self._telemetry.close()
        await self._directory.close()
        self._model.close()

    async def _becomes_idle(self, timeout_s: float, hurry: asyncio.Event | None = None) -> bool:
        """Whether all requests ended before the timeout and before `hurry` was set."""
        idle = asyncio.create_task(self._sessions.is_idle.wait())
        hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
        done, pending = await asyncio.wait(
            {idle, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in pending:
            task.cancel()
        return idle in done

    async def _publish_readiness(self) -> None:
        """Publish every change of readiness to the watchers of the health service."""
        while True:
            await self._readiness_changed.wait()
            self._readiness_changed.clear()
            await self._grpc.show_ready(self._is_ready.is_set())

    async def _load_adapters(self) -> None:
        """Load the adapters of the command line, so that the gateway can become ready; then follow
        the list of all gateways."""
        await self._adapters.run()
        self._note_readiness()
        await self._adapters.share()

    def _note_readiness(self) -> None:
        reason = why_not_ready(self._table)
        is_ready = self._adapters.is_settled and not reason
        if is_ready == self._is_ready.is_set():
            return
        if is_ready:
            log.info("ready")
            self._is_ready.set()
        else:
            if not self._door.is_draining:
                log.warning("not ready: %s", reason)
            self._is_ready.clear()
        self._readiness_changed.set()


def _session_limits(config: GatewayConfig) -> SessionLimits:
    return SessionLimits(
        max_attempts=config.max_attempts,
        recovery_wait_s=config.recovery_wait_s,
        max_queue_s=math.inf if config.max_queue_s is None else config.max_queue_s,
    )


async def serve(
    config: GatewayConfig,
    cluster: ClusterConfig,
    *,
    session_limits: SessionLimits | None = None,
) -> Gateway:
    """Build and start a gateway; raises StartupFailed."""
    gateway = Gateway(config, cluster, session_limits)
    try:
        await gateway.start()
    except StartupFailed:
        await gateway.stop(grace_s=0)
        raise
    return gateway


async def run(config: GatewayConfig, cluster: ClusterConfig) -> int:
    """The process: serve until SIGINT or SIGTERM, then stop cleanly. Returns the exit code."""
    set_up_logging("gateway", as_json=config.log_json)
    check_secret("gateway", cluster)
    descriptors.raise_limit()
    signals = StopSignals()
    gateway = await serve(config, cluster)
    settle()
    sys.setswitchinterval(_SWITCH_S)
    ports = [port for port in (gateway.own_http_port, gateway.http_port) if port is not None]
    scheme = "https" if config.tls_cert else "http"
    http = " ".join(f"{scheme}://{gateway.host}:{port}" for port in ports)
    print(f"ready: gateway gateway {http} {gateway.host}:{gateway.port}", flush=True)
    starting = asyncio.create_task(_print_startup_message(gateway))
    turning = asyncio.create_task(show_turns())
    try:
        await signals.stop.wait()
        print_line("draining")
    finally:
        starting.cancel()
        turning.cancel()
        await gateway.stop(config.shutdown_timeout_s, signals.hurry)
    return 0


async def _print_startup_message(gateway: Gateway) -> None:
    """Print the startup message once the gateway can serve, maybe long after it listens."""
    print("waiting for nodes that can serve", flush=True)
    for line in await gateway.startup_lines():
        print(line, flush=True)
