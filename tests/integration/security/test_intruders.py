"""Attacks on a deployment that has a cluster secret and API keys, by a process of another user.

One cluster for all: the order of the tests is that of its life. The intruder knows every address
and method, and what was recorded or lies in Redis; it does not know the secret.
"""

from __future__ import annotations

import asyncio
import json
import os
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
from node_driver import CLUSTER, OUR_MARK, SECRET, session

from baton.cli.cluster.survey import ask_ledgers
from baton.client import AsyncClient
from baton.client.messages import NodeInfo
from baton.cluster.link_handshake import ANY_ENGINE, HANDOFF, LEDGERS, MEMBERS, SESSION
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret, operator_key
from baton.core.channels.handshake import OPENING_BYTES, Dialer, Opening
from baton.gateway.security.key_file import add_key
from baton.proto.v1 import handoff_pb2, node_pb2, node_pb2_grpc

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user"
)

NODES = ("prefill-0", "prefill-2", "decode-0")
SESSIONS = "/baton.v1.Node/Session"
LINKS = "/baton.v1.Handoff/Link"
LEDGER = "/baton.v1.Node/GetLedgers"
ENGINES = "/baton.v1.Node/GetMembers"
MESSAGES: dict[str, Any] = {
    SESSIONS: node_pb2.GatewayMessage,
    LINKS: handoff_pb2.PeerMessage,
    LEDGER: node_pb2.GetLedgersRequest,
    ENGINES: node_pb2.GetMembersRequest,
}
REFUSALS = {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED"}
PROMPTS = [f"What is said under prompt {number} stays between us. " * 4 for number in range(6)]


@dataclass
class World:
    """The cluster, who attacks it, and what is right: `expected` by prompt, from before."""

    system: Cluster
    intruder: Intruder
    key: str
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stale: bytes = b""  # the entry of the node that was killed

    def address(self, name: str) -> str:
        return self.system.processes[name].address

    def client(self, key: str | None = None) -> AsyncClient:
        return AsyncClient(self.address("gateway-0"), api_key=key or self.key)

    async def engines(self) -> dict[str, NodeInfo]:
        """As the gateway has them, by name."""
        async with self.client(operator_key(SECRET)) as client:
            nodes = (await client.model_info()).nodes
        by_name = {node.name: node for node in nodes}
        assert len(by_name) == len(nodes), "two of one name"
        return by_name

    async def until_linked(self, *names: str) -> dict[str, NodeInfo]:
        """Wait until the gateway has these engines and no others, each puller its sources."""
        async with asyncio.timeout(20):
            while True:
                with suppress(Exception):  # the gateway may just be starting
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
        cluster(model_dir, "gateway-0", *NODES, gateway_0=keys) as system,
    ):
        world = World(system, attacker, key)
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
    """The live puller's incarnation claims to dial a live source, with a key of one's own."""
    purposes = {SESSIONS: SESSION, LINKS: HANDOFF, LEDGER: LEDGERS, ENGINES: MEMBERS}
    engines = asyncio.run(world.engines())
    listener = ANY_ENGINE if method in (LEDGER, ENGINES) else engines[node].incarnation
    dialer = Dialer(
        ClusterSecret(secret).dialing_key,
        purposes[method],
        dialer=engines["decode-0"].incarnation,
        listener=listener,
        address=world.address(node),
    )
    (message,) = said_by(MESSAGES[method], dialer.opening)
    return message


class Recording:
    """A call that notes what is written to it."""

    def __init__(self, call: Any, written: list[str]) -> None:
        self._call, self._written = call, written
        self.read, self.cancel = call.read, call.cancel

    async def write(self, message: Any) -> None:
        self._written.append(message.SerializeToString().hex())
        await self._call.write(message)


@pytest.fixture(scope="module")
def recorded(world: World) -> list[str]:
    """A dialer's messages of a handshake with prefill-0 that passed."""
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
    """An error, of which nothing about the inside can be learnt."""
    assert answer["code"] in REFUSALS, answer
    text = f"{answer['details']} {answer['metadata']}"
    raw = b"".join(map(bytes.fromhex, answer["received"]))
    for secret in world.inside():
        assert secret not in text
        assert secret.encode() not in raw
        with suppress(ValueError):
            assert bytes.fromhex(secret) not in raw


# --- calls without the secret ---------------------------------------------------------------------


@pytest.mark.parametrize("method", [SESSIONS, LINKS, LEDGER, ENGINES])
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
    assert not [line for line in world.system.processes["prefill-0"].said if "Traceback" in line]


async def test_a_recorded_handshake_is_good_for_a_challenge_and_no_more(
    world: World, recorded: list[str]
) -> None:
    address = world.address("prefill-0")
    answer = world.intruder.do("say", address=address, method=LEDGER, messages=recorded)
    assert answer["code"] == "UNAUTHENTICATED"
    assert len(answer["received"]) == 1


def test_who_claims_a_live_peer_s_incarnation_does_not_end_its_link(world: World) -> None:
    before = list(world.system.processes["decode-0"].said)
    for secret in (None, "a guess"):
        for node in ("prefill-0", "prefill-2"):
            claim = opening(world, LINKS, node, secret)
            answer = world.intruder.do(
                "say", address=world.address(node), method=LINKS, messages=[claim]
            )
            check_silent(world, answer)
    asyncio.run(world.until_linked(*NODES))
    said = world.system.processes["decode-0"].said[len(before) :]
    assert not [line for line in said if "no link to" in line]
    asyncio.run(world.serves_right())


