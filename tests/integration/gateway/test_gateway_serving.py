"""A real gateway and client over gRPC and a private Redis; the nodes have no engines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from fakes.directory import FakeDirectory
from fakes.gateway.byte_model import write_byte_model
from fakes.node.node import FakeNode, expected_text
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from patience import AT_ONCE_S, SOON_S

from baton.client import AsyncClient, Client, FinishReason
from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.redis_server import RedisServer
from baton.cluster.secret import ClusterSecret
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.errors import (
    BatonError,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PromptTooLarge,
    StartupFailed,
    Unavailable,
)
from baton.core.membership import Role
from baton.core.ports import Clock
from baton.core.process import event_loop
from baton.core.request.timeline import TERMINAL, Event
from baton.gateway.adapters.adapter_registry import AdapterRegistry
from baton.gateway.admission import front_door
from baton.gateway.engines.cluster_view import ClusterView
from baton.gateway.engines.engine_table import EngineTable
from baton.gateway.http.dashboard.snapshot import SnapshotFeed
from baton.gateway.moves.mover import RequestMover
from baton.gateway.process.server import Gateway, serve
from baton.gateway.promises.promise_leader import PromiseLeader
from baton.gateway.request.session_table import SessionTable
from baton.gateway.request.setbacks import SessionLimits
from baton.gateway.security.caller import INFER, Caller
from baton.gateway.telemetry.calls.call_record import CallRecord
from baton.gateway.telemetry.metrics.tally import Tally
from baton.gateway.telemetry.window.window_share import WindowShare
from baton.prefix_index.mirror import PrefixMirror
from baton.prefix_index.redis_link import RedisIndexLink
from baton.proto.v1 import inference_pb2, inference_pb2_grpc

SECRET = "test secret"
PROMPT = "hello"


@dataclass
class World:
    """One gateway, its Redis, one prefill and two decode nodes, a client."""

    redis: RedisServer
    cluster: ClusterConfig
    config: GatewayConfig
    gateway: Gateway
    directory: RedisDirectory
    client: AsyncClient
    nodes: dict[str, FakeNode] = field(default_factory=dict)

    async def add(self, name: str, role: Role, **options: object) -> FakeNode:
        number = len(self.nodes) + 1
        sources = [n.incarnation for n in self.nodes.values() if n.role is Role.PREFILL]
        node = FakeNode(role, name, f"{number:032x}", sources, secret=SECRET, **options)  # type: ignore[arg-type]
        self.nodes[name] = await node.start()
        await self.directory.announce(node.member, 5.0)
        return node


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture
async def empty(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    """A gateway without nodes."""
    cluster = ClusterConfig(redis_server.url, f"c{time.monotonic_ns()}", SECRET)
    config = GatewayConfig(grpc_port=0, http_port=0, model=str(model_dir), max_num_requests=8)
    limits = SessionLimits(recovery_wait_s=0.3, avoid_s=0.1)
    gateway = await serve(config, cluster, session_limits=limits)
    directory = RedisDirectory(
        RedisClient(cluster.redis_url, cluster.cluster, ClusterSecret(SECRET))
    )
    client = AsyncClient(f"127.0.0.1:{gateway.port}")
    world = World(redis_server, cluster, config, gateway, directory, client)
    yield world
    await client.close()
    await gateway.stop(grace_s=0.0)
    await directory.close()
    await until(lambda: not any(node.num_sessions for node in world.nodes.values()))
    for node in world.nodes.values():
        await node.kill()


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a condition that another task will make true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def world(empty: World) -> World:
    await empty.add("p1", Role.PREFILL)
    await empty.add("d1", Role.DECODE)
    await empty.add("d2", Role.DECODE)
    await until(lambda: all(node.num_sessions for node in empty.nodes.values()))
    await asyncio.wait_for(empty.gateway.startup_lines(), 20)
    return empty


async def test_streams_have_turns_between_what_is_asked_and_what_is_sent_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, num_turns, noted = asyncio.get_running_loop(), 0, []

    def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        if len(noted) < 2:
            loop.call_soon(turn)

    def noting(what: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            noted.append(num_turns)
            return what(*args, **more)

        return call

    monkeypatch.setattr(front_door, "validated", noting(front_door.validated))
    monkeypatch.setattr(SessionTable, "start", noting(SessionTable.start))
    turn()
    result = await world.client.generate(PROMPT, max_tokens=2).finish()
    assert result.text == expected_text(PROMPT, 2)
    requested, sent_out = noted
    assert sent_out - requested >= 3


async def until_cancelled(node: FakeNode, began_s: float) -> float:
    """Wait until a Cancel has reached the node; returns the seconds since `began_s`."""
    await until(lambda: bool(node.cancelled))
    return node.cancelled[-1][2] - began_s


def decode_node_of(world: World) -> FakeNode:
    return next(n for n in world.nodes.values() if n.role is Role.DECODE and n.dispatched)


async def test_stream(world: World) -> None:
    generation = world.client.generate(PROMPT, max_tokens=20, temperature=0.0, seed=5)
    chunks = [chunk async for chunk in generation]
    result = generation.result
    assert "".join(chunk.text for chunk in chunks) == result.text == expected_text(PROMPT, 20)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.prompt_tokens, result.completion_tokens) == (len(PROMPT), 20)
    assert (result.prefill_node, result.seed, result.attempts) == ("p1", 5, 1)
    assert result.decode_node in ("d1", "d2")
    assert result.transfer_bytes == 4096
    assert len(result.times.token_s) == 20
    events = [stamp.event for stamp in result.timeline]
    assert events[:2] == [Event.ARRIVED, Event.ROUTED] and events[-1] is Event.FINISHED
    assert sum(event in TERMINAL for event in events) == 1


async def test_prompts_as_ids_and_requests_that_end_on_the_prefill_node(world: World) -> None:
    generation = world.client.generate(prompt_token_ids=list(PROMPT.encode()), max_tokens=1)
    result = await generation.finish()
    assert result.text == expected_text(PROMPT, 1)
    assert (result.decode_node, result.transport) == (None, None)
    await until_cancelled(decode_node_of(world), time.monotonic())


@pytest.mark.parametrize("num_samples", [1, 2])
async def test_who_leaves_with_all_that_came_has_cancelled_nothing(
    world: World, num_samples: int
) -> None:
    """A client may leave with the last chunk before its front has noticed that it was written: the
    call does not count as cancelled."""
    wire = inference_pb2.GenerateRequest(text=PROMPT, n=num_samples)
    wire.sampling.max_tokens = 3
    records: list[CallRecord] = []
    is_written = asyncio.Event()

    async def front() -> None:
        caller = Caller("", frozenset({INFER}), "grpc")
        async with world.gateway._door.generate(wire, caller) as call:
            records.append(call.record)
            async for chunk in call.chunks():
                if chunk.result is not None:
                    is_written.set()
                    await asyncio.Event().wait()

    task = asyncio.create_task(front())
    await is_written.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [record] = records
    if num_samples == 1:
        assert record.error is None and record.num_delivered_tokens == 3
    else:
        assert isinstance(record.error, Cancelled), "the other sample is still to come"


async def test_stop_strings_end_at_the_gateway(world: World) -> None:
    decode_s = 0.005
    for name in ("d1", "d2"):
        world.nodes[name].token_s = decode_s
    whole = expected_text(PROMPT, 100)
    result = await world.client.generate(PROMPT, max_tokens=100, stop=[whole[10:14]]).finish()
    assert (result.text, result.matched_stop) == (whole[:10], whole[10:14])
    assert (result.finish_reason, result.completion_tokens) == (FinishReason.STOP, 14)
    await until_cancelled(decode_node_of(world), time.monotonic())


async def test_many_at_once_spread_over_the_nodes(world: World) -> None:
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.01
    prompts = [f"prompt {i}" for i in range(7)]
    results = await asyncio.gather(
        *(world.client.generate(prompt, max_tokens=15).finish() for prompt in prompts)
    )
    assert [r.text for r in results] == [expected_text(prompt, 15) for prompt in prompts]
    assert {r.decode_node for r in results} == {"d1", "d2"}


async def test_the_blocking_client(world: World) -> None:
    address = f"127.0.0.1:{world.gateway.port}"

    def use() -> None:
        with Client(address) as client:
            assert client.generate(PROMPT, max_tokens=9).result.text == expected_text(PROMPT, 9)
            ids = client.tokenize("é <|end|>")
            assert ids == (0xC3, 0xA9, 0x20, 256)
            assert client.detokenize(ids) == "é "
            info = client.model_info()
            assert (info.model, info.max_model_len, info.eos_token_ids) == ("demo", 512, (256,))
            assert [(n.name, n.role) for n in info.nodes] == [
                ("d1", "decode"),
                ("d2", "decode"),
                ("p1", "prefill"),
            ]
            assert all(n.address == world.nodes[n.name].member.address for n in info.nodes)
            with pytest.raises(InvalidRequest) as caught:
                client.generate(PROMPT, top_k=-1)
            assert caught.value.param == "top_k"
            prompts = [f"thread {i}" for i in range(6)]
            with ThreadPoolExecutor(3) as threads:
                texts = threads.map(lambda p: client.generate(p, max_tokens=9).result.text, prompts)
            assert list(texts) == [expected_text(prompt, 9) for prompt in prompts]

    await asyncio.to_thread(use)


@pytest.mark.parametrize("way", ["with", "del"])
async def test_leaving_a_blocking_stream(world: World, way: str) -> None:
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.02

    def use() -> float:
        with Client(f"127.0.0.1:{world.gateway.port}") as client:
            generation = client.generate(PROMPT, max_tokens=200)
            next(generation)
            left_s = time.monotonic()
            if way == "with":
                with generation:
                    pass
                with pytest.raises(Cancelled):
                    next(generation)
            else:
                del generation
            asyncio.run_coroutine_threadsafe(until(node_is_told), loop).result()
            return left_s

    def node_is_told() -> bool:
        return any(node.cancelled for node in world.nodes.values())

    loop = asyncio.get_running_loop()
    left_s = await asyncio.to_thread(use)
    assert await until_cancelled(decode_node_of(world), left_s) < AT_ONCE_S


@pytest.mark.parametrize("way", ["disconnect", "cancel", "break", "abort", "deadline"])
async def test_leaving_early_reaches_the_nodes(world: World, way: str) -> None:
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.02
    generation = world.client.generate(
        PROMPT, max_tokens=200, request_id="mine", timeout_s=0.3 if way == "deadline" else None
    )
    async for _chunk in generation:
        break
    began_s = time.monotonic()
    if way == "disconnect":
        await world.client.close()
    elif way == "cancel":
        generation.cancel()
        with pytest.raises(Cancelled):
            await generation.finish()
    elif way == "break":
        del generation
    elif way == "abort":
        assert await world.client.abort("mine", "unknown") == 1
        with pytest.raises(Cancelled):
            await generation.finish()
        assert await world.client.abort("mine") == 0
    else:
        with pytest.raises(DeadlineExceeded):
            await generation.finish()
        began_s = time.monotonic()
    assert await until_cancelled(decode_node_of(world), began_s) < AT_ONCE_S


@pytest.mark.parametrize(
    ("params", "error", "param"),
    [
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": 508}, ContextLengthExceeded, "max_tokens"),
        ({"temperature": float("nan")}, InvalidRequest, "temperature"),
        ({"top_p": 0.0}, InvalidRequest, "top_p"),
        ({"stop": ["a", ""]}, InvalidRequest, "stop[1]"),
        ({"seed": 2**63}, InvalidRequest, "seed"),
        ({"prompt": None, "prompt_token_ids": [1, 264]}, InvalidRequest, "prompt[1]"),
        ({"prompt": None, "prompt_token_ids": []}, InvalidRequest, "prompt"),
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({"prompt": None}, InvalidRequest, "prompt"),
        ({"model": "other"}, ModelNotFound, "model"),
    ],
)
async def test_bad_requests_are_answered(
    world: World, params: dict[str, object], error: type[BatonError], param: str
) -> None:
    with pytest.raises(error) as caught:
        await world.client.generate(**({"prompt": PROMPT} | params)).finish()  # type: ignore[arg-type]
    assert (type(caught.value), caught.value.param) == (error, param)
    assert not world.nodes["p1"].dispatched


async def test_garbage_bytes_are_answered(world: World) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{world.gateway.port}") as channel:
        call = channel.unary_stream("/baton.v1.Inference/Generate")
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call(b"\xff" * 20):
                pass
    result = await world.client.generate(PROMPT, max_tokens=2).finish()
    assert result.completion_tokens == 2


async def test_a_prompt_for_no_pool(empty: World) -> None:
    await empty.add("p1", Role.PREFILL, num_blocks=4)
    await empty.add("d1", Role.DECODE)
    await asyncio.wait_for(empty.gateway.startup_lines(), 20)
    with pytest.raises(PromptTooLarge):
        await empty.client.generate("x" * 33, max_tokens=1).finish()


async def test_no_nodes(empty: World) -> None:
    with pytest.raises(Unavailable, match="no prefill and no decode node is ready"):
        await empty.client.generate(PROMPT, max_tokens=2).finish()
    await empty.add("p1", Role.PREFILL)
    with pytest.raises(Unavailable, match="no decode node is ready"):
        await empty.client.generate(PROMPT, max_tokens=2).finish()


async def test_a_request_waits_for_the_first_nodes(empty: World) -> None:
    finishing = asyncio.create_task(empty.client.generate(PROMPT, max_tokens=3).finish())
    await asyncio.sleep(0.05)
    await empty.add("p1", Role.PREFILL)
    await empty.add("d1", Role.DECODE)
    assert (await finishing).text == expected_text(PROMPT, 3)


async def test_health_tells_when_it_can_serve(
    empty: World, caplog: pytest.LogCaptureFixture
) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, 2
    async with grpc.aio.insecure_channel(f"127.0.0.1:{empty.gateway.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == serving
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
        assert (await watch.read()).status == not_serving
        await empty.add("p1", Role.PREFILL)
        decode = await empty.add("d1", Role.DECODE)
        assert (await asyncio.wait_for(watch.read(), 2)).status == serving
        await decode.kill()
        assert (await asyncio.wait_for(watch.read(), 2)).status == not_serving
        watch.cancel()
    assert "not ready: no decode node is ready" in caplog.text


@pytest.mark.parametrize("lost", ["decode", "prefill"])
async def test_a_lost_node_is_replaced_under_the_stream(world: World, lost: str) -> None:
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.01
    generation = world.client.generate(PROMPT, max_tokens=40)
    text, victim = "", None
    async for chunk in generation:
        text += chunk.text
        if len(text) >= 10 and victim is None:
            victim = decode_node_of(world) if lost == "decode" else world.nodes["p1"]
            await victim.kill()
    result = generation.result
    assert text == result.text == expected_text(PROMPT, 40)
    assert result.attempts == (2 if lost == "decode" else 1), "KV that is over needs no source"
    if lost == "decode":
        assert result.decode_node != victim.name


async def test_each_loss_of_an_engine_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Each loss of an engine is logged, even if a new link succeeds and is lost for the same
    reason."""
    node, engines = world.nodes["d1"], world.gateway._table.engines
    for num_losses in (1, 2):
        node.is_silent = True
        await until(lambda: node.incarnation not in engines)
        node.is_silent = False
        await until(lambda: node.incarnation in engines)
        printed = [line for line in caplog.text.splitlines() if "no heartbeat" in line]
        assert len(printed) == num_losses


