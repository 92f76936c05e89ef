"""Attacks on a deployment with a cluster secret and API keys, by a process of another user, and by
one of the same user.

One cluster for all tests, which run in this order. The intruders know every address and method,
recorded traffic and the contents of Redis; they do not know the secret.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import redis
from deployments import marked_processes
from fakes.node.intruder import Intruder, intruder
from fault_scenes.fault_cluster import Cluster, cluster, write_model
from node_driver import CLUSTER, OUR_MARK, SECRET, members, session

from baton.cli.cluster.survey import ask_ledgers
from baton.client import AsyncClient, NodeInfo
from baton.cluster.entries import decode_entry
from baton.cluster.known_nodes import ANY_ENGINE, LEDGERS, MEMBERS, NodeAddress, fetch_members
from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret, operator_key
from baton.core.channels.addresses import socket_address
from baton.core.channels.admission import GATEWAY, PULLER, SOCKET, THIS_HOST, dial
from baton.core.channels.frames import encode_payload
from baton.core.channels.handshake import CHALLENGE_BYTES, OPENING_BYTES, Dialer, Opening
from baton.core.errors import HandoffFailed, NodeLost, Unauthenticated
from baton.core.membership import Member, Role
from baton.gateway.security.key_file import add_key
from baton.proto.v1 import node_pb2, node_pb2_grpc

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)

NODES = ("prefill-0", "prefill-2", "decode-0")
LEDGER = "/baton.v1.Node/GetLedgers"
ENGINES = "/baton.v1.Node/GetMembers"
MESSAGES: dict[str, Any] = {
    LEDGER: node_pb2.GetLedgersRequest,
    ENGINES: node_pb2.GetMembersRequest,
}
REFUSALS = {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED"}
PROMPTS = [f"What is said under prompt {number} stays between us. " * 4 for number in range(6)]


@dataclass
class World:
    """The cluster, its attackers, and the `expected` outputs by prompt, from before the attacks."""

    system: Cluster
    intruder: Intruder  # another user
    kin: Intruder  # our own user
    key: str
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def address(self, name: str) -> str:
        return self.system.processes[name].address

    def client(self, key: str | None = None) -> AsyncClient:
        return AsyncClient(self.address("gateway-0"), api_key=key or self.key)

    async def engines(self) -> dict[str, NodeInfo]:
        """The gateway's engines by name."""
        async with self.client(operator_key(SECRET)) as client:
            nodes = (await client.model_info()).nodes
        by_name = {node.name: node for node in nodes}
        assert len(by_name) == len(nodes), "two of one name"
        return by_name

    async def until_linked(self, *names: str) -> dict[str, NodeInfo]:
        """Wait until the gateway has these engines only, and each puller its sources."""
        async with asyncio.timeout(20):
            while True:
                with suppress(Exception):  # the gateway may be starting
                    found = await self.engines()
                    sources = {n.incarnation for n in found.values() if n.role == "prefill"}
                    is_linked = set(found["decode-0"].links) >= sources
                    if found.keys() == set(names) and is_linked:
                        return found
                await asyncio.sleep(0.05)

    async def answers(self, prompts: list[str]) -> list[tuple[int, ...]]:
        async with self.client() as client:
            calls = [client.generate(p, max_tokens=24, temperature=0.0) for p in prompts]
            return [r.token_ids for r in await asyncio.gather(*(c.finish() for c in calls))]

    async def serves_right(self) -> None:
        answers = await self.answers(PROMPTS)
        assert dict(zip(PROMPTS, answers, strict=True)) == self.expected

    def inside(self) -> list[str]:
        """What no stranger may learn: names, incarnations, addresses, the model's folder."""
        names = [str(self.system.model_dir), self.system.model_dir.name, *NODES, SECRET]
        return [*names, *self.system.incarnations, *map(self.address, NODES)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model_dir = write_model(tmp_path_factory.mktemp("themodel"))
    key_file = tmp_path_factory.mktemp("keys") / "keys.json"
    key = add_key(key_file, "acme", frozenset({"infer"}))
    keys = ("--api-keys", str(key_file))
    with (
        intruder() as attacker,
        intruder(user="root") as kin,
        cluster(model_dir, "gateway-0", *NODES, gateway_0=keys) as system,
    ):
        world = World(system, attacker, kin, key)
        engines = asyncio.run(world.until_linked(*NODES))
        system.incarnations |= {engine.incarnation for engine in engines.values()}
        answers = asyncio.run(world.answers(PROMPTS))
        world.expected = dict(zip(PROMPTS, answers, strict=True))
        yield world
        asyncio.run(world.serves_right())
    assert not marked_processes(OUR_MARK)


def said_by(message: Any, *parts: bytes) -> list[str]:
    return [message(handshake=part).SerializeToString().hex() for part in parts]


def opening(world: World, method: str, node: str, secret: str | None) -> str:
    """The opening of a dialer that claims a live puller's incarnation, with a key of its own."""
    engines = asyncio.run(world.engines())
    dialer = Dialer(
        ClusterSecret(secret).dialing_key,
        {LEDGER: LEDGERS, ENGINES: MEMBERS}[method],
        dialer=engines["decode-0"].incarnation,
        listener=ANY_ENGINE,
        address=world.address(node),
    )
    (message,) = said_by(MESSAGES[method], dialer.opening)
    return message


class Recording:
    """A call that records what is written to it."""

    def __init__(self, call: Any, written: list[str]) -> None:
        self._call, self._written = call, written
        self.read, self.cancel = call.read, call.cancel

    async def write(self, message: Any) -> None:
        self._written.append(message.SerializeToString().hex())
        await self._call.write(message)


@pytest.fixture(scope="module")
def recorded(world: World) -> list[str]:
    """A dialer's messages in a successful handshake with prefill-0."""
    written: list[str] = []

    async def record() -> None:
        async with grpc.aio.insecure_channel(world.address("prefill-0")) as channel:
            stub = node_pb2_grpc.NodeStub(channel)

            class Recorder:
                def GetLedgers(self, timeout: float) -> Recording:
                    return Recording(stub.GetLedgers(timeout=timeout), written)

            secret = ClusterSecret(SECRET)
            assert await ask_ledgers(Recorder(), secret, world.address("prefill-0"))

    asyncio.run(record())
    assert len(written) == 2
    return written


def check_silent(world: World, answer: dict[str, Any]) -> None:
    """Check for an error that discloses no internals.

    Where a node has ended a stream that is still written to, gRPC's client replaces the node's
    error with one of its own.
    """
    is_clients_own = (answer["code"], answer["details"]) == ("INTERNAL", "Internal error from Core")
    assert answer["code"] in REFUSALS or is_clients_own, answer
    text = f"{answer['details']} {answer['metadata']}"
    raw = b"".join(map(bytes.fromhex, answer["received"]))
    for secret in world.inside():
        assert secret not in text
        assert secret.encode() not in raw
        with suppress(ValueError):
            assert bytes.fromhex(secret) not in raw


# --- calls without the secret ---------------------------------------------------------------------


@pytest.mark.parametrize("method", [LEDGER, ENGINES])
def test_calls_without_a_handshake_get_an_error_and_nothing_else(
    world: World, method: str, recorded: list[str]
) -> None:
    message = MESSAGES[method]
    dispatch = node_pb2.GatewayMessage(dispatch=node_pb2.Dispatch(request_id="r"))
    attempts = {
        "nothing": [],
        "no protobuf": [os.urandom(200).hex()],
        "a dispatch": [dispatch.SerializeToString().hex()],
        "garbage for a handshake": said_by(message, os.urandom(OPENING_BYTES), os.urandom(32)),
        "an answer first": said_by(message, os.urandom(32)),
        "without a secret": [opening(world, method, "prefill-0", None)],
        "with another secret": [opening(world, method, "prefill-0", "a guess")],
        "what was recorded": recorded,
    }
    for what, messages in attempts.items():
        node = world.address("prefill-0")
        answer = world.intruder.do("say", address=node, method=method, messages=messages)
        check_silent(world, answer)
        if what != "what was recorded":
            assert not answer["received"], "not even a proof to test guesses against"
    assert not [line for line in world.system.processes["prefill-0"].printed if "Traceback" in line]


async def test_a_recorded_handshake_is_good_for_a_challenge_and_no_more(
    world: World, recorded: list[str]
) -> None:
    address = world.address("prefill-0")
    answer = world.intruder.do("say", address=address, method=LEDGER, messages=recorded)
    assert answer["code"] == "UNAUTHENTICATED"
    assert len(answer["received"]) == 1


def test_another_user_reads_neither_the_secret_nor_redis(world: World) -> None:
    redis_socket = world.system.redis.folder / "redis.sock"
    assert world.intruder.do("look", path=str(redis_socket)) == "PermissionError"
    for process in world.system.processes.values():
        folder = f"/proc/{process.process.pid}"
        assert world.intruder.do("look", path=f"{folder}/environ") == "PermissionError"
        shown = world.intruder.do("look", path=f"{folder}/cmdline")
        assert "--cluster" in shown
        assert SECRET not in shown


def test_a_flood_of_strangers_does_not_end_what_runs(world: World) -> None:
    """A flood of 2,000 strangers, half of them silent and half with invalid data, ends no running
    call: 64 may be pending, for 2 s each."""
    junk = opening(world, LEDGER, "prefill-0", "a guess")

    async def ask_meanwhile(flooding: asyncio.Task[Any]) -> int:
        num_rounds = 0
        while not flooding.done():
            await world.serves_right()
            num_rounds += 1
        return num_rounds

    async def attack() -> tuple[dict[str, int], int]:
        how = {"address": world.address("prefill-0"), "method": LEDGER, "message": junk}
        order = asyncio.to_thread(world.intruder.do, "flood", per_s=1000, for_s=2, **how)
        flooding = asyncio.create_task(order)
        num_rounds = await ask_meanwhile(flooding)
        return await flooding, num_rounds

    codes, num_rounds = asyncio.run(attack())
    assert num_rounds >= 1
    # INTERNAL comes from grpc.aio itself, for a write to a stream that the node has ended.
    assert codes.keys() <= {*REFUSALS, "INTERNAL", "UNAVAILABLE"}, codes
    assert codes["RESOURCE_EXHAUSTED"] > 0, "beyond those that may be pending"
    assert sum(codes.values()) > 1000
    asyncio.run(world.until_linked(*NODES))


# --- engines, without the secret ------------------------------------------------------------------


async def members_by_name(world: World) -> dict[str, Member]:
    """The directory's members by name."""
    url = world.system.redis.url
    async with asyncio.timeout(20):
        found = await members(url, lambda seen: len(seen) == len(NODES))
    return {member.name: member for member in found}


def doors(member: Member) -> dict[int | str, str]:
    """The engine's addresses, with the address that a handshake there must name."""
    name = socket_address(member.incarnation, SOCKET).decode()[1:]
    port = int(member.engine_address.rpartition(":")[2])
    return {port: member.engine_address, name: THIS_HOST}


def claim(purpose: bytes, source: Member, puller: str, address: str, secret: str | None) -> Dialer:
    """A dialer that claims to be a live puller, or a gateway of that name, for a live source."""
    key = ClusterSecret(secret).dialing_key
    return Dialer(key, purpose, dialer=puller, listener=source.incarnation, address=address)


def recorded_at(member: Member) -> list[str]:
    """The messages of a gateway with the secret in a successful handshake by TCP."""
    ours = claim(GATEWAY, member, "9" * 32, member.engine_address, SECRET)
    host, _, port = member.engine_address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(ours.opening)
        challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        answer = ours.answer(challenge)
        connection.sendall(answer)
        assert connection.recv(4, socket.MSG_WAITALL) == bytes(4)  # accepted
    return [ours.opening.hex(), answer.hex()]


@pytest.mark.parametrize("who", ["intruder", pytest.param("kin", marks=pytest.mark.slow)])
def test_an_engine_says_nothing_to_who_does_not_know_the_secret(world: World, who: str) -> None:
    """An engine sends nothing to a stranger, and keeps the link of the peer whose incarnation is
    claimed."""
    attacker: Intruder = getattr(world, who)
    engines = asyncio.run(members_by_name(world))
    source, puller = engines["prefill-0"], engines["decode-0"].incarnation
    before = {name: len(world.system.processes[name].printed) for name in NODES}
    dispatch = node_pb2.GatewayMessage(dispatch=node_pb2.Dispatch(request_id="r"))
    for where, address in doors(source).items():
        attempts = {
            "nothing": [],
            "no handshake": [os.urandom(500).hex()],
            "a dispatch": [encode_payload(dispatch.SerializeToString()).hex()],
            "an answer first": [os.urandom(32).hex()],
            "what was recorded": recorded_at(source),
        }
        for purpose in (GATEWAY, PULLER):
            for secret in (None, "a guess"):
                ours = claim(purpose, source, puller, address, secret)
                attempts[f"{purpose!r} with {secret}"] = [ours.opening.hex(), bytes(32).hex()]
        for what, payloads in attempts.items():
            came = attacker.do("knock", where=where, payloads=payloads)
            assert came["how"] in ("end", "ConnectionResetError", "BrokenPipeError"), (what, came)
            if what == "what was recorded" and isinstance(where, int):
                assert len(bytes.fromhex(came["received"])) == CHALLENGE_BYTES
            else:
                assert not came["received"], "not even a proof to test guesses against"
    asyncio.run(world.until_linked(*NODES))
    for name in NODES:
        printed = world.system.processes[name].printed[before[name] :]
        assert not [line for line in printed if "Traceback" in line]
        assert not [line for line in printed if "the link with puller" in line]
        assert not [line for line in printed if "the link with source" in line]
    asyncio.run(world.serves_right())


@pytest.mark.parametrize(
    ("is_local", "who"),
    [
        pytest.param(False, "intruder", id="tcp-intruder", marks=pytest.mark.slow),
        pytest.param(True, "kin", id="unix-kin"),
        pytest.param(False, "kin", id="tcp-kin", marks=pytest.mark.slow),
        pytest.param(True, "intruder", id="unix-intruder", marks=pytest.mark.slow),
    ],
)
def test_a_flood_of_strangers_at_an_engine_disturbs_nobody(
    world: World, who: str, is_local: bool
) -> None:
    """Requests complete under 1,000 connections a second, half of them silent and half with invalid
    data."""
    attacker: Intruder = getattr(world, who)
    engines = asyncio.run(members_by_name(world))
    source, puller = engines["prefill-0"], engines["decode-0"].incarnation
    where, address = list(doors(source).items())[is_local]
    junk = claim(PULLER, source, puller, address, "a guess").opening.hex()
    before = {name: len(process.printed) for name, process in world.system.processes.items()}

    async def attack() -> tuple[dict[str, Any], int]:
        how = {"where": where, "words": junk, "per_s": 1000, "for_s": 2}
        order = asyncio.to_thread(attacker.do, "pester", **how)
        flooding, num_rounds = asyncio.create_task(order), 0
        while not flooding.done():
            await world.serves_right()
            num_rounds += 1
        return await flooding, num_rounds

    came, num_rounds = asyncio.run(attack())
    assert num_rounds >= 1
    assert not came["received"]
    assert sum(came["how"].values()) > 1000
    for name, process in world.system.processes.items():
        printed = process.printed[before[name] :]
        assert not [line for line in printed if "Traceback" in line or "the link with" in line], (
            name
        )
        assert not [line for line in printed if "no heartbeat" in line or "closed the" in line], (
            name
        )


# --- the addresses of a dead node -----------------------------------------------------------------


@dataclass(frozen=True)
class Killed:
    """A dead node, its entry in Redis from before, and a live node of its role."""

    dead: Member
    entry: bytes
    live: Member


@pytest.fixture(scope="module")
def killed(world: World) -> Killed:
    """Killed when the first test requests it; the last test starts it again."""
    engines = asyncio.run(members_by_name(world))
    dead = engines["prefill-2"]
    with redis.Redis.from_url(world.system.redis.url) as reader:
        entry = reader.get(f"baton:{CLUSTER}:member:{dead.incarnation}")
    world.system.kill(dead.name)
    return Killed(dead, entry, engines["prefill-0"])


def test_at_a_dead_node_s_places_nobody_gets_anything_nor_passes_it_on(
    world: World, killed: Killed
) -> None:
    """The process at these addresses sends a challenge of its own, or relays to a live node: it
    receives no more than openings, and cannot authenticate."""
    dead, live = killed.dead, killed.live
    port = int(dead.address.rpartition(":")[2])
    challenge = said_by(node_pb2.GetMembersResponse, os.urandom(64))[0]
    order = {"challenge": challenge, "relay_to": live.address}
    assert world.intruder.do("listen", port=port, **order) == port
    at_live = list(doors(live))
    for where, relay_to in zip(doors(dead), at_live, strict=True):
        how = {"challenge": os.urandom(64).hex(), "relay_to": relay_to}
        world.intruder.do("sit", where=where, **how)
    local = list(doors(dead))[1]

    def at(where: int | str) -> list[dict[str, Any]]:
        return [each for each in world.intruder.do("notes") if each.get("where") == where]

    async def until_dialled() -> None:
        """Wait for dials by gateway and puller, who find another user there; the entry lives for 6
        s."""
        async with asyncio.timeout(6):
            while len(at(local)) < 4:
                await world.serves_right()

    asyncio.run(until_dialled())
    key = ClusterSecret(SECRET).dialing_key

    def num_calls() -> int:
        return sum("method" in each for each in world.intruder.do("notes"))

    for number in (1, 2):
        while num_calls() < number:  # a port that was just bound may refuse the first call
            with pytest.raises((NodeLost, Unauthenticated)):
                asyncio.run(
                    fetch_members(
                        ClusterSecret(SECRET), None, NodeAddress(dead.address, Role.PREFILL)
                    )
                )
        for purpose in (GATEWAY, PULLER):
            ends = {"dialer": "9" * 32, "listener": dead.incarnation}
            for address, expected in (
                (dead.engine_address, (NodeLost, Unauthenticated)),
                (None, HandoffFailed),
            ):
                with pytest.raises(expected):
                    dial(purpose, key, **ends, address=address)

    def num_passed_on() -> int:
        notes = world.intruder.do("notes")
        return sum("where" in each and each["forwarded"] is not None for each in notes)

    until_s = time.monotonic() + 5
    while num_passed_on() < 2 and time.monotonic() < until_s:  # a live node may be slow to refuse
        time.sleep(0.05)
    received = world.intruder.do("deaf")
    calls = [each for each in received if "method" in each]
    assert len(calls) == 2
    for call in calls:
        for payload in map(bytes.fromhex, call["messages"]):
            message = MESSAGES[call["method"]].FromString(payload)
            assert [each.name for each, _ in message.ListFields()] == ["handshake"]
            Opening.unpack(message.handshake)
        assert not [pair for pair in call["metadata"] if SECRET in pair]
    (relayed,) = [call["forwarded"] for call in calls if call["forwarded"]]
    assert relayed["code"] == "UNAUTHENTICATED"
    assert relayed["details"] == "the handshake is for another address"
    assert not relayed["received"]
    visits = [each for each in received if "where" in each]
    assert not [visit for visit in visits if visit["where"] == local and visit["payload"]]
    by_tcp = [visit for visit in visits if visit["where"] != local and visit["payload"]]
    assert len(by_tcp) == 4
    for visit in by_tcp:
        Opening.unpack(bytes.fromhex(visit["payload"]))  # and no further data
    forwarded = [visit["forwarded"] for visit in by_tcp if visit["forwarded"]]
    assert len(forwarded) == 2
    assert not [each for each in forwarded if each["received"]]


@pytest.mark.slow
async def test_what_was_in_redis_makes_no_member_again(world: World, killed: Killed) -> None:
    """A dead node's old entries, stored again with a TTL and without, among junk, are ignored; then
    the node returns."""
    prefix = f"baton:{CLUSTER}:member:"
    old = killed.dead.incarnation
    assert decode_entry(killed.entry, ClusterSecret(SECRET)).member.incarnation == old
    with redis.Redis.from_url(world.system.redis.url) as writer:
        live = next(writer.get(key) for key in writer.keys(f"{prefix}*") if old not in key.decode())
        async with asyncio.timeout(10):
            while writer.exists(prefix + old):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with writer.pipeline() as pipe:
            for number in range(6000):
                pipe.set(f"{prefix}{number:032x}", b"junk")
                pipe.zadd(f"baton:{CLUSTER}:listed", {f"{number:032x}": 2e12})
            pipe.set(prefix + old, killed.entry, px=60_000)
            pipe.set(prefix + "e" * 32, killed.entry)
            pipe.set(prefix + "f" * 32, live, px=60_000)
            for name in (old, "e" * 32, "f" * 32):
                pipe.zadd(f"baton:{CLUSTER}:listed", {name: writer.time()[0] * 1000})
                pipe.publish(f"baton:{CLUSTER}:members", name)
            pipe.execute()
    world.system.restart_dead()
    assert await asyncio.to_thread(lambda: world.address("prefill-2"))
    engines = await world.until_linked(*NODES)
    assert engines["prefill-2"].incarnation != old
    newcomer = RedisDirectory(RedisClient(world.system.redis.url, CLUSTER, ClusterSecret(SECRET)))
    expected = {engine.incarnation for engine in engines.values()}
    async with asyncio.timeout(10):
        async for members in newcomer.watch():
            found = {member.incarnation for member in members}
            assert found <= expected
            if found == expected:
                break
    await newcomer.close()
    await world.serves_right()


async def test_who_knows_the_secret_is_still_served(world: World) -> None:
    """A client with the secret is served: otherwise a node that refuses everybody would pass these
    tests."""
    (source,) = [e for e in (await world.engines()).values() if e.name == "prefill-0"]
    async with session(source.incarnation) as opened:
        await opened.until(lambda: opened.num_heartbeats > 0)
