"""The gateway process: builds all parts, listens, tells its health, and stops in order.

`serve` gives a running Gateway (tests, embedding); `run` is the process around it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ..cluster.redis_directory import RedisDirectory
from ..core.config import ClusterConfig, GatewayConfig
from ..core.errors import StartupFailed, Unavailable
from ..core.ports import Clock, Directory, Entropy, SystemClock, SystemEntropy
from ..prefix_index.follower import Follower
from ..prefix_index.mirror import PrefixMirror
from ..prefix_index.redis_link import RedisIndexLink
from ..proto.v1 import inference_pb2, inference_pb2_grpc
from .cluster_view import ClusterView
from .engine_link import Avoid, EngineOutput
from .engine_table import EngineTable
from .served_model import ServedModel
from .service import InferenceService
from .session import SessionLimits
from .sessions import SessionTable

log = logging.getLogger(__name__)

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

_STOP_GRACE_S = 5.0
_LAST_STATUS_S = 0.2

_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # else a second server binds a taken port without an error
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10000),
)


class Gateway:
    """A running gateway. `port` is where it listens."""

    def __init__(
        self,
        config: GatewayConfig,
        cluster: ClusterConfig,
        directory: Directory,
        index: RedisIndexLink,
        clock: Clock,
        entropy: Entropy,
        session_limits: SessionLimits,
    ) -> None:
        self._model = ServedModel.load(config)
        self._directory = directory
        self._index = index
        self._table = EngineTable(PrefixMirror(clock))
        self._follower = Follower(index, self._table.mirror)
        self._sessions = SessionTable(clock, config.max_num_requests)
        self._view = ClusterView(
            directory,
            self._model.limits.model,
            cluster.cluster_secret,
            clock,
            self._table,
            self,
            config.heartbeat_timeout_s,
        )
        self._service = InferenceService(
            self._model,
            self._sessions,
            self._table,
            self._view,
            clock,
            entropy,
            session_limits,
            config.max_request_s,
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._is_ready = asyncio.Event()
        self._readiness_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self.host = config.host
        self.port = _bind(self._server, config.host, config.grpc_port)

    async def start(self) -> None:
        """Begin to listen and to look for engines."""
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)  # type: ignore[no-untyped-call]
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)  # type: ignore[no-untyped-call]
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        self._tasks = [
            asyncio.create_task(self._view.run()),
            asyncio.create_task(self._follower.run()),
            asyncio.create_task(self._publish_readiness()),
        ]

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until a linked pair of engines can serve; raises Unavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_ready.wait()
        except TimeoutError:
            # Raises, naming what is missing, unless it came this very moment.
            self._table.choose(1, avoid=Avoid(), fingerprint=None)

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> None:
        """Refuse new requests, let those in flight end within `grace_s`, cancel the rest."""
        self._service.is_draining = True
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace_s):
                await self._sessions.wait_idle()
        except TimeoutError:
            log.warning("%d requests are cut off", len(self._sessions))
        await self._server.stop(_LAST_STATUS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._view.close()
        await self._directory.close()
        await self._index.close()
        self._model.tokenizer.close()

    async def run_until(self, stop: asyncio.Event) -> None:
        """Wait for `stop`; raises at once if a part of ours broke, since then we serve nobody."""
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait({stopping, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done:
            task.result()

    async def _publish_readiness(self) -> None:
        """Tell every change of readiness to who watches our health."""
        while True:
            await self._readiness_changed.wait()
            self._readiness_changed.clear()
            is_ready = self._is_ready.is_set()
            log.info("ready" if is_ready else "not ready")
            status = health_pb2.HealthCheckResponse
            await self._health.set(SERVICE_NAME, status.SERVING if is_ready else status.NOT_SERVING)

    # --- cluster_view.EngineEvents ----------------------------------------------------------------

    def engine_outputs(self, incarnation: str, outputs: Sequence[EngineOutput]) -> None:
        self._sessions.engine_outputs(incarnation, outputs)

    def engine_lost(self, incarnation: str, *, has_died: bool) -> None:
        self._sessions.engine_lost(incarnation, has_died=has_died)

    def cluster_changed(self) -> None:
        try:
            self._table.choose(1, avoid=Avoid(), fingerprint=None)
            is_ready = True
        except Unavailable:
            is_ready = False
        if is_ready != self._is_ready.is_set():
            self._is_ready.set() if is_ready else self._is_ready.clear()
            self._readiness_changed.set()
        self._sessions.cluster_changed()


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """The port that was bound; raises StartupFailed if it is taken or the host is not ours."""
    try:
        return int(server.add_insecure_port(f"{host}:{port}"))
    except RuntimeError as error:
        raise StartupFailed(
            f"the gateway cannot listen on {host}:{port}",
            hint="the port is taken or the address is not this host's: another --grpc-port "
            "(0 takes a free one) or --host",
        ) from error


async def serve(
    config: GatewayConfig,
    cluster: ClusterConfig,
    *,
    session_limits: SessionLimits | None = None,
) -> Gateway:
    """Build and start a gateway; raises StartupFailed."""
    directory = RedisDirectory(cluster.redis_url, cluster.cluster, cluster.cluster_secret)
    index = RedisIndexLink(cluster.redis_url, cluster.cluster)
    limits = session_limits or SessionLimits(
        max_attempts=config.max_attempts, recovery_wait_s=config.recovery_wait_s
    )
    clock, entropy = SystemClock(), SystemEntropy()
    try:
        gateway = Gateway(config, cluster, directory, index, clock, entropy, limits)
    except StartupFailed:
        await directory.close()
        await index.close()
        raise
    await gateway.start()
    return gateway


async def run(config: GatewayConfig, cluster: ClusterConfig) -> int:
    """The process: serve until SIGINT or SIGTERM, then stop cleanly. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gateway = await serve(config, cluster)
    print(f"ready: gateway gateway {gateway.host}:{gateway.port}", flush=True)
    try:
        await gateway.run_until(stop)
    finally:
        await gateway.stop()
    return 0
