"""Node.GetMembers: how a process asks a node for its engines while Redis is away. Both ends' part.

The answer is what the directory would have, entry by entry. Knows nothing of who is asked and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import grpc

from ..core.errors import NodeLost
from ..core.membership import Member
from ..proto.v1 import node_pb2, node_pb2_grpc
from .entries import MAX_ENTRY_BYTES, Entry, encode_entry
from .known_nodes import Node
from .link_handshake import ANY_ENGINE, MEMBERS, dial
from .secret import ClusterSecret
from .tls import ClusterTls, open_channel

_ANSWER_S = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * MAX_ENTRY_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def answer_with(members: Iterable[Member], secret: ClusterSecret) -> node_pb2.GetMembersResponse:
    """A node's answer. Its entries count in it alone: put into Redis, they ran out in 1970."""
    entries = (Entry(member, sequence=1, at_ms=1, ttl_ms=1) for member in members)
    return node_pb2.GetMembersResponse(entries=[encode_entry(each, secret) for each in entries])


class MemberCalls:
    """known_nodes.Asker over gRPC."""

    def __init__(self, secret: ClusterSecret, tls: ClusterTls | None) -> None:
        self._secret = secret
        self._tls = tls

    async def __call__(self, node: Node) -> Sequence[bytes]:
        """Raises Unauthenticated, NodeLost."""
        async with open_channel(node.address, self._tls, node.role.value, _OPTIONS) as channel:
            stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
            call = stub.GetMembers(timeout=_ANSWER_S)
            try:
                await dial(
                    *(call, node_pb2.GetMembersRequest, self._secret, MEMBERS),
                    listener=ANY_ENGINE,
                    address=node.address,
                )
                answer = await call.read()
            except grpc.aio.AioRpcError as error:
                raise NodeLost(error.details() or error.code().name) from error
            except asyncio.InvalidStateError as error:  # of writing to a call that has ended
                raise NodeLost("the call ended within the handshake") from error
            finally:
                call.cancel()
        if not isinstance(answer, node_pb2.GetMembersResponse):
            raise NodeLost("the call ended without an answer")
        return answer.entries
