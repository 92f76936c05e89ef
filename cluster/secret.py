"""The cluster secret: how gateways and nodes of one deployment prove that they belong together.

Owns what is derived from the secret: the key of handshakes, the seal of what lies on Redis,
and which secrets count while one is changed for another. Neither a secret nor the key of handshakes
leaves the process. Without a secret everybody holds the key: then the network is the boundary.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from ..core.channels.handshake import key_id
from ..core.config import ClusterConfig

TAG_BYTES = 16
MIN_SECRET_CHARS = 16  # shorter ones can be guessed from what was recorded of a handshake


def _derive(secret: str, purpose: bytes, message: bytes = b"") -> bytes:
    """Keyed blake2b over any message; `purpose` keeps the uses apart."""
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(message, key=key, person=purpose, digest_size=32).digest()


def handshake_key(secret: str | None) -> bytes:
    """The key that processes of one deployment prove to each other: core/channels/handshake.py."""
    return _derive(secret or "", b"baton-handshake")


def operator_key(secret: str) -> str:
    """The API key by which who started a deployment looks after its gateway. Nodes do not see it
    in any call, but whoever knows the secret can derive it."""
    return f"bo-{_derive(secret, b'baton-operator').hex()}"


def salt_key(secret: str) -> bytes:
    """What gateways key tenants' cache salts with: the same for all of a deployment."""
    return _derive(secret, b"baton-salt")


def session_key(secret: str, host: bytes) -> bytes:
    """What a host's gateways sign browsers' sessions with: times in them are of its clock."""
    return _derive(secret, b"baton-session", host)


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """`current` signs and dials; both are accepted, so that one can be changed for the other
    process by process. Without a current one there is none, and everything is accepted.
    """

    current: str | None = field(default=None, repr=False)
    also: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: ClusterConfig) -> ClusterSecret:
        return cls(config.cluster_secret or None, config.cluster_secret_also or None)

    @property
    def accepted(self) -> tuple[str, ...]:
        return tuple(secret for secret in (self.current, self.also) if secret)

    @property
    def dialing_key(self) -> bytes:
        """What we prove to whom we dial."""
        return handshake_key(self.current)

    def keys_by_id(self) -> dict[bytes, bytes]:
        """What may be proven to us, as an opening names it."""
        keys = map(handshake_key, self.accepted or (None,))
        return {key_id(key): key for key in keys}

    def seal(self, message: bytes) -> bytes:
        """What lies on Redis, with its tag behind it, if there is a secret."""
        return message + _tag(self.current, message) if self.current else message

    def unseal(self, sealed: bytes) -> bytes:
        """The message; empty, which is none, if no secret of ours made its tag."""
        if not self.current:
            return sealed
        message, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        is_ours = any(hmac.compare_digest(tag, _tag(each, message)) for each in self.accepted)
        return message if is_ours else b""


NO_SECRET = ClusterSecret()


def _tag(secret: str, message: bytes) -> bytes:
    return _derive(secret, b"baton-redis", message)[:TAG_BYTES]
