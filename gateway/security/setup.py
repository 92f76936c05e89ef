"""The gateway's security as its configuration wants it, built before anything listens."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from ...cluster.exposure import check_exposure
from ...cluster.secret import ClusterSecret, salt_key, session_key
from ...cluster.tls import CertificateFiles, ClusterTls
from ...core.channels.addresses import host_id
from ...core.config import ClusterConfig, GatewayConfig
from ...core.ports import Clock
from .browser_session import BrowserSessions
from .gate import Gate, KeyRing
from .tenancy import Tenancy

_PROTECTION = {"tls_cert": "--tls-cert", "tls_key": "--tls-key", "api_keys": "--api-keys"}
_SALT_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Security:
    """`certificate` None: plain text; `cluster_tls` None: the same towards the nodes."""

    certificate: CertificateFiles | None
    cluster_tls: ClusterTls | None
    gate: Gate
    sessions: BrowserSessions
    tenancy: Tenancy

    @classmethod
    def of(cls, config: GatewayConfig, cluster: ClusterConfig, clock: Clock) -> Security:
        """Raises StartupFailed, also where too much would lie open to the network."""
        missing = [flag for name, flag in _PROTECTION.items() if getattr(config, name) is None]
        check_exposure("gateway", config.host, missing, is_accepted=config.insecure_bind)
        ring = None if config.api_keys is None else KeyRing(Path(config.api_keys))
        gate = Gate(ring, ClusterSecret.of(cluster))
        return cls(
            _certificate(config),
            ClusterTls.of(cluster),
            gate,
            BrowserSessions(gate, clock, _session_secret(config, cluster)),
            _tenancy(config, cluster, clock),
        )

    @property
    def certificates(self) -> tuple[CertificateFiles, ...]:
        """All that this process shows to anybody."""
        cluster = None if self.cluster_tls is None else self.cluster_tls.files
        return tuple(files for files in (self.certificate, cluster) if files is not None)

    def certificate_ends_s(self) -> dict[str, float]:
        """By file, the Unix time at which its certificate ends."""
        ends = (files.current().ends_s for files in self.certificates)
        return {file: ends_s for each in ends for file, ends_s in each.items()}


def _certificate(config: GatewayConfig) -> CertificateFiles | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    chain, key = Path(config.tls_cert), Path(config.tls_key)
    return CertificateFiles(chain, key, None, "--tls-cert, --tls-key")


def _session_secret(config: GatewayConfig, cluster: ClusterConfig) -> bytes | None:
    """Gateways that share a port take each other's logins; None: this one alone takes its own."""
    secret = cluster.cluster_secret
    return session_key(secret, host_id()) if config.reuse_port and secret else None


def _tenancy(config: GatewayConfig, cluster: ClusterConfig, clock: Clock) -> Tenancy:
    """Without a secret of the deployment, each gateway has its own part of the prefix caches."""
    secret = cluster.cluster_secret
    key = salt_key(secret) if secret else secrets.token_bytes(_SALT_KEY_BYTES)
    return Tenancy(clock, key, shares_prefixes=config.share_prefix_across_tenants)
