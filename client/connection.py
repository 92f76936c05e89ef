"""How a client reaches a gateway, in plain text or over TLS, and with which credential: what the
blocking client and the asyncio client have in common."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import grpc

from ..core.errors import InvalidRequest
from ..proto.v1 import inference_pb2_grpc
from .messages import Collector, GenerateParams, build_request

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


class RunningStream:
    """One running request."""

    def __init__(self, call: Any, collector: Collector) -> None:
        self._call = call
        self._collector = collector

    @property
    def id(self) -> str:
        """The gateway's id; empty before the first chunk."""
        return self._collector.id

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the loop or the interpreter may be gone
            self._call.cancel()


class Connection:
    """`api_key`: where the gateway asks for one. `ca_file`: who signed its certificate, PEM; `tls`
    alone trusts the system's CAs.
    """

    _channels: Any  # grpc, or grpc.aio

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        ca_file: str | Path | None = None,
    ) -> None:
        """Raises InvalidRequest for an address or a key that cannot be one."""
        target = target_of(address)
        self._metadata = key_metadata(api_key)
        credentials = channel_credentials(tls=tls, ca_file=ca_file)
        self._channel = (
            self._channels.insecure_channel(target, CHANNEL_OPTIONS)
            if credentials is None
            else self._channels.secure_channel(target, credentials, CHANNEL_OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def _start(self, prompt: str | None, params: GenerateParams) -> tuple[Any, Collector]:
        request, timeout_s = build_request(prompt, params)
        collector = Collector()
        return self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata), collector
