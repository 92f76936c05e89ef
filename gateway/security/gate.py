"""Who is calling? The one place where a credential becomes a Caller, for both fronts.

Reads the key file anew when it has changed; a file that cannot be used leaves the last keys in
force, and is logged. No error shows which part of a credential was wrong.

A browser holds a cookie in place of a key after the login, for some hours:

    cookie = expiry . reference of the key . tag of both

Reference and tag are HMACs with a secret of this gateway, or of those that share a port: nothing
about the key can be learnt from a cookie. Nothing is kept here: a cookie ends by its time, with its
key, or with that secret. It never carries more than the scope `metrics`, so a page that misuses it
changes nothing.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...cluster.exposure import check_exposure
from ...cluster.secret import ClusterSecret, operator_key, salt_key, session_key
from ...cluster.tls import CertificateFiles, ClusterTls
from ...cluster.watched_files import WatchedFiles
from ...core.channels.addresses import host_id
from ...core.config import ClusterConfig, GatewayConfig
from ...core.errors import StartupFailed, Unauthenticated
from ...core.ports import Clock
from .key_file import ApiKey, BadKeyFile, digest_of, load_keys
from .tenancy import ADMIN, METRICS, Caller, Tenancy, anyone, caller_id_of

log = logging.getLogger(__name__)

MAX_CREDENTIAL_CHARS = 512
OPERATOR = "@operator"  # no name that a key file could give
COOKIE = "baton_session"
SESSION_S = 12 * 3600
_MAX_COOKIE_CHARS = 256


class KeyRing:
    """The keys of a file. Raises StartupFailed if it is unusable at the beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = WatchedFiles((path,))
        self._files.have_changed()
        try:
            self._keys = load_keys(path)
        except BadKeyFile as error:
            raise StartupFailed(
                f"--api-keys {path}: {error}", hint="make one: baton keys add --tenant T FILE"
            ) from error

    def current(self) -> tuple[ApiKey, ...]:
        """Those that are in force."""
        if self._files.have_changed():
            try:
                self._keys = load_keys(self._path)
                log.info("API keys were read anew: %d", len(self._keys))
            except BadKeyFile as error:
                log.error("--api-keys %s: %s; the keys read before stay", self._path, error)
                if isinstance(error.__cause__, OSError):  # the file may be right as it is
                    self._files.forget()
        return self._keys


class Gate:
    """`ring` None: no keys are required, and everybody may do everything."""

    def __init__(self, ring: KeyRing | None, cluster_secret: ClusterSecret) -> None:
        self._ring = ring
        self._operators = tuple(map(_operator, cluster_secret.accepted))
        self._connection_key = secrets.token_bytes(16)  # no other gateway gives the same ids

    @property
    def requires_keys(self) -> bool:
        return self._ring is not None

    def caller(self, authorization: Sequence[str | bytes], front: str, peer: str = "") -> Caller:
        """The caller by its `Authorization` headers; raises Unauthenticated.

        `peer`: the address at the other end of its connection, where nothing else
        distinguishes callers.
        """
        if self._ring is None:
            return anyone(front, caller_id_of(peer.encode(), self._connection_key))
        return replace(self.key(_bearer(authorization)).caller, front=front)

    def key(self, text: str) -> ApiKey:
        """The key that was shown; raises Unauthenticated."""
        if len(text) > MAX_CREDENTIAL_CHARS:  # before it is hashed: that would cost by its length
            raise Unauthenticated("the API key is wrong")
        digest = digest_of(text)
        return self.find(lambda key: hmac.compare_digest(key.digest, digest))

    def find(self, is_it: Callable[[ApiKey], bool]) -> ApiKey:
        """The key in force of which this is true; raises Unauthenticated.

        Compares every key: it takes as long whichever it is, or if there is none.
        """
        ring = () if self._ring is None else self._ring.current()
        found = [key for key in (*ring, *self._operators) if is_it(key)]
        if not found:
            raise Unauthenticated("the API key is wrong")
        return found[-1]


def _operator(cluster_secret: str) -> ApiKey:
    """Who knows the cluster secret may look and administer: `baton up` does, at its own gateway."""
    digest = digest_of(operator_key(cluster_secret))
    scopes = frozenset({METRICS, ADMIN})
    return ApiKey(digest, Caller(OPERATOR, scopes, caller_id=caller_id_of(digest)))


def _bearer(authorization: Sequence[str | bytes]) -> str:
    """The credential in the only header; raises Unauthenticated."""
    if len(authorization) != 1:
        raise Unauthenticated(
            "an API key is needed: Authorization: Bearer KEY"
            if not authorization
            else "one Authorization header is allowed"
        )
    header = authorization[0]
    if isinstance(header, bytes) or len(header) > MAX_CREDENTIAL_CHARS:
        raise Unauthenticated("the API key is wrong")
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("an API key is needed: Authorization: Bearer KEY")
    return key.strip()


class BrowserSessions:
    """Gives and judges cookies. Times are of the monotonic clock, which a host has in common."""

    def __init__(self, gate: Gate, clock: Clock, secret: bytes | None = None) -> None:
        self._gate = gate
        self._clock = clock
        self._secret = secret or secrets.token_bytes(32)

    def open(self, key: str) -> str:
        """A cookie for who shows a key; raises Unauthenticated, PermissionDenied."""
        found = self._gate.key(key)
        found.caller.check_scope(METRICS)
        until = str(int(self._clock.monotonic_s() + SESSION_S))
        text = f"{until}.{self._reference(found)}"
        return f"{text}.{self._tag(text)}"

    def caller(self, cookie: str) -> Caller:
        """Who holds this cookie; raises Unauthenticated."""
        text, _, tag = cookie.rpartition(".")
        if len(cookie) > _MAX_COOKIE_CHARS or not hmac.compare_digest(
            tag.encode("utf-8", "surrogatepass"), self._tag(text).encode()
        ):
            raise Unauthenticated("the session is over: log in again")
        until, _, reference = text.partition(".")
        if self._clock.monotonic_s() >= int(until):
            raise Unauthenticated("the session is over: log in again")
        key = self._gate.find(lambda key: hmac.compare_digest(self._reference(key), reference))
        return replace(key.caller, front="http", scopes=key.caller.scopes & {METRICS})

    def _reference(self, key: ApiKey) -> str:
        return hmac.digest(self._secret, b"reference" + key.digest, "sha256").hex()

    def _tag(self, text: str) -> str:
        message = b"tag" + text.encode("utf-8", "surrogatepass")
        return hmac.digest(self._secret, message, "sha256").hex()


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
        gate, secret = Gate(ring, ClusterSecret.of(cluster)), cluster.cluster_secret
        certificate = None
        if config.tls_cert is not None and config.tls_key is not None:
            chain, key = Path(config.tls_cert), Path(config.tls_key)
            certificate = CertificateFiles(chain, key, None, "--tls-cert, --tls-key")
        # Gateways that share a port take each other's logins; else each takes its own alone.
        cookie_key = session_key(secret, host_id()) if config.reuse_port and secret else None
        # Without a secret of the deployment, each gateway has its own part of the prefix caches.
        salts = salt_key(secret) if secret else secrets.token_bytes(_SALT_KEY_BYTES)
        return cls(
            certificate,
            ClusterTls.of(cluster),
            gate,
            BrowserSessions(gate, clock, cookie_key),
            Tenancy(clock, salts, shares_prefixes=config.share_prefix_across_tenants),
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
