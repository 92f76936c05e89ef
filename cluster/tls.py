"""TLS between gateways and nodes, and the certificate files of all TLS servers.

    CA of the cluster ── signs ──► gateway.crt, prefill.crt, decode.crt
                                   DNS name in the SAN: gateway.baton.internal, ...

A certificate proves the role of either end, on any host: the dialer of a prefill node expects
`prefill.baton.internal`, and a node expects `gateway.baton.internal` in the certificate of a
gateway that calls it. Changed files are reloaded at the next handshake; unusable ones (e.g.
expired) leave the last certificate in use. One that expires soon is logged once a day.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

from ..core.channels.engine_tls import TlsContexts
from ..core.config import ClusterConfig
from ..core.errors import PermissionDenied, StartupFailed
from ..core.ports import Clock
from .certificate_times import validities
from .watched_files import WatchedFiles

log = logging.getLogger(__name__)

GATEWAY = "gateway"
_DOMAIN = ".baton.internal"
_SAN = "x509_subject_alternative_name"  # in gRPC's AuthContext

_DAY_S = 24 * 3600.0
_SOON_S = 14 * _DAY_S

Options = Sequence[tuple[str, Any]]


def role_name(role: str) -> str:
    """The DNS name of a role in its certificates."""
    return role + _DOMAIN


@dataclass(frozen=True, slots=True)
class Certificate:
    """The content of the files when they were last valid. `context`: for an HTTP server.

    `ends_s`: by file, the Unix time at which it expires.
    """

    chain: bytes
    key: bytes
    ca: bytes | None
    context: ssl.SSLContext
    ends_s: Mapping[str, float]


class _NotYetValid(ValueError):
    """`from_s`: the Unix time from which it is valid."""

    def __init__(self, text: str, from_s: float) -> None:
        super().__init__(text)
        self.from_s = from_s


class CertificateFiles:
    """A certificate chain with its key, PEM; `ca`: must have signed the peers' certificates.

    `what` names the flags. Raises StartupFailed if the files are unusable at the start.
    Thread-safe.
    """

    def __init__(
        self, chain: Path, key: Path, ca: Path | None, what: str, clock: Clock | None = None
    ) -> None:
        self._paths = (chain, key) if ca is None else (chain, key, ca)
        self._what = what
        self._clock = clock or Clock()
        self._files = WatchedFiles(self._paths)
        self._lock = threading.Lock()
        self._valid_from_s = math.inf  # of files that are not valid yet
        self._files.have_changed()
        try:
            self._certificate = self._load()
        except (OSError, ValueError) as error:
            raise StartupFailed(
                f"{what}: {_reason(error)}", hint="to try TLS, `baton certs DIR` makes a set"
            ) from error

    def current(self) -> Certificate:
        """The newest valid certificate."""
        with self._lock:
            if self._files.have_changed() or self._now_s() >= self._valid_from_s:
                self._valid_from_s = math.inf
                try:
                    self._certificate = self._load()
                    log.info("%s: reloaded", self._what)
                except (OSError, ValueError) as error:
                    log.error("%s: %s; the previous one stays in use", self._what, _reason(error))
                    if isinstance(error, _NotYetValid):
                        self._valid_from_s = error.from_s
                    elif not isinstance(error, ssl.SSLError | ValueError):
                        self._files.forget()  # unreadable, maybe temporarily: read them again
            return self._certificate

    def _load(self) -> Certificate:
        return _load(*self._paths, now_s=self._now_s())

    def _now_s(self) -> float:
        return self._clock.unix_ns() / 1e9

    def warn_of_end(self) -> None:
        """Log each certificate that expires within two weeks, or has expired."""
        now_s = self._now_s()
        for file, ends_s in self.current().ends_s.items():
            if now_s >= ends_s:
                log.error("%s: expired on %s: peers refuse it", file, _date(ends_s))
            elif now_s >= ends_s - _SOON_S:
                log.warning("%s: expires on %s: renew it", file, _date(ends_s))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server. With a CA, clients need a certificate signed by it."""
        given = self.current()

        def fetch() -> Any:
            nonlocal given
            newest = self.current()
            if newest is given:
                return None
            given = newest
            return _configuration(newest)

        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(  # type: ignore[no-untyped-call]
            _configuration(given), fetch, require_client_authentication=given.ca is not None
        )
        return credentials

    def http_context(self) -> ssl.SSLContext:
        """The TLS context of an HTTP server."""
        context = _new_context()

        def choose(connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
            connection.context = self.current().context

        context.sni_callback = choose  # called in every handshake, with or without a name
        return context


class ClusterTls:
    """The cluster's mutual TLS, at this process. Raises StartupFailed."""

    def __init__(self, ca: Path, chain: Path, key: Path) -> None:
        self.ca, self.chain, self.key = ca, chain, key
        what = "--cluster-ca, --cluster-cert, --cluster-key"
        self.files = CertificateFiles(chain, key, ca, what)
        paths = (str(ca), str(chain), str(key))
        self._contexts = TlsContexts(*paths, ssl.PROTOCOL_TLS_CLIENT)

    @classmethod
    def of(cls, config: ClusterConfig) -> ClusterTls | None:
        """None if the deployment has no certificates."""
        ca, chain, key = config.cluster_ca, config.cluster_cert, config.cluster_key
        if ca is None or chain is None or key is None:
            return None
        return cls(Path(ca), Path(chain), Path(key))

    def client_context(self) -> ssl.SSLContext:
        """The context to dial an engine with, under its role's name."""
        return self._contexts.newest()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        mine = self.files.current()
        credentials: grpc.ChannelCredentials = grpc.ssl_channel_credentials(  # type: ignore[no-untyped-call]
            mine.ca, mine.key, mine.chain
        )
        return credentials


async def watch_ends(files: Sequence[CertificateFiles]) -> None:
    """Log once a day the certificates that expire soon, until cancelled."""
    while True:
        for each in files:
            each.warn_of_end()
        await asyncio.sleep(_DAY_S)


def open_channel(
    address: str, tls: ClusterTls | None, role: str, options: Options = ()
) -> grpc.aio.Channel:
    """A channel to a node, which must have this role; plain text without TLS."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options)
    expected = (("grpc.ssl_target_name_override", role_name(role)),)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), (*options, *expected))


def bind(
    server: grpc.aio.Server, host: str, port: int, files: CertificateFiles | None, *, flag: str
) -> int:
    """Bind the server, with TLS if `files` are given; returns the port. Raises StartupFailed, which
    names `flag`, the flag of the port."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        _try_to_bind(host, port)
        if files is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, files.server_credentials()))
    except (OSError, RuntimeError) as error:
        raise StartupFailed(
            f"cannot listen on {host}:{port}: the port is taken, or the address is not this host's",
            hint=f"another {flag} (0 takes a free one) or --host",
        ) from error


