"""How a client reaches a gateway: in plain text or over TLS, and with which credential."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from ..core.errors import InvalidRequest

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 15000),
    ("grpc.http2.ping_timeout_ms", 5000),
)


def target_of(address: str) -> str:
    """What gRPC dials: HOST:PORT, also behind grpc://, or a name as gRPC spells them.

    Raises InvalidRequest for what has no port, and for an HTTP address.
    """
    target = address.removeprefix("grpc://")
    if target.startswith(("http://", "https://")):
        raise InvalidRequest(f"{address} is HTTP: give the gRPC port, HOST:PORT", "address")
    host, _, port = target.rpartition(":")
    if "://" not in target and not target.startswith("unix:") and not (host and port.isdigit()):
        raise InvalidRequest(f"{address!r} is not HOST:PORT", "address")
    return target


def channel_credentials(*, tls: bool, ca_file: str | Path | None) -> Any | None:
    """Of a TLS channel, trusting the system's CAs or those in `ca_file`; None for plain text."""
    if not tls and ca_file is None:
        return None
    roots = None if ca_file is None else Path(ca_file).read_bytes()
    return grpc.ssl_channel_credentials(roots)  # type: ignore[no-untyped-call]


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries; raises InvalidRequest for what cannot be a key."""
    if api_key is None:
        return ()
    if not api_key.isascii() or not api_key.isprintable():
        raise InvalidRequest("an API key is printable ASCII", "api_key")
    return (("authorization", f"Bearer {api_key}"),)
