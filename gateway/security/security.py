"""The security of a gateway, built from its configuration."""

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
from .accepted_keys import AcceptedKeys
from .browser_sessions import BrowserSessions
from .key_file import KeyRing
from .tenancy import Tenancy

_PROTECTION = {"tls_cert": "--tls-cert", "tls_key": "--tls-key", "api_keys": "--api-keys"}
_SALT_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Security:
    """`certificate` None: plain text for clients. `cluster_tls` None: plain text for nodes. `keys`
    None: no API key is required."""

    certificate: CertificateFiles | None
    cluster_tls: ClusterTls | None
    keys: AcceptedKeys | None
    sessions: BrowserSessions
    tenancy: Tenancy

    @classmethod
    def of(cls, config: GatewayConfig, cluster: ClusterConfig, clock: Clock) -> Security:
        """Raises StartupFailed, also if the gateway would be exposed without protection."""
        missing = [flag for name, flag in _PROTECTION.items() if getattr(config, name) is None]
        check_exposure("gateway", config.host, missing, is_accepted=config.insecure_bind)
        ring = None if config.api_keys is None else KeyRing(Path(config.api_keys))
        keys, secret = AcceptedKeys(ring, ClusterSecret.of(cluster)), cluster.cluster_secret
        certificate = None
        if config.tls_cert is not None and config.tls_key is not None:
            chain, key = Path(config.tls_cert), Path(config.tls_key)
            certificate = CertificateFiles(chain, key, None, "--tls-cert, --tls-key")
        # Gateways that share a port accept each other's logins; else each accepts only its own.
        cookie_key = session_key(secret, host_id()) if config.reuse_port and secret else None
        # Without a secret of the deployment, each gateway has its own part of the prefix caches.
        salts = salt_key(secret) if secret else secrets.token_bytes(_SALT_KEY_BYTES)
        return cls(
            certificate,
            ClusterTls.of(cluster),
            None if ring is None else keys,
            BrowserSessions(keys, clock, cookie_key),
            Tenancy(clock, salts, shares_prefixes=config.share_prefix_across_tenants),
        )

    @property
    def certificates(self) -> tuple[CertificateFiles, ...]:
        """All certificates of this process."""
        cluster = None if self.cluster_tls is None else self.cluster_tls.files
        return tuple(files for files in (self.certificate, cluster) if files is not None)

    def certificate_ends_s(self) -> dict[str, float]:
        """By file, the Unix time at which its certificate expires."""
        ends = (files.current().ends_s for files in self.certificates)
        return {file: ends_s for each in ends for file, ends_s in each.items()}
