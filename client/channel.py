"""A client's connection to a gateway: address, channel, API key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from ..core.errors import InvalidRequest

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # one connection a client: gateways may share a port
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 15000),
    ("grpc.http2.ping_timeout_ms", 5000),
)

_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "vsock", "xds"})  # of gRPC's name resolvers


def target_of(address: str) -> str:
    """The target for gRPC: HOST:PORT, also after grpc://, or a name in gRPC's syntax.

    Raises InvalidRequest for an address without a port, and for an HTTP address.
    """
    if not isinstance(address, str):
        raise InvalidRequest(f"{address!r} is not HOST:PORT", "address")
    target = address.removeprefix("grpc://")
    scheme, separator, _ = target.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        raise InvalidRequest(f"{address} is HTTP: give the gRPC port, HOST:PORT", "address")
    host, _, port = target.rpartition(":")
    is_name = scheme in _SCHEMES if separator else target.startswith("unix:")
    is_number = port.isdecimal() and port.isascii() and len(port) <= 5
    # gRPC dials a port beyond 65535 modulo 65536.
    if not is_name and (separator or not (host and is_number and int(port) < 1 << 16)):
        raise InvalidRequest(f"{address!r} is not HOST:PORT", "address")
    return target


def open_channel(driver: Any, address: str, *, tls: bool, ca_file: str | Path | None) -> Any:
    """A channel of `driver`, grpc or grpc.aio; arguments: see Client. Raises InvalidRequest for a
    bad address or a `ca_file` without a certificate, and OSError."""
    target = target_of(address)
    if not tls and ca_file is None:
        return driver.insecure_channel(target, _CHANNEL_OPTIONS)
    roots = None if ca_file is None else Path(ca_file).read_bytes()
    if roots is not None and b"-----BEGIN " not in roots:
        raise InvalidRequest(f"{ca_file} has no certificate in PEM", "ca_file")
    credentials = grpc.ssl_channel_credentials(roots)  # type: ignore[no-untyped-call]
    return driver.secure_channel(target, credentials, _CHANNEL_OPTIONS)


def metadata_of(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of each call. Raises InvalidRequest for an invalid key."""
    if api_key is None:
        return ()
    if not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
        raise InvalidRequest("an API key is printable ASCII", "api_key")
    return (("authorization", f"Bearer {api_key}"),)
