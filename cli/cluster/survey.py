"""Surveys a whole cluster: which engines are in Redis, which are reachable, and their ledgers.

An engine is alive if it sends its welcome to a dialer with a gateway's handshake; nothing is
dispatched.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import msgspec

from ...cluster.known_nodes import LEDGERS, dial
from ...cluster.redis_client import RedisAway, RedisClient, answering_redis
from ...cluster.redis_directory import RedisDirectory
from ...cluster.secret import ClusterSecret
from ...cluster.tls import ClusterTls, open_channel, role_name
from ...core.channels.addresses import host_id
from ...core.channels.admission import GATEWAY
from ...core.channels.admission import dial as dial_engine
from ...core.channels.frames import FrameBuffer
from ...core.config import ClusterConfig
from ...core.errors import BatonError, Unauthenticated
from ...core.membership import Member, Role
from ...prefix_index.messages import BadMessage
from ...prefix_index.pages import decode_contents
from ...prefix_index.redis_link import RedisIndexLink
from ...proto.v1 import node_pb2, node_pb2_grpc


class BadLedger(Exception):
    """Not a ledger of a known form; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Every block of a pool is in exactly one of the first four states."""

    free: int
    cached: int
    held: int
    reserved: int
    total: int


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A request in an engine's ledger."""

    state: str  # waiting, running, held, reserved
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LedgerTransfer:
    """One side's view of a hand-off. `key`: the request; None if its prompt has not arrived.

    A source has the incarnation of its `puller`, a puller that of its `source`.
    """

    state: str
    key: str | None
    puller: str | None = None
    source: str | None = None

    @property
    def is_source(self) -> bool:
        return self.puller is not None

    @property
    def peer(self) -> str | None:
        return self.puller or self.source


@dataclass(frozen=True, slots=True)
class Ledger:
    """An engine's report of its blocks, requests and transfers. `peers`: the state of each open
    link, by the peer's incarnation."""

    node: str
    blocks: Blocks
    requests: Mapping[str, HeldRequest]
    transfers: Mapping[str, LedgerTransfer]
    peers: Mapping[str, str]
    num_fences: int


def parse_ledger(text: str) -> Ledger:
    """Raises BadLedger for JSON of another form: the engine may have another version."""
    try:
        raw = msgspec.json.decode(text)
        if isinstance(raw, dict) and "error" in raw:
            raise BadLedger(f"engine {raw.get('incarnation')}: {raw['error']}")
        return msgspec.convert(raw, Ledger)
    except msgspec.MsgspecError as error:
        raise BadLedger(f"the ledger is invalid: {error}") from error


_CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_ANSWER_S = 3.0
_LEDGER_S = 12.0  # a node waits up to 10 s for an engine that hangs


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine. `member`: its entry in Redis, or None; `silence`: why there is no ledger.

    `num_published`: its blocks in the prefix index; None if it has nothing there.
    """

    name: str
    address: str
    member: Member | None
    ledger: Ledger | None
    silence: str = ""
    num_published: int | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """The state of a cluster."""

    engines: tuple[EngineView, ...]
    num_bad_entries: int = 0


async def survey(cluster: ClusterConfig) -> Survey:
    """Request everything at once. Raises StartupFailed if Redis does not answer."""
    tls, secret = ClusterTls.of(cluster), ClusterSecret.of(cluster)
    async with answering_redis(cluster.redis_url, cluster.cluster, secret) as redis:
        members, num_bad_entries = await members_of(redis)
        addresses = sorted({member.address for member in members})
        nodes_members = ([m for m in members if m.address == address] for address in addresses)
        looks = (_look_at(at_one, secret, tls) for at_one in nodes_members)
        counting = count_published(RedisIndexLink(redis), [m.incarnation for m in members])
        counts, nodes = await asyncio.gather(counting, asyncio.gather(*looks))
    engines = (
        replace(one, num_published=counts.get(one.member.incarnation)) if one.member else one
        for node in nodes
        for one in node
    )
    return Survey(tuple(engines), num_bad_entries)


async def count_published(link: RedisIndexLink, incarnations: Iterable[str]) -> dict[str, int]:
    """How many blocks on its device each engine lists in the prefix index; absent if nothing."""
    counts: dict[str, int] = {}
    for incarnation in incarnations:
        try:
            raw = await link.read_contents(incarnation)
            counts[incarnation] = decode_contents(raw, incarnation).device_blocks
        except (BadMessage, RedisAway):
            continue
    return counts


async def members_of(redis: RedisClient) -> tuple[tuple[Member, ...], int]:
    """The directory, and how many of its entries are invalid or signed with another secret."""
    directory = RedisDirectory(redis)
    async with aclosing(directory.watch()) as watch:  # type: ignore[type-var]
        members: tuple[Member, ...] = await anext(watch)
    return members, directory.num_bad_entries


async def _look_at(
    members: Sequence[Member], secret: ClusterSecret, tls: ClusterTls | None
) -> list[EngineView]:
    """All engines of one node: `members`, which are in Redis, and others."""
    address, role = members[0].address, members[0].role.value
    async with open_channel(address, tls, role, _CHANNEL_OPTIONS) as channel:
        stub = node_pb2_grpc.NodeStub(channel)  # type: ignore[no-untyped-call]
        ledgers, silence = await _ledgers(stub, secret, address)
        looks = (asyncio.to_thread(_silence, member, secret, tls) for member in members)
        reasons = await asyncio.gather(*looks)
    engines = []
    for member, reason in zip(members, reasons, strict=True):
        ledger = None if reason else ledgers.pop(member.name, None)
        why = reason or ("" if ledger else silence or "its node has no ledger of it")
        engines.append(EngineView(member.name, address, member, ledger, why))
    strangers = [EngineView(name, address, None, ledger) for name, ledger in ledgers.items()]
    return [*engines, *strangers]


async def _ledgers(stub: Any, secret: ClusterSecret, address: str) -> tuple[dict[str, Ledger], str]:
    """The node's ledgers by engine name, and the error if some are missing."""
    found, silence = dict[str, Ledger](), ""
    try:
        texts = await ask_ledgers(stub, secret, address)
    except grpc.aio.AioRpcError as error:
        return {}, f"{error.code().name}: {error.details()}"
    except Unauthenticated as error:
        return {}, error.message
    for text in texts:
        try:
            ledger = parse_ledger(text)
        except BadLedger as error:
            silence = str(error)
        else:
            found[ledger.node] = ledger
    return found, silence


async def ask_ledgers(stub: Any, secret: ClusterSecret, address: str) -> Sequence[str]:
    """Every engine's ledger at the node of this address, as JSON.

    `stub` is a NodeStub. Raises Unauthenticated, grpc.aio.AioRpcError.
    """
    stream = stub.GetLedgers(timeout=_LEDGER_S)
    try:
        await dial(stream, node_pb2.GetLedgersRequest, secret, LEDGERS, address)
        answer = await stream.read()
        return () if answer is grpc.aio.EOF else tuple(answer.ledgers)
    finally:
        stream.cancel()


def _silence(member: Member, secret: ClusterSecret, tls: ClusterTls | None) -> str:
    """Why this incarnation cannot be reached; empty if it can. Blocks."""
    is_local = member.host_id == host_id().hex()
    try:
        connection = dial_engine(
            *(GATEWAY, secret.dialing_key),
            dialer=secrets.token_hex(16),
            listener=member.incarnation,
            address=None if is_local else member.engine_address,
            secure=None if tls is None else partial(_secure, tls, member.role),
        )
    except (OSError, BatonError) as error:
        return str(error)
    with connection:
        frames = FrameBuffer()
        connection.settimeout(_ANSWER_S)
        try:
            while not (payloads := frames.take()):
                if not frames.wait_for_more(connection):
                    return "it hung up"
        except OSError as error:  # TimeoutError and BrokenStream too
            return f"no welcome: {error}"
    return "" if node_pb2.NodeMessage.FromString(payloads[0]).HasField("welcome") else "no welcome"


def _secure(tls: ClusterTls, role: Role, connection: socket.socket) -> socket.socket:
    name = role_name(role.value)
    return tls.client_context().wrap_socket(connection, server_hostname=name)