async def test_engines_that_do_not_answer_are_tried_until_they_are_not_listed() -> None:
    clock = Clock()
    directory, table = FakeDirectory(), EngineTable(PrefixMirror(clock))
    sessions, secret = SessionTable(clock, 1), ClusterSecret(SECRET)
    adapters = AdapterRegistry(table, "demo")
    view = ClusterView(
        directory, "demo", secret, clock, table, sessions, lambda: None, 1.2, adapters.linked
    )
    following = asyncio.create_task(view.run())
    node = await FakeNode(Role.DECODE, "d", "1" * 32, secret=SECRET).start()
    await node.kill()
    await directory.announce(node.member, 5.0)
    await asyncio.sleep(0.1)
    node.is_silent = True
    await node.start()
    await until(lambda: view.is_starting(node.incarnation))
    assert (table.engines, view.members()) == ({}, [node.member])
    node.is_silent = False
    await until(lambda: bool(table.engines))
    assert not view.is_starting(node.incarnation)
    await directory.withdraw(node.incarnation)
    await node.kill()
    await until(lambda: not table.engines)
    await asyncio.sleep(0.3)
    await node.start()
    await asyncio.sleep(0.3)
    assert (table.engines, view.members()) == ({}, [])
    following.cancel()
    await view.close()
    await node.kill()


