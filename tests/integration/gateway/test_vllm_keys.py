"""vLLM's gRPC service with API keys. Skipped where the extra `smg` is not installed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes.gateway.byte_model import write_byte_model
from fakes.node.node import FakeNode, expected_text
from google.protobuf.runtime_version import VersionError

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.redis_server import RedisServer
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.membership import Role
from baton.gateway.process.server import serve
from baton.gateway.security.key_file import add_key

try:
    from smg_grpc_proto import vllm_engine_pb2 as vllm
    from smg_grpc_proto import vllm_engine_pb2_grpc
    from smg_grpc_proto.generated import common_pb2
except (ImportError, VersionError) as error:
    pytest.skip(f"smg-grpc-proto: {error}", allow_module_level=True)

PROMPT, NUM_TOKENS = "hello", 5
REQUESTS = {
    "Generate": vllm.GenerateRequest(text=PROMPT, sampling_params={"max_tokens": NUM_TOKENS}),
    "Abort": vllm.AbortRequest(request_ids=["r"]),
    "GetModelInfo": vllm.GetModelInfoRequest(),
    "GetServerInfo": vllm.GetServerInfoRequest(),
    "GetTokenizer": common_pb2.GetTokenizerRequest(),
    "GetLoads": vllm.GetLoadsRequest(),
}
OPEN_TO = {name: "reader" if name == "GetLoads" else "acme" for name in REQUESTS}


@dataclass
class World:
    """A gateway that requires keys, and a stub of its service."""

    stub: Any
    keys: dict[str, str]
    decode: FakeNode

    def call(self, method: str, key: str | None, request: Any = None, **options: Any) -> Any:
        metadata = [] if key is None else [("authorization", f"Bearer {self.keys.get(key, key)}")]
        ask = getattr(self.stub, method)
        return ask(REQUESTS[method] if request is None else request, metadata=metadata, **options)

    async def answers(self, method: str, key: str | None, request: Any = None) -> list[Any]:
        """All messages of a call; raises AioRpcError."""
        call = self.call(method, key, request)
        return [answer async for answer in call] if hasattr(call, "__aiter__") else [await call]

    async def error(self, method: str, key: str | None, request: Any = None) -> tuple[Any, Any]:
        """The status and trailers of a refused call."""
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.answers(method, key, request)
        return refused.value.code(), dict(refused.value.trailing_metadata() or ())


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture
async def world(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[World]:
    infer, key_file = frozenset({"infer"}), tmp_path / "keys.json"
    keys = {name: add_key(key_file, name, infer) for name in ("acme", "globex")}
    keys["reader"] = add_key(key_file, "reader", frozenset({"metrics"}))
    keys["foreign"] = add_key(key_file, "foreign", infer, models=frozenset({"another"}))
    for name, limit in (
        ("hasty", "requests_per_minute"), ("busy", "max_concurrent_requests"),
    ):  # fmt: skip
        keys[name] = add_key(key_file, name, infer, limits={limit: 1})
    keys["frugal"] = add_key(key_file, "frugal", infer, limits={"tokens_per_minute": 300})
    model = write_byte_model(tmp_path / "demo")
    config = GatewayConfig(grpc_port=0, http_port=0, model=str(model), api_keys=str(key_file))
    cluster = ClusterConfig(redis_server.url, f"c{time.monotonic_ns()}", None)
    gateway = await serve(config, cluster)
    directory = RedisDirectory(RedisClient(redis_server.url, cluster.cluster))
    prefill = FakeNode(Role.PREFILL, "p", "1" * 32)
    decode = FakeNode(Role.DECODE, "d", "2" * 32, [prefill.incarnation])
    for node in (prefill, decode):
        await node.start()
        await directory.announce(node.member, 30.0)
    await asyncio.wait_for(gateway.startup_lines(), 5)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
        yield World(vllm_engine_pb2_grpc.VllmEngineStub(channel), keys, decode)
    await gateway.stop(grace_s=0.0)
    await directory.close()
    for node in (prefill, decode):
        await node.kill()


async def test_who_has_no_good_key_gets_nothing(world: World) -> None:
    for key in (None, "bk-wrong", "x" * 600, ""):
        for method in REQUESTS:
            status, trailers = await world.error(method, key)
            assert status is grpc.StatusCode.UNAUTHENTICATED, (method, key)
            assert trailers["baton-error-code"] == "unauthenticated"
    twice = [("authorization", f"Bearer {world.keys['acme']}")] * 2
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.stub.GetModelInfo(vllm.GetModelInfoRequest(), metadata=twice)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not world.decode.dispatched
    assert (await world.stub.HealthCheck(vllm.HealthCheckRequest())).healthy, "open to all"


async def test_keys_open_what_their_scopes_say(world: World) -> None:
    for method, name in OPEN_TO.items():
        assert await world.answers(method, name)
        other = "acme" if name == "reader" else "reader"
        assert (await world.error(method, other))[0] is grpc.StatusCode.PERMISSION_DENIED
    complete = (await world.answers("Generate", "acme"))[-1].complete
    assert bytes(complete.output_ids).decode() == expected_text(PROMPT, NUM_TOKENS)
    assert (await world.error("Embed", "acme", vllm.EmbedRequest()))[0] is (
        grpc.StatusCode.UNIMPLEMENTED
    )


async def test_a_model_that_is_another_tenant_s_does_not_exist(world: World) -> None:
    for method in ("Generate", "GetModelInfo", "GetServerInfo", "GetTokenizer"):
        status, trailers = await world.error(method, "foreign")
        assert (status, trailers["baton-error-code"]) == (
            grpc.StatusCode.NOT_FOUND,
            "model_not_found",
        )


async def test_a_tenant_over_its_limit_is_told_when_to_come_again(world: World) -> None:
    await world.answers("Generate", "hasty")
    status, trailers = await world.error("Generate", "hasty")
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailers["baton-error-code"] == "rate_limit_exceeded"
    assert 50_000 < int(trailers["retry-after-ms"]) <= 60_000
    assert trailers["grpc-retry-pushback-ms"] == trailers["retry-after-ms"]
    await world.answers("Generate", "acme")


async def test_one_request_at_a_time(world: World) -> None:
    world.decode.token_s = 0.01
    request = vllm.GenerateRequest(text=PROMPT, stream=True, sampling_params={"max_tokens": 400})
    running = world.call("Generate", "busy", request)
    await running.read()
    assert (await world.error("Generate", "busy"))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    running.cancel()
    async with asyncio.timeout(20):
        while not world.decode.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await world.answers("Generate", "busy")


async def test_tokens_that_were_not_generated_are_given_back(world: World) -> None:
    world.decode.token_s = 0.005
    for num_cancelled in (1, 2):  # each may use most of a minute's token budget
        request = vllm.GenerateRequest(
            text=PROMPT, stream=True, sampling_params={"max_tokens": 200}
        )
        call = world.call("Generate", "frugal", request)
        await call.read()
        call.cancel()
        async with asyncio.timeout(20):
            while len(world.decode.cancelled) < num_cancelled:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    request = vllm.GenerateRequest(text=PROMPT, sampling_params={"max_tokens": 200})
    await world.answers("Generate", "frugal", request)
    assert (await world.error("Generate", "frugal", request))[0] is (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )


async def test_only_its_own_calls_are_a_tenant_s_to_abort(world: World) -> None:
    world.decode.token_s = 0.01
    request = vllm.GenerateRequest(
        text=PROMPT, request_id="mine", stream=True, sampling_params={"max_tokens": 400}
    )
    running = world.call("Generate", "acme", request)
    await running.read()
    abort = vllm.AbortRequest(request_ids=["mine"])
    await world.answers("Abort", "globex", abort)
    before = time.monotonic()
    assert await running.read() is not grpc.aio.EOF
    await world.answers("Abort", "acme", abort)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while await running.read() is not grpc.aio.EOF:
            pass
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    assert time.monotonic() - before < 3