def test_another_user_reads_neither_the_secret_nor_redis(world: World) -> None:
    socket = world.system.redis.folder / "redis.sock"
    assert world.intruder.do("look", path=str(socket)) == "PermissionError"
    for process in world.system.processes.values():
        folder = f"/proc/{process.process.pid}"
        assert world.intruder.do("look", path=f"{folder}/environ") == "PermissionError"
        shown = world.intruder.do("look", path=f"{folder}/cmdline")
        assert "--cluster" in shown
        assert SECRET not in shown


def test_a_flood_of_strangers_does_not_end_what_runs(world: World) -> None:
    """Half of 2,000 say nothing and half something wrong: 64 may be pending, for 2 s each."""
    junk = opening(world, SESSIONS, "prefill-0", "a guess")

    async def ask_meanwhile(flooding: asyncio.Task[Any]) -> int:
        num_rounds = 0
        while not flooding.done():
            await world.serves_right()
            num_rounds += 1
        return num_rounds

    async def attack() -> tuple[dict[str, int], int]:
        how = {"address": world.address("prefill-0"), "method": SESSIONS, "message": junk}
        order = asyncio.to_thread(world.intruder.do, "flood", per_s=1000, for_s=2, **how)
        flooding = asyncio.create_task(order)
        num_rounds = await ask_meanwhile(flooding)
        return await flooding, num_rounds

    codes, num_rounds = asyncio.run(attack())
    assert num_rounds >= 1
    # INTERNAL is grpc.aio's own, of a write to a stream that the node has ended.
    assert codes.keys() <= {*REFUSALS, "INTERNAL", "UNAVAILABLE"}, codes
    assert codes["RESOURCE_EXHAUSTED"] > 0, "beyond those that may be pending"
    assert sum(codes.values()) > 1000
    asyncio.run(world.until_linked(*NODES))


# --- a dead node's place --------------------------------------------------------------------------


def test_at_a_dead_node_s_port_nobody_gets_anything_nor_passes_it_on(world: World) -> None:
    """What binds it answers with a challenge of its own, or relays to a live node."""
    dead, live = world.address("prefill-2"), world.address("prefill-0")
    challenge = said_by(node_pb2.NodeMessage, os.urandom(64))[0]
    incarnation = asyncio.run(world.engines())["prefill-2"].incarnation
    with redis.Redis.from_url(world.system.redis.url) as reader:
        world.stale = reader.get(f"baton:{CLUSTER}:member:{incarnation}")
    world.system.kill("prefill-2")
    port = int(dead.rpartition(":")[2])
    order = {"challenge": challenge, "relay_to": live}
    assert world.intruder.do("listen", port=port, **order) == port

    def relayed(heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [call for call in heard if call["forwarded"]]

    async def until_dialled() -> None:
        """By gateway and puller, each twice; the entry counts for 6 s."""
        async with asyncio.timeout(6):
            while {call["method"] for call in relayed(world.intruder.do("notes"))} != {
                SESSIONS,
                LINKS,
            }:
                await world.serves_right()

    asyncio.run(until_dialled())
    heard = world.intruder.do("deaf")
    for call in heard:
        for said in map(bytes.fromhex, call["messages"]):
            message = MESSAGES[call["method"]].FromString(said)
            assert [each.name for each, _ in message.ListFields()] == ["handshake"]
            Opening.unpack(message.handshake)
            assert b"What is said" not in said
        assert not [pair for pair in call["metadata"] if SECRET in pair]
    for call in relayed(heard):
        answer = call["forwarded"]
        assert answer["code"] == "UNAUTHENTICATED"
        assert answer["details"] == "the handshake is for another address"
        assert not answer["received"]


@pytest.mark.slow
async def test_what_was_in_redis_makes_no_member_again(world: World) -> None:
    """Old entries put back, with a TTL and without, among junk; then the node comes back."""
    prefix = f"baton:{CLUSTER}:member:"
    old = json.loads(world.stale)["incarnation"]
    with redis.Redis.from_url(world.system.redis.url) as writer:
        live = next(writer.get(key) for key in writer.keys(f"{prefix}*") if old not in key.decode())
        async with asyncio.timeout(10):
            while writer.exists(prefix + old):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with writer.pipeline() as pipe:
            for number in range(6000):
                pipe.set(f"{prefix}{number:032x}", b"junk")
            pipe.set(prefix + old, world.stale, px=60_000)
            pipe.set(prefix + "e" * 32, world.stale)
            pipe.set(prefix + "f" * 32, live, px=60_000)
            for name in (old, "e" * 32, "f" * 32):
                pipe.publish(f"baton:{CLUSTER}:members", name)
            pipe.execute()
    world.system.restart_dead()
    assert await asyncio.to_thread(lambda: world.address("prefill-2"))
    engines = await world.until_linked(*NODES)
    assert engines["prefill-2"].incarnation != old
    newcomer = RedisDirectory(world.system.redis.url, CLUSTER, ClusterSecret(SECRET))
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
    """The tests above would pass with a node that refuses everybody."""
    (source,) = [e for e in (await world.engines()).values() if e.name == "prefill-0"]
    async with session(source.incarnation) as opened:
        await opened.until(lambda: opened.num_heartbeats > 0)
