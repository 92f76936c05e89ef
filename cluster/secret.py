"""The cluster secret: how gateways and nodes of one deployment prove that they belong together.

Owns what is derived from the secret: the metadata of a call, and the signature of a directory
entry. The secret itself never leaves the process. Without a secret everything is accepted: then the
network is the boundary.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from ..core.errors import Unauthenticated

METADATA_KEY = "baton-secret"
TAG_BYTES = 16


def _derive(secret: str, purpose: bytes, message: bytes = b"") -> str:
    """Keyed blake2b over any message; `purpose` keeps the uses apart."""
    key = hashlib.sha256(secret.encode()).digest()
    return hashlib.blake2b(message, key=key, person=purpose, digest_size=32).hexdigest()


def secret_metadata(secret: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of an internal call; empty without a secret."""
    return ((METADATA_KEY, _derive(secret, b"baton-rpc")),) if secret else ()


def check_secret(secret: str | None, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Raise Unauthenticated unless the call's metadata proves this secret. Constant-time."""
    if not secret:
        return
    given = next((value for key, value in metadata or () if key == METADATA_KEY), "")
    given_bytes = given if isinstance(given, bytes) else given.encode()
    if not hmac.compare_digest(given_bytes, _derive(secret, b"baton-rpc").encode()):
        raise Unauthenticated("the cluster secret is missing or wrong")


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
