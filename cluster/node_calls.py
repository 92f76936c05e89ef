"""The dialer's end of the calls to a node's gRPC service: its handshake, and GetMembers.

    dialer: opening ─► ◄─ challenge, answer ─► ◄─ accepted; then the response

By GetMembers a process gets a node's engines while Redis is away, entry by entry as the directory
would have them. The node's end is node/supervisor/rpc.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from ..core.channels.handshake import Dialer
from ..core.errors import NodeLost, Unauthenticated
from ..core.membership import Member
from ..proto.v1 import node_pb2, node_pb2_grpc
from .entries import MAX_ENTRY_BYTES, Entry, encode_entry
from .known_nodes import Node
from .secret import ClusterSecret
from .tls import ClusterTls, open_channel

# Purposes: one a method.
LEDGERS, MEMBERS = b"ledgers", b"members"
ANY_ENGINE = "0" * 32  # whom a call dials that is for all engines of a node
ACCEPTED = b"accepted"

_ANSWER_S = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * MAX_ENTRY_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


async def dial(
    call: Any, message: Callable[..., Any], secret: ClusterSecret, purpose: bytes, address: str
) -> None:
    """The dialer's part on a gRPC stream whose messages have the field `handshake`.

    Returns once the node at `address` has proven itself and accepted us. Raises Unauthenticated, or
    what gRPC raises.
    """
    us = secrets.token_hex(16)
    ours = Dialer(secret.dialing_key, purpose, dialer=us, listener=ANY_ENGINE, address=address)
    await call.write(message(handshake=ours.opening))
    await call.write(message(handshake=ours.answer(await _read(call))))
    if await _read(call) != ACCEPTED:
        raise Unauthenticated("the listener did not accept us")


async def _read(call: Any) -> bytes:
    """Empty where something else came."""
    part: bytes = getattr(await call.read(), "handshake", b"")  # EOF has none
    return part


def answer_with(members: Iterable[Member], secret: ClusterSecret) -> node_pb2.GetMembersResponse:
    """A node's answer. Its entries count in it alone: put into Redis, they ran out in 1970."""
    entries = (Entry(member, sequence=1, at_ms=1, ttl_ms=1) for member in members)
    return node_pb2.GetMembersResponse(entries=[encode_entry(each, secret) for each in entries])


class MemberCalls:
    """known_nodes.AskNode over gRPC."""

    def __init__(self, secret: ClusterSecret, tls: ClusterTls | None) -> None:
        self._secret = secret
        self._tls = tls

    async def __call__(self, node: Node) -> Sequence[bytes]:
        """Raises Unauthenticated, NodeLost."""
        async with open_channel(node.address, self._tls, node.role.value, _OPTIONS) as channel:
            stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
            call = stub.GetMembers(timeout=_ANSWER_S)
            try:
                request = node_pb2.GetMembersRequest
                await dial(call, request, self._secret, MEMBERS, node.address)
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