async def test_a_node_that_comes_back_is_linked_again(world: World) -> None:
    for name in ("p1", "d1", "d2"):
        await world.nodes[name].kill()
        await world.nodes[name].start()
    result = None
    async with asyncio.timeout(20):
        while result is None:  # this gateway waits 0.3 s for a node, which may take longer
            with suppress(Unavailable):
                result = await world.client.generate(PROMPT, max_tokens=4).finish()
    assert result.text == expected_text(PROMPT, 4)


async def test_a_silent_node_is_taken_for_lost(world: World) -> None:
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.01
    generation = world.client.generate(PROMPT, max_tokens=60)
    began_s = 0.0
    async for chunk in generation:
        if chunk.index >= 5 and not began_s:  # chunks may have several tokens
            decode_node_of(world).is_silent = True
            began_s = time.monotonic()
    assert generation.result.text == expected_text(PROMPT, 60)
    assert generation.result.attempts == 2
    pause_s = max(generation.result.times.gaps_s)
    assert time.monotonic() - began_s > pause_s
    assert 1.0 < pause_s < SOON_S


async def test_a_pause_of_the_gateway_is_no_fault_of_the_nodes(world: World) -> None:
    """During a pause of this process heartbeats stay unread in its sockets: no node is declared
    dead."""
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.01
    generation = world.client.generate(PROMPT, max_tokens=30)
    has_paused = False
    async for chunk in generation:
        if chunk.index >= 5 and not has_paused:
            has_paused = True
            time.sleep(1.4)  # noqa: ASYNC251
    assert generation.result.text == expected_text(PROMPT, 30)
    assert generation.result.attempts == 1


