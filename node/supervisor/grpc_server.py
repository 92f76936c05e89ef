"""The node's gRPC server as such: its options, its address, and its health as gRPC's health service
has it: ready if every engine progresses.

A death is reported at once; silence is found by looking. Knows no engine and no call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from ...cluster.tls import ClusterTls
from ...core.errors import StartupFailed
from ...core.process import descriptors

SERVICES = ("", "baton.v1.Node")
_MAX_METADATA_BYTES = 16 << 10
_OPTIONS = (
    ("grpc.keepalive_time_ms", 400),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),  # without it a stopped peer costs 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.so_reuseport", 0),  # or a second node would share the port without an error
    ("grpc.max_concurrent_streams", 128),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.server_handshake_timeout_ms", 10000),
    # Clients may ping every second or two, and late pings come at once; a flood ends a connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 20),
)


def make_server(host: str, port: int, tls: ClusterTls | None = None) -> tuple[grpc.aio.Server, int]:
    """A server bound to host:port, not yet started, and its port. Raises StartupFailed."""
    most = ("grpc.max_allowed_incoming_connections", descriptors.for_grpc())
    server = grpc.aio.server(options=(*_OPTIONS, most))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.server_credentials())
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise StartupFailed(
            f"cannot listen on {host}:{port}: the port is taken or the address is not ours",
            hint="give another --port, or 0 for a free one",
        )
    return server, bound


class NodeHealth:
    """Keeps `servicer` up to date with `is_ready`."""

    def __init__(self, is_ready: Callable[[], bool], look_s: float) -> None:
        self.servicer = health_aio.HealthServicer()
        self.changed = asyncio.Event()  # look now
        self._is_ready = is_ready
        self._look_s = look_s

    async def run(self) -> None:
        """Until cancelled."""
        reported: bool | None = None
        while True:
            is_ready = self._is_ready()
            if is_ready != reported:
                reported = is_ready
                await self._report(is_ready)
            try:
                async with asyncio.timeout(self._look_s):
                    await self.changed.wait()
            except TimeoutError:
                continue
            self.changed.clear()

    async def _report(self, is_ready: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        for service in SERVICES:
            await self.servicer.set(service, answer.SERVING if is_ready else answer.NOT_SERVING)
