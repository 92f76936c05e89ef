"""A directory that works without Redis: it then requests the engines from the known nodes.

    Redis is up     inner directory ─────────────────────────────────► membership
    Redis is away   its last membership ─► addresses ─► a call to each ─► membership, where replies
                                                                        replace the node's entries
Owns which nodes are called and what is accepted of a reply: only entries with the node's own
address. A node without a valid reply keeps its entries. A call to a node's gRPC service (server
side: node/supervisor/rpc.py) begins with a handshake:

    dialer: opening ─► ◄─ challenge, answer ─► ◄─ accepted; then the response
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from ..core.channels.handshake import Dialer
from ..core.errors import BatonError, NodeLost, Unauthenticated
from ..core.membership import Directory, Member, Role
from ..core.ports import Clock
from ..proto.v1 import node_pb2, node_pb2_grpc
from .entries import MAX_ENTRY_BYTES, BadEntry, DirectoryEntry, decode_entry, encode_entry
from .secret import ClusterSecret
from .tls import ClusterTls, open_channel

log = logging.getLogger(__name__)

_CALL_EVERY_S = 1.0
_MAX_CALLED = 64  # nodes in one round; a large cluster takes several rounds
_MAX_AT_ONCE = 16  # concurrent calls
_MAX_ENGINES = 64  # of one node
_REMEMBERED_S = 60.0  # for nodes that Redis does not list (yet): it may go away again
_SETTLE_S = 3.0  # after Redis is back: by then, any changed membership has been reported

# Purposes of handshakes, one per gRPC method.
LEDGERS, MEMBERS = b"ledgers", b"members"
ANY_ENGINE = "0" * 32  # listener of a call that concerns all engines of a node
ACCEPTED = b"accepted"

_ANSWER_S = 2.0
_OPTIONS = (
    ("grpc.max_receive_message_length", 256 * MAX_ENTRY_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node to call: the listed address, and the role of its engines."""

    address: str
    role: Role


# Requests a node's directory entries, after it has proven the cluster's key. Raises BatonError if
# there is no response in time.
FetchMembers = Callable[[NodeAddress], Awaitable[Sequence[bytes]]]


@dataclass(eq=False)
class KnownNodes:
    """`core.ports.Directory` around an inner one, which all watchers share from the first `watch`
    until `close`. `roles`: the roles of the nodes that are called."""

    _inner: Directory
    _roles: Collection[Role]
    _fetch: FetchMembers
    _secret: ClusterSecret
    _clock: Clock
    _sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _listed: tuple[Member, ...] = ()  # the inner directory's last membership
    # Received after that.
    _answers: dict[NodeAddress, tuple[Member, ...]] = field(default_factory=dict)
    _left_s: dict[NodeAddress, float] = field(default_factory=dict)  # when nodes were last known
    _num_called: int = 0
    _members: tuple[Member, ...] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _following: asyncio.Task[None] | None = None

    @property
    def is_away(self) -> bool:
        return self._inner.is_away

    async def announce(self, member: Member, ttl_s: float) -> None:
        await self._inner.announce(member, ttl_s)

    async def withdraw(self, incarnation: str) -> None:
        await self._inner.withdraw(incarnation)

    async def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the membership, ordered by incarnation, at once and again after every change.

        A watcher that starts while Redis is away receives the membership of the other watchers.
        """
        if self._following is None or self._following.done():
            self._following, self._changed = asyncio.create_task(self._follow()), asyncio.Event()
        following = self._following
        seen: tuple[Member, ...] | None = None
        while True:
            changed = self._changed
            if self._members is not None and self._members != seen:
                seen = self._members
                yield seen
            elif following.done():
                following.result()  # raises the error that ended it
                return
            else:
                await changed.wait()

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        await self._inner.close()

    async def _follow(self) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._follow_inner())
                both.create_task(self._call_while_away())
        finally:
            self._changed.set()

    async def _follow_inner(self) -> None:
        async for members in self._inner.watch():
            self._take(members)

    def _take(self, members: tuple[Member, ...]) -> None:
        """Use the inner directory's membership, and drop the nodes' replies."""
        now_s = self._clock.monotonic_s()
        known = self._nodes(self._listed) | self._answers.keys()
        self._left_s = self._just_left(now_s) | dict.fromkeys(known, now_s)
        self._listed, self._answers = members, {}
        self._update()

    async def _call_while_away(self) -> None:
        """Call nodes while Redis is away. The inner directory only reports changes: its last
        membership is valid again if it has been back for _SETTLE_S without a report."""
        away_s = self._clock.monotonic_s()
        while True:
            await self._sleep(_CALL_EVERY_S)
            now_s = self._clock.monotonic_s()
            if self._inner.is_away:
                away_s = now_s
                await self._call_known(now_s)
            elif self._answers and now_s - away_s >= _SETTLE_S:
                self._take(self._listed)

    async def _call_known(self, now_s: float) -> None:
        """One round of calls: to all known nodes, or to the next _MAX_CALLED of them."""
        nodes = self._nodes(self._listed) | self._answers.keys() | self._just_left(now_s).keys()
        known = sorted(nodes, key=lambda node: node.address)
        first = self._num_called % max(1, len(known))
        in_turn = (known[first:] + known[:first])[:_MAX_CALLED]
        self._num_called = first + len(in_turn)
        gate = asyncio.Semaphore(_MAX_AT_ONCE)
        async with asyncio.TaskGroup() as calling:
            for node in in_turn:
                calling.create_task(self._call_one(node, gate))

    async def _call_one(self, node: NodeAddress, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                entries = await self._fetch(node)
            members = tuple(self._believed(entry, node) for entry in entries[:_MAX_ENGINES])
        except (BatonError, BadEntry) as error:
            log.debug("no answer of %s: %s", node.address, error)
            return
        if self._inner.is_away:
            self._answers[node] = members
            self._update()

    def _believed(self, entry: bytes, node: NodeAddress) -> Member:
        """The member of a node's entry, whose times are ignored; raises BadEntry."""
        member = decode_entry(entry, self._secret).member
        if (member.address, member.role) != (node.address, node.role):
            raise BadEntry("of another node")
        return member

    def _nodes(self, members: Iterable[Member]) -> set[NodeAddress]:
        return {NodeAddress(m.address, m.role) for m in members if m.role in self._roles}

    def _just_left(self, now_s: float) -> dict[NodeAddress, float]:
        return {n: at_s for n, at_s in self._left_s.items() if now_s - at_s < _REMEMBERED_S}

    def _update(self) -> None:
        """Recompute the membership, and wake the watchers if it has changed."""
        answers = [m for answer in self._answers.values() for m in answer]
        answered = {node.address for node in self._answers}
        rest = [m for m in self._listed if m.address not in answered]
        members = tuple(sorted(answers + rest, key=lambda member: member.incarnation))
        if members != self._members:
            self._members = members
            self._changed.set()
            self._changed = asyncio.Event()


