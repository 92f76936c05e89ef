"""Redis is killed, and so are engines: gateway and puller find the new engines through their nodes.

One cluster for all tests, which run in this order.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import grpc
import pytest
from deployments import marked_processes
from fault_scenes.fault_cluster import Cluster, cluster, write_model
from node_driver import OUR_MARK, SECRET, health, members, wait_idle
from patience import SOON_S

from baton.client import AsyncClient
from baton.cluster.entries import decode_entry
from baton.cluster.known_nodes import ACCEPTED, NodeAddress, fetch_members
from baton.cluster.secret import ClusterSecret
from baton.core.errors import BatonError, NodeLost, Unauthenticated, Unavailable
from baton.core.membership import Role
from baton.proto.v1 import node_pb2, node_pb2_grpc

NODES = ("prefill-0", "decode-0")
FOUND_S = 10.0  # up to 1 s until a node is queried, then the links, on a busy machine
PROMPT = "What is said goes on without a directory. " * 4


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model_dir = write_model(tmp_path_factory.mktemp("model"))
    with cluster(model_dir, "gateway-0", *NODES) as running:
        yield running
    assert not marked_processes(OUR_MARK)


async def answer(system: Cluster, within_s: float) -> tuple[int, ...]:
    """The tokens of a new request; retried while there is no pair of engines."""
    async with asyncio.timeout(within_s), AsyncClient(system.processes["gateway-0"].address) as to:
        while True:
            with suppress(Unavailable):
                result = await to.generate(PROMPT, max_tokens=24, temperature=0.0).finish()
                return result.token_ids
            await asyncio.sleep(0.05)


async def kill_engines(system: Cluster, *names: str) -> None:
    """Kill the engines, and wait until the nodes have started new ones."""
    async with AsyncExitStack() as stack:
        healths = [
            await stack.enter_async_context(health(system.processes[name].address))
            for name in names
        ]
        for become in healths:
            await become(True)
        for name in names:
            system.kill(name, "engine")
        for become in healths:
            await become(False)
            await become(True)


async def engines_of(system: Cluster, name: str, secret: str | None = SECRET) -> list[str]:
    """The incarnations that a node returns to a caller with this secret."""
    ask = partial(fetch_members, ClusterSecret(secret), None)
    entries = await ask(NodeAddress(system.processes[name].address, Role(name.partition("-")[0])))
    return [decode_entry(entry, ClusterSecret(SECRET)).member.incarnation for entry in entries]


async def test_a_node_names_its_engines_to_who_knows_the_secret_alone(system: Cluster) -> None:
    listed = {m.incarnation for m in await members(system.redis.url, lambda found: len(found) == 2)}
    assert {each for name in NODES for each in await engines_of(system, name)} == listed
    for secret in (None, "a guess"):
        with pytest.raises((Unauthenticated, NodeLost), match="for another process"):
            await engines_of(system, "decode-0", secret)


async def test_engines_that_start_again_are_found_without_redis(system: Cluster) -> None:
    expected = await answer(system, within_s=30)
    system.redis.process.kill()
    system.redis.process.wait()
    before = [await engines_of(system, name) for name in NODES]
    await kill_engines(system, *NODES)
    began_s = time.monotonic()
    assert await answer(system, within_s=FOUND_S) == expected
    print(f"answered {time.monotonic() - began_s:.2f} s after the last engine was ready")
    after = [await engines_of(system, name) for name in NODES]
    assert not [old for old, new in zip(before, after, strict=True) if set(old) & set(new)]


@pytest.mark.slow
async def test_redis_that_is_back_empty_and_dies_again_changes_nothing(system: Cluster) -> None:
    expected = await answer(system, within_s=30)
    system.redis.start_again()
    await members(system.redis.url, lambda found: len(found) == 2)
    assert await answer(system, within_s=FOUND_S) == expected
    system.redis.process.kill()
    system.redis.process.wait()
    await kill_engines(system, "prefill-0")
    assert await answer(system, within_s=FOUND_S) == expected
    system.redis.start_again()
    await members(system.redis.url, lambda found: len(found) == 2)
    assert await answer(system, within_s=FOUND_S) == expected
    await wait_idle(*(system.processes[name].address for name in NODES))


# --- a foreign process at a node's address --------------------------------------------------------

Talk = Callable[[AsyncIterator[Any], Any], Awaitable[None]]


async def end_at_once(requests: AsyncIterator[Any], context: Any) -> None:
    pass


async def refuse(requests: AsyncIterator[Any], context: Any) -> None:
    await context.abort(grpc.StatusCode.INTERNAL, "no")


async def accept_without_a_proof(requests: AsyncIterator[Any], context: Any) -> None:
    await anext(requests)
    for payload in (os.urandom(64), ACCEPTED):
        await context.write(node_pb2.GetMembersResponse(handshake=payload))
    await context.write(node_pb2.GetMembersResponse(entries=[b"junk"]))


async def answer_without_a_handshake(requests: AsyncIterator[Any], context: Any) -> None:
    await context.write(node_pb2.GetMembersResponse(entries=[b"junk"]))


async def say_nothing(requests: AsyncIterator[Any], context: Any) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    "talk",
    [end_at_once, refuse, accept_without_a_proof, answer_without_a_handshake, say_nothing],
)
async def test_who_does_not_prove_itself_is_not_heard(talk: Talk) -> None:
    class Impostor(node_pb2_grpc.NodeServicer):
        async def GetMembers(self, requests: AsyncIterator[Any], context: Any) -> None:
            await talk(requests, context)

    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServicer_to_server(Impostor(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    began_s = time.monotonic()
    with pytest.raises(BatonError):
        await fetch_members(
            ClusterSecret(SECRET), None, NodeAddress(f"127.0.0.1:{port}", Role.DECODE)
        )
    assert time.monotonic() - began_s < SOON_S
    await server.stop(None)
