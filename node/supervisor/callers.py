"""Who may open a stream at this node: whoever proves the cluster's key, and with TLS its role.

Owns the order of the checks and the number of callers that have proven nothing yet. Knows no
message but the handshake's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import grpc

from ...cluster.link_handshake import ADMIT_S, Read, Write, admit
from ...cluster.secret import ClusterSecret
from ...cluster.tls import check_peer_role
from ...core.channels.handshake import Listener, Opening
from ...core.errors import Overloaded, Unauthenticated

MAX_PENDING = 64  # callers that have proven nothing yet

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Callers:
    """One for a node's server. `addresses`: what others dial to reach it, in their words."""

    secret: ClusterSecret
    addresses: Collection[str]
    has_tls: bool = False
    num_pending: int = 0

    async def admit(
        self, context: Context, purpose: bytes, roles: tuple[str, ...], read: Read, write: Write
    ) -> Opening:
        """Whom this stream serves. `roles`: one of them is the certificate's where there are any.

        Raises BatonError, which is to end the call.
        """
        if self.has_tls:
            check_peer_role(context, *roles)
        if self.num_pending >= MAX_PENDING:
            raise Overloaded("too many callers have not proven yet who they are")
        self.num_pending += 1
        try:
            async with asyncio.timeout(ADMIT_S):
                keys = self.secret.keys_by_id()
                listener = Listener(lambda o: keys.get(o.key_id), (purpose,), self.addresses)
                return await admit(listener, read, write)
        except TimeoutError:
            raise Unauthenticated("the handshake takes too long") from None
        finally:
            self.num_pending -= 1