async def test_failed_handoffs_are_tried_elsewhere_then_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.nodes["d1"].error = HandoffFailed("the wire is cut")
    results = [await world.client.generate(PROMPT, max_tokens=4).finish() for _ in range(20)]
    assert {r.text for r in results} == {expected_text(PROMPT, 4)}
    assert 2 in {r.attempts for r in results}
    world.nodes["d2"].error = HandoffFailed("the wire is cut")
    with pytest.raises(HandoffFailed, match="could not be transferred"):
        await world.client.generate(PROMPT, max_tokens=4).finish()
    assert "the wire is cut" in caplog.text, "the operator reads what the caller is not told"


async def test_the_only_decode_node_lost(world: World) -> None:
    await world.nodes["d2"].kill()
    world.nodes["d1"].token_s = 0.01
    generation = world.client.generate(PROMPT, max_tokens=100)
    is_killed = False
    with pytest.raises(Unavailable, match="no decode node is ready"):
        async for chunk in generation:
            if chunk.index >= 3 and not is_killed:  # chunks may have several tokens
                is_killed = True
                await world.nodes["d1"].kill()


async def test_serving_goes_on_without_redis(model_dir: Path, empty: World) -> None:
    with RedisServer.start() as doomed:
        cluster = ClusterConfig(doomed.url, "c", SECRET)
        directory = RedisDirectory(RedisClient(doomed.url, "c", ClusterSecret(SECRET)))
        gateway = await serve(empty.config, cluster)
        world = World(doomed, cluster, empty.config, gateway, directory, empty.client)
        await world.add("p1", Role.PREFILL)
        await world.add("d1", Role.DECODE)
        await asyncio.wait_for(gateway.startup_lines(), 5)
        doomed.process.kill()
        doomed.process.wait()
        async with AsyncClient(f"127.0.0.1:{gateway.port}") as client:
            for _ in range(10):
                result = await client.generate(PROMPT, max_tokens=5).finish()
                assert result.text == expected_text(PROMPT, 5)
        await gateway.stop(0.0)
        await directory.close()
        for node in world.nodes.values():
            await node.kill()


