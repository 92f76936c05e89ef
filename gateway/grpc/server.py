"""The gateway's gRPC port: its services, its health, and what connections may cost."""

from __future__ import annotations

import logging

import grpc
from google.protobuf.runtime_version import VersionError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ...cluster.tls import CertificateFiles, bind
from ...core.config import GatewayConfig
from ...core.process import descriptors
from ...proto.v1 import inference_pb2, inference_pb2_grpc
from ..admission.front_door import FrontDoor
from ..engines.cluster_view import ClusterView
from ..engines.engine_table import EngineTable
from ..security.accepted_keys import AcceptedKeys
from .service import TypedErrors
from .unary_methods import InferenceService

log = logging.getLogger(__name__)

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_LAST_STATUS_S = 0.2
_MAX_METADATA_BYTES = 16 << 10
_SPARE_STREAMS = 128  # of a connection: for refused calls, and calls like Abort
_MAX_PENDING_CALLS = 16_000  # of all connections, not yet with a handler; many may be reset
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    (
        "grpc.absolute_max_metadata_size",
        _MAX_METADATA_BYTES,
    ),  # else refused at random above the other
    ("grpc.server_handshake_timeout_ms", 10000),  # a connection that sends nothing is closed
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 2),  # pings more frequent than below, while we send nothing
    ("grpc.http2.min_ping_interval_without_data_ms", 10000),
)


class GrpcServer:
    """Binds `port` at once; accepts no call before `start`."""

    def __init__(
        self,
        config: GatewayConfig,
        certificate: CertificateFiles | None,
        door: FrontDoor,
        keys: AcceptedKeys | None,
        table: EngineTable,
        view: ClusterView,
    ) -> None:
        """Raises StartupFailed if the port is taken or the host is not ours."""
        options = _options(config.max_num_requests, shares_port=config.reuse_port)
        self._server = grpc.aio.server(interceptors=[TypedErrors()], options=options)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._service = InferenceService(door, keys, table, view)
        self._names: tuple[str, ...] = (SERVICE_NAME,)
        self._door, self._keys, self._table = door, keys, table
        self.port = bind(
            self._server, config.host, config.grpc_port, certificate, flag="--grpc-port"
        )

    async def prepare(self) -> None:
        """Add the services: not ready yet."""
        server = self._server
        inference_pb2_grpc.add_InferenceServicer_to_server(self._service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)  # type: ignore[no-untyped-call]
        self._names = (SERVICE_NAME, *self._add_extra_services())
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)  # type: ignore[no-untyped-call]
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.show_ready(False)

    def _add_extra_services(self) -> tuple[str, ...]:
        """Add what can be added; their names."""
        try:
            from . import vllm_engine
        except ImportError:
            return ()
        except VersionError as error:
            log.warning("smg-grpc-proto is installed, but does not fit protobuf here: %s", error)
            return ()
        service = vllm_engine.VllmEngineService(self._door, self._keys, self._table)
        vllm_engine.add_to_server(service, self._server)
        return (vllm_engine.SERVICE_NAME,)

    async def start(self) -> None:
        await self._server.start()

    async def show_ready(self, is_ready: bool) -> None:
        """To those who watch the services' health."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)

    async def refuse(self) -> None:
        """From now on the health of all is NOT_SERVING."""
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        """Calls in flight have a moment for their last status."""
        await self._server.stop(_LAST_STATUS_S)


def _options(max_num_requests: int, *, shares_port: bool) -> tuple[tuple[str, int], ...]:
    """Of a connection's streams as many as there may be requests: a client's channel multiplexes
    all of its own, and a client's streams beyond wait unseen where a refusal would be an answer.
    What opens and resets more at once is refused by gRPC, before it costs a handler.
    """
    return (
        *_SERVER_OPTIONS,
        ("grpc.max_concurrent_streams", max_num_requests + _SPARE_STREAMS),
        ("grpc.max_allowed_incoming_connections", descriptors.for_grpc()),
        # Above the first gRPC cancels new calls at random: a flood of resets must not reach it.
        ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MAX_PENDING_CALLS),
        # By default a second server binds a taken port without an error.
        ("grpc.so_reuseport", int(shares_port)),
    )
