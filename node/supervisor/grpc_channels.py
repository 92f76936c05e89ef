"""gRPC servers and channels as nodes use them: options, binding, and nothing about calls."""

from __future__ import annotations

import grpc

from ...cluster.tls import ClusterTls, open_channel
from ...core.channels.framing import MAX_RELAYED_BYTES
from ...core.errors import StartupFailed
from ...core.membership import Role
from ...core.process import descriptors

_MAX_METADATA_BYTES = 16 << 10
_BOTH_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_RELAYED_BYTES),
    ("grpc.max_send_message_length", MAX_RELAYED_BYTES),
    ("grpc.keepalive_time_ms", 400),
    ("grpc.keepalive_timeout_ms", 1000),
    (
        "grpc.http2.ping_timeout_ms",
        1000,
    ),  # without it a stopped peer costs 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_BOTH_OPTIONS,
    ("grpc.so_reuseport", 0),  # or a second node would share the port without an error
    # A peer has one long stream, and others for moments.
    ("grpc.max_concurrent_streams", 128),
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.server_handshake_timeout_ms", 10000),
    # Peers ping every second or two. What waited behind a pause may come at once; a flood does not
    # end there.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 20),
)
_CLIENT_OPTIONS = (
    *_BOTH_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # our back-off, not one shared with earlier channels
    ("grpc.enable_http_proxy", 0),
)


def make_server(host: str, port: int, tls: ClusterTls | None = None) -> tuple[grpc.aio.Server, int]:
    """A server bound to host:port, not yet started, and its port. Raises StartupFailed."""
    most = ("grpc.max_allowed_incoming_connections", descriptors.for_grpc())
    server = grpc.aio.server(options=(*_SERVER_OPTIONS, most))
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


def open_node_channel(address: str, tls: ClusterTls | None, role: Role) -> grpc.aio.Channel:
    """A channel to a node of `role`. It connects lazily; a silent peer is noticed within 1.4 s."""
    return open_channel(address, tls, role.value, _CLIENT_OPTIONS)