async def test_members_of_another_secret_or_model_are_left_alone(empty: World) -> None:
    stranger = FakeNode(Role.PREFILL, "p", "f" * 32, model="other", secret=SECRET)
    await stranger.start()
    await empty.directory.announce(stranger.member, 5.0)
    forger = RedisDirectory(
        RedisClient(empty.cluster.redis_url, empty.cluster.cluster, ClusterSecret("wrong"))
    )
    forged = await FakeNode(Role.PREFILL, "q", "e" * 32).start()
    await forger.announce(forged.member, 5.0)
    liar = FakeNode(Role.PREFILL, "r", "d" * 32, secret=SECRET)
    await liar.start()
    await empty.directory.announce(liar.member, 5.0)
    liar.max_model_len, liar.incarnation = 64, "c" * 32
    await empty.add("d1", Role.DECODE)
    await asyncio.sleep(0.2)
    ready = [node.name for node in (await empty.client.model_info()).nodes if node.is_ready]
    assert ready == ["d1"]
    await forger.close()
    for node in (stranger, forged, liar):
        await node.kill()


async def test_a_vanished_entry_does_not_cut_a_living_link(world: World) -> None:
    for node in world.nodes.values():
        await world.directory.withdraw(node.incarnation)
    await asyncio.sleep(0.1)
    result = await world.client.generate(PROMPT, max_tokens=4).finish()
    assert result.text == expected_text(PROMPT, 4)
    assert len((await world.client.model_info()).nodes) == 3