def _try_to_bind(host: str, port: int) -> None:
    """Bind to one of the host's addresses as gRPC will, which prints its failures to stderr. Raises
    OSError."""
    refusal = OSError(f"{host} has no address")
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # gateways may share it
            try:
                return tried.bind(address)
            except OSError as error:
                refusal = error
    raise refusal


def check_peer_role(context: Any, *roles: str) -> None:
    """Raise PermissionDenied unless the caller's certificate has one of these roles.

    `context` is the ServicerContext of a call over mutual TLS.
    """
    names = context.auth_context().get(_SAN, ())
    if not any(role_name(role).encode() in names for role in roles):
        raise PermissionDenied(f"this call needs a certificate of the role {' or '.join(roles)}")


def _load(chain: Path, key: Path, ca: Path | None = None, *, now_s: float) -> Certificate:
    """Load and check the files; raises OSError (as ssl.SSLError is), ValueError."""
    read = _read(chain, key, ca)
    certificate = Certificate(*read, _new_context(), ends_s={})
    # Checks that certificate and key match. An encrypted key must not prompt on the terminal.
    certificate.context.load_cert_chain(chain, key, password=_no_password)
    if ca is not None:
        ssl.create_default_context(cafile=ca)
    if _read(chain, key, ca) != read:  # else the context may not match the bytes
        raise ValueError(f"{chain} and its other files are being written")
    return replace(certificate, ends_s=_ends(certificate, chain, ca, now_s))


def _read(chain: Path, key: Path, ca: Path | None) -> tuple[bytes, bytes, bytes | None]:
    return chain.read_bytes(), key.read_bytes(), None if ca is None else ca.read_bytes()


def _ends(
    certificate: Certificate, chain: Path, ca: Path | None, now_s: float
) -> Mapping[str, float]:
    """The expiry by file. Raises ValueError for a file that is not valid now: all certificates of a
    chain must be valid, but only one of a CA file."""
    links = validities(certificate.chain)
    starts_s, ends_s = max(v.from_s for v in links), min(v.until_s for v in links)
    if now_s < starts_s:
        raise _NotYetValid(f"{chain} is not valid before {_date(starts_s)}", starts_s)
    if now_s >= ends_s:
        raise ValueError(f"{chain} expired on {_date(ends_s)}")
    if ca is None or certificate.ca is None:
        return {str(chain): ends_s}
    authorities = validities(certificate.ca)
    trusted = [v.until_s for v in authorities if v.from_s <= now_s < v.until_s]
    if not trusted:
        starts_s = min((v.from_s for v in authorities if v.from_s > now_s), default=math.inf)
        raise _NotYetValid(f"{ca} has no CA that is valid now", starts_s)
    return {str(chain): ends_s, str(ca): max(trusted)}


def _date(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted: give one that is not")


def _configuration(certificate: Certificate) -> Any:
    pair = (certificate.key, certificate.chain)
    return grpc.ssl_server_certificate_configuration(  # type: ignore[no-untyped-call]
        [pair], root_certificates=certificate.ca
    )


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"certificate and key do not match, or are not PEM ({error.reason})"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)
