"""The cluster secret, by which gateways and nodes of one deployment authenticate each other.

Owns what is derived from the secret: the handshake key, the tag (MAC) of values on Redis, and
which secrets are accepted during a rotation. Neither a secret nor the handshake key leaves the
process. Without a secret everybody has the key: then the network is the security boundary.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from ..core.channels.handshake import key_id
from ..core.config import ClusterConfig

TAG_BYTES = 16
MIN_SECRET_CHARS = 16  # shorter ones can be guessed from a recorded handshake


def _derive(secret: str, purpose: bytes, message: bytes = b"") -> bytes:
    """Keyed blake2b of a message; `purpose` separates the uses."""
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(message, key=key, person=purpose, digest_size=32).digest()


def handshake_key(secret: str | None) -> bytes:
    """The key that processes of one deployment prove to each other: core/channels/handshake.py."""
    return _derive(secret or "", b"baton-handshake")


def operator_key(secret: str) -> str:
    """The API key of the deployment's operator at its gateway. No call sends it to nodes, but
    anybody with the secret can derive it."""
    return f"bo-{_derive(secret, b'baton-operator').hex()}"


def salt_key(secret: str) -> bytes:
    """The key of tenants' cache salts, the same for all gateways of a deployment."""
    return _derive(secret, b"baton-salt")


def session_key(secret: str, host: bytes) -> bytes:
    """The key for browser sessions of a host's gateways: sessions have times of its clock."""
    return _derive(secret, b"baton-session", host)


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """`current` is used to sign and to dial; both are accepted, so that a secret can be rotated
    process by process. Without `current` there is no secret, and everything is accepted.
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
        """The key to prove when dialing."""
        return handshake_key(self.current)

    def keys_by_id(self) -> dict[bytes, bytes]:
        """The accepted keys of dialers, by the id in their opening."""
        keys = map(handshake_key, self.accepted or (None,))
        return {key_id(key): key for key in keys}

    def seal(self, message: bytes) -> bytes:
        """The value to store on Redis: the message, and its tag if there is a secret."""
        return message + _tag(self.current, message) if self.current else message

    def unseal(self, sealed: bytes) -> bytes:
        """The message; empty (which is no valid message) if its tag is of no accepted secret."""
        if not self.current:
            return sealed
        message, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        is_ours = any(hmac.compare_digest(tag, _tag(each, message)) for each in self.accepted)
        return message if is_ours else b""


NO_SECRET = ClusterSecret()


def _tag(secret: str, message: bytes) -> bytes:
    return _derive(secret, b"baton-redis", message)[:TAG_BYTES]