async def test_too_many_requests(world: World) -> None:
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.05
    running = [world.client.generate(PROMPT, max_tokens=400) for _ in range(7)]
    for generation in running:
        await anext(generation)
    with pytest.raises(Overloaded):
        await world.client.generate(PROMPT, max_tokens=4).finish()
    for generation in running:
        generation.cancel()
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(Overloaded):
                await world.client.generate(PROMPT, max_tokens=4).finish()
                break


async def test_counting_that_fails_costs_no_call(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(*_: object) -> None:
        raise ZeroDivisionError("a bug of our own")

    monkeypatch.setattr(Tally, "count", raises)
    for _ in range(2 * world.config.max_num_requests):  # no request keeps its slot
        result = await world.client.generate(PROMPT, max_tokens=3).finish()
        assert result.text == expected_text(PROMPT, 3)
    with pytest.raises(ModelNotFound):
        await world.client.generate(PROMPT, model="other").finish()
    for what in ("count", "count_ended"):
        (line,) = (r for r in caplog.records if f"CallCounts.{what} failed" in r.getMessage())
        assert line.exc_info is not None and "a bug of our own" in str(line.exc_info[1])


async def test_a_reader_that_does_not_read(empty: World) -> None:
    await empty.add("p1", Role.PREFILL, num_blocks=20_000, max_model_len=200_000)
    decode = await empty.add("d1", Role.DECODE, num_blocks=20_000, max_model_len=200_000)
    await asyncio.wait_for(empty.gateway.startup_lines(), 20)
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    address = f"127.0.0.1:{empty.gateway.port}"
    async with grpc.aio.insecure_channel(address, options) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(text=PROMPT)
        request.sampling.max_tokens = 100_000
        call = stub.Generate(request)
        await call.read()
        await until_cancelled(decode, time.monotonic())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await empty.client.abort("") == 0


async def test_stop_lets_requests_end_and_refuses_new_ones(world: World) -> None:
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.01
    generation = world.client.generate(PROMPT, max_tokens=30)
    await anext(generation)
    stopping = asyncio.create_task(world.gateway.stop(grace_s=2.0))
    await asyncio.sleep(0.05)
    with pytest.raises(Unavailable):
        await world.client.generate(PROMPT, max_tokens=2).finish()
    assert (await generation.finish()).text == expected_text(PROMPT, 30)
    await stopping


async def test_who_stops_in_a_hurry_tells_whom_it_cuts_off(world: World) -> None:
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.02
    generation = world.client.generate(PROMPT, max_tokens=200)
    await anext(generation)
    hurry = asyncio.Event()
    stopping = asyncio.create_task(world.gateway.stop(60.0, hurry))
    await anext(generation)
    hurry.set()
    with pytest.raises(Unavailable, match="shutting down"):
        await generation.finish()
    async with asyncio.timeout(20):
        await stopping


async def test_port_taken(world: World) -> None:
    config = GatewayConfig(grpc_port=world.gateway.port, http_port=0, model=world.config.model)
    with pytest.raises(StartupFailed, match=str(world.gateway.port)) as caught:
        await serve(config, world.cluster)
    assert "--grpc-port" in caught.value.hint


async def test_the_process_around_it(world: World) -> None:
    """The process prints its address, and exits cleanly on a signal."""
    config = f"GatewayConfig(grpc_port=0, http_port=0, model={world.config.model!r})"
    cluster = f"ClusterConfig({world.cluster.redis_url!r}, {world.cluster.cluster!r}, {SECRET!r})"
    program = (
        "import asyncio, sys; from baton.gateway.process.server import run; "
        "from baton.core.config import ClusterConfig, GatewayConfig; "
        f"sys.exit(asyncio.run(run({config}, {cluster})))"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode().split()
    assert line[:3] == ["ready:", "gateway", "gateway"]
    async with AsyncClient(line[-1]) as client:
        result = await client.generate(PROMPT, max_tokens=4).finish()
    assert result.text == expected_text(PROMPT, 4)
    process.terminate()
    stdout, printed = await process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in printed
    assert b"draining\n" in stdout


async def test_reflection_names_the_service(empty: World) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{empty.gateway.port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await stub.ServerReflectionInfo(iter([request])).read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= names


async def test_no_gateway_at_all() -> None:
    with socket.socket() as deaf:  # bound but not listening: refuses connections
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        async with AsyncClient(address) as client:
            with pytest.raises(Unavailable):
                await client.generate(PROMPT).finish()
        with Client(address) as blocking, pytest.raises(Unavailable):
            await asyncio.to_thread(blocking.model_info)


async def test_more_than_can_be_decoded_at_once_waits_here(world: World) -> None:
    """Two decode engines have one slot each: further prompts wait at the gateway before their
    prefill."""
    for name in ("d1", "d2"):
        world.nodes[name].token_s = 0.01
        world.nodes[name].max_num_seqs = 1
        await world.nodes[name].kill()
        await world.nodes[name].start()
    engines = world.gateway._table.engines
    await until(lambda: [e.welcome.max_num_seqs for e in engines.values()].count(1) == 2)
    await until(lambda: len(engines) == 3)
    running = [
        asyncio.create_task(world.client.generate(PROMPT, max_tokens=30).finish()) for _ in range(6)
    ]
    queue = world.gateway._sessions.queue
    await until(lambda: len(world.nodes["p1"].dispatched) == 2 and len(queue) > 0)
    results = await asyncio.gather(*running)
    assert all(result.text == expected_text(PROMPT, 30) for result in results)
    (caller_id,) = {d.caller_id for d in world.nodes["p1"].dispatched}
    assert caller_id and not len(world.gateway._sessions.queue)
    for name in ("d1", "d2"):
        assert world.nodes[name].most_requests == 1


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (ClusterView, "_list"),
        (PrefixMirror, "take"),
        (AdapterRegistry, "_exchange"),
        (WindowShare, "turn"),
        (PromiseLeader, "turn"),
        (RequestMover, "look"),
        (SnapshotFeed, "tick"),
    ],
)
async def test_a_part_of_a_gateway_that_breaks_once_goes_on(
    empty: World, monkeypatch: pytest.MonkeyPatch, part: type[object], name: str
) -> None:
    monkeypatch.setattr(event_loop, "AGAIN_S", 0.0)
    whole, num_calls = getattr(part, name), 0

    def break_once(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise ZeroDivisionError
        return whole(*arguments)

    monkeypatch.setattr(part, name, break_once)
    await empty.add("p1", Role.PREFILL)
    redis = RedisClient(empty.cluster.redis_url, empty.cluster.cluster, ClusterSecret(SECRET))
    index = RedisIndexLink(redis)
    async with asyncio.timeout(10):
        while num_calls < 2:
            await index.publish([b"junk"])
            await empty.directory.withdraw(empty.nodes["p1"].incarnation)
            await empty.directory.announce(empty.nodes["p1"].member, 5.0)
            await asyncio.sleep(0.01)
    await redis.close()
    assert not any(task.done() for task in empty.gateway._tasks)
    await until(lambda: bool(empty.gateway._table.engines))


async def test_a_link_whose_end_breaks_its_keeper_is_opened_again(
    empty: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link is opened again after an exception in its task; the directory does not change, so no
    other event would cause it."""
    monkeypatch.setattr(event_loop, "AGAIN_S", 0.0)
    node = await empty.add("p1", Role.PREFILL)
    await until(lambda: bool(empty.gateway._table.engines))
    whole = empty.gateway._sessions.engine_lost
    broken: list[str] = []

    def break_once(incarnation: str, *, has_died: bool) -> None:
        if not broken:
            broken.append(incarnation)
            raise ZeroDivisionError
        whole(incarnation, has_died=has_died)

    monkeypatch.setattr(empty.gateway._sessions, "engine_lost", break_once)
    await node.kill()
    await until(lambda: bool(broken))
    await node.start()
    await until(lambda: bool(empty.gateway._table.engines))
