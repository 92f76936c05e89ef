"""The cluster secret: how gateways and nodes of one deployment prove that they belong together.

Owns what is derived from the secret: the key of handshakes, and the signature of a directory entry.
Neither the secret nor the key of handshakes leaves the process. Without a secret everybody holds
the key: then the network is the boundary.
"""

from __future__ import annotations

import hashlib
import hmac

TAG_BYTES = 16


def _derive(secret: str, purpose: bytes, message: bytes = b"") -> str:
    """Keyed blake2b over any message; `purpose` keeps the uses apart."""
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(message, key=key, person=purpose, digest_size=32).hexdigest()


def handshake_key(secret: str | None) -> bytes:
    """What processes of one deployment prove to each other that they hold (core/handshake.py)."""
    return bytes.fromhex(_derive(secret or "", b"baton-handshake"))


def operator_key(secret: str) -> str:
    """The API key by which who started a deployment looks after its gateway. Nodes do not see it
    in any call, but whoever knows the secret can derive it."""
    return f"bo-{_derive(secret, b'baton-operator')}"


def salt_key(secret: str) -> bytes:
    """What gateways key tenants' cache salts with: the same for all of a deployment."""
    return bytes.fromhex(_derive(secret, b"baton-salt"))


def message_tag(secret: str, message: bytes) -> bytes:
    """The signature, TAG_BYTES long, of a message of the prefix index."""
    return bytes.fromhex(_derive(secret, b"baton-index", message))[:TAG_BYTES]


def sign(secret: str, message: bytes) -> str:
    """The signature of a directory entry."""
    return _derive(secret, b"baton-entry", message)


def is_signed(secret: str, message: bytes, signature: str) -> bool:
    """Whether `signature` is this secret's for `message`. Constant-time."""
    return hmac.compare_digest(sign(secret, message).encode(), signature.encode("utf-8", "replace"))
