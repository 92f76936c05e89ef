"""The keys that a gateway accepts: those of its key file, and the one of the cluster secret.

Errors do not show which part of a credential is wrong.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...cluster.secret import ClusterSecret, operator_key
from ...core.errors import Unauthenticated
from .caller import ADMIN, METRICS, Caller
from .key_file import ApiKey, KeyRing, caller_id_of, digest_of

MAX_CREDENTIAL_CHARS = 512
OPERATOR = "@operator"  # no name that a key file could give


class AcceptedKeys:
    """`ring` None: no key file."""

    def __init__(self, ring: KeyRing | None, cluster_secret: ClusterSecret) -> None:
        self._ring = ring
        self._operators = tuple(map(_operator, cluster_secret.accepted))

    def caller(self, authorization: Sequence[str | bytes], front: str) -> Caller:
        """The caller with these `Authorization` headers; raises Unauthenticated."""
        return replace(self.key(_bearer(authorization)).caller, front=front)

    def key(self, text: str) -> ApiKey:
        """The accepted key with this text; raises Unauthenticated."""
        if len(text) > MAX_CREDENTIAL_CHARS:  # before it is hashed: that would cost by its length
            raise Unauthenticated("the API key is wrong")
        digest = digest_of(text)
        return self.find(lambda key: hmac.compare_digest(key.digest, digest))

    def find(self, is_it: Callable[[ApiKey], bool]) -> ApiKey:
        """The key in force for which `is_it` is true; raises Unauthenticated.

        Compares every key, so that the time does not depend on which one matches.
        """
        ring = () if self._ring is None else self._ring.current()
        found = [key for key in (*ring, *self._operators) if is_it(key)]
        if not found:
            raise Unauthenticated("the API key is wrong")
        return found[-1]


def _operator(cluster_secret: str) -> ApiKey:
    """The key of whoever knows the cluster secret, as `baton up` does: scopes metrics and admin."""
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