async def dial(
    call: Any, message: Callable[..., Any], secret: ClusterSecret, purpose: bytes, address: str
) -> None:
    """The dialer's side of the handshake, on a gRPC stream of messages with a field `handshake`.

    Returns once the node at `address` has proven the key and accepted the dialer. Raises
    Unauthenticated, or gRPC's errors.
    """
    us = secrets.token_hex(16)
    ours = Dialer(secret.dialing_key, purpose, dialer=us, listener=ANY_ENGINE, address=address)
    await call.write(message(handshake=ours.opening))
    await call.write(message(handshake=ours.answer(await _read(call))))
    if await _read(call) != ACCEPTED:
        raise Unauthenticated("the listener rejected the handshake")


async def _read(call: Any) -> bytes:
    """The next handshake message; empty if another message was received."""
    part: bytes = getattr(await call.read(), "handshake", b"")  # EOF has none
    return part


def answer_with(members: Iterable[Member], secret: ClusterSecret) -> node_pb2.GetMembersResponse:
    """A node's response. Its entries cannot be replayed through Redis: there they are expired."""
    entries = (DirectoryEntry(member, sequence=1, at_ms=1, ttl_ms=1) for member in members)
    return node_pb2.GetMembersResponse(entries=[encode_entry(each, secret) for each in entries])


async def fetch_members(
    secret: ClusterSecret, tls: ClusterTls | None, node: NodeAddress
) -> Sequence[bytes]:
    """`FetchMembers` over gRPC. Raises Unauthenticated, NodeLost."""
    async with open_channel(node.address, tls, node.role.value, _OPTIONS) as channel:
        stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        call = stub.GetMembers(timeout=_ANSWER_S)
        try:
            request = node_pb2.GetMembersRequest
            await dial(call, request, secret, MEMBERS, node.address)
            answer = await call.read()
        except grpc.aio.AioRpcError as error:
            raise NodeLost(error.details() or error.code().name) from error
        except asyncio.InvalidStateError as error:  # raised by a write to a call that has ended
            raise NodeLost("the call ended during the handshake") from error
        finally:
            call.cancel()
    if not isinstance(answer, node_pb2.GetMembersResponse):
        raise NodeLost("the call ended without an answer")
    return answer.entries
