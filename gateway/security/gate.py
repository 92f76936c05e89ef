"""Who is calling? The one place where a credential becomes a Caller, for both fronts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from ...cluster.secret import ClusterSecret
from .accepted_keys import AcceptedKeys
from .caller import Caller, anyone, caller_id_of
from .key_file import KeyRing


class Gate:
    """`ring` None: no keys are required, and everybody may do everything."""

    def __init__(self, ring: KeyRing | None, cluster_secret: ClusterSecret) -> None:
        self.requires_keys = ring is not None
        self.keys = AcceptedKeys(ring, cluster_secret)
        self._connection_key = secrets.token_bytes(16)  # no other gateway gives the same ids

    def caller(self, authorization: Sequence[str | bytes], front: str, peer: str = "") -> Caller:
        """The caller by its `Authorization` headers; raises Unauthenticated.

        `peer`: the address at the other end of its connection, where nothing else
        distinguishes callers.
        """
        if not self.requires_keys:
            return anyone(front, caller_id_of(peer.encode(), self._connection_key))
        return replace(self.keys.shown(authorization).caller, front=front)
