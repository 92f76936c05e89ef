"""A gateway under overload: readers that stop, deadlines that cannot be met, a shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from fakes.gateway.byte_model import write_byte_model
from fakes.gateway.gateway_process import GatewayProcess, gateway_process
from fakes.gateway.step_costs import linear_cost_message
from fakes.node.node import HEARTBEAT_S, expected_text

from baton.cluster.redis_server import RedisServer
from baton.proto.v1 import inference_pb2, inference_pb2_grpc

BODY = {"model": "demo", "prompt": "hello", "temperature": 0, "stream": True}
NUM_STALLED, NUM_READERS = 4, 4
MAX_GROWTH_BYTES = 16 << 20


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture
async def gateway(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    model_dir = write_byte_model(tmp_path / "demo")
    async with gateway_process(redis_server.url, model_dir) as process:
        yield process


async def read_all(http: aiohttp.ClientSession, max_tokens: int) -> str:
    """The text of a stream."""
    body = BODY | {"max_tokens": max_tokens}
    async with http.post("/v1/completions", json=body) as answer:
        events = (await answer.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events[-3:]
    found = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return "".join(event["choices"][0]["text"] for event in found)


def stalled(gateway: GatewayProcess) -> socket.socket:
    """A client that requests eight samples and reads none of them."""
    host, _, port = gateway.base.removeprefix("http://").rpartition(":")
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect((host, int(port)))
    body = json.dumps(BODY | {"max_tokens": 450, "n": 8}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    plain.sendall(head.encode() + body)
    return plain


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def test_readers_that_stop_cost_little_and_nobody_else(gateway: GatewayProcess) -> None:
    gateway.decode.token_s = 0.004
    async with aiohttp.ClientSession(gateway.base) as http:
        assert await read_all(http, 50) == expected_text("hello", 50)
        before = resident_bytes(gateway.pid)
        sockets = [stalled(gateway) for _ in range(NUM_STALLED)]
        texts = await asyncio.gather(*(read_all(http, 450) for _ in range(NUM_READERS)))
        assert set(texts) == {expected_text("hello", 450)}
        async with asyncio.timeout(15):
            while len({name for name, *_ in gateway.decode.cancelled}) < 8 * NUM_STALLED:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert resident_bytes(gateway.pid) - before < MAX_GROWTH_BYTES
    for plain in sockets:
        plain.close()


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(gateway: GatewayProcess) -> None:
    gateway.prefill.first_token_s = 0.2
    gateway.prefill.step_cost = linear_cost_message(0.0, 0.001)
    requests = [inference_pb2.GenerateRequest(text=f"{n}" + "x" * 199) for n in range(5)]
    for request in requests:
        request.sampling.max_tokens = 2
    first, last, *others = requests
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        generate = inference_pb2_grpc.InferenceStub(channel).Generate  # type: ignore[no-untyped-call]
        assert [chunk async for chunk in generate(first, timeout=5)]
        await asyncio.sleep(2 * HEARTBEAT_S)  # the gateway has the step cost by then
        running = [asyncio.create_task(generate(one, timeout=5).read()) for one in others]
        await asyncio.sleep(0.05)
        began_s = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(last, timeout=0.4).read()
        assert time.monotonic() - began_s < 0.4, "before its deadline"
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(refused.value.trailing_metadata() or ())
        assert 100 <= int(trailers["retry-after-ms"]) <= 2000
        assert trailers["grpc-retry-pushback-ms"] == trailers["retry-after-ms"]
        await asyncio.gather(*running)


async def test_prompts_that_come_at_once_are_judged_one_by_one(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    model_dir = write_byte_model(tmp_path / "demo")
    prompts = [f"{n:02}" + "x" * 198 for n in range(9)]
    async with (
        gateway_process(redis_server.url, model_dir, "--max-queue-s", "2") as gateway,
        aiohttp.ClientSession(gateway.base) as http,
    ):
        gateway.prefill.first_token_s = 0.2  # all arrive before the first response
        gateway.prefill.step_cost = linear_cost_message(0.0, 0.006)  # 1.2 s a prompt

        async def status(prompts: list[str]) -> int:
            body = {"model": "demo", "prompt": prompts, "max_tokens": 2}
            async with http.post("/v1/completions", json=body) as answer:
                await answer.read()
                return answer.status

        assert await status(prompts[:1]) == 200
        await asyncio.sleep(2 * HEARTBEAT_S)  # the gateway has the step cost by then
        assert await status(prompts[1:]) == 429
        assert len(gateway.prefill.dispatched) <= 1 + 3, "one of them has time enough"


async def test_while_it_ends_streams_go_on_and_new_calls_go_elsewhere(
    gateway: GatewayProcess,
) -> None:
    gateway.decode.token_s = 0.02
    async with aiohttp.ClientSession(gateway.base) as http:
        async with http.post("/v1/completions", json=BODY | {"max_tokens": 60}) as stream:
            await stream.content.readuntil(b"\n\n")
            gateway.process.terminate()
            await asyncio.sleep(0.2)
            async with http.post("/v1/completions", json=BODY | {"max_tokens": 5}) as late:
                assert late.status == 503
                assert late.headers["Connection"] == "close"
                assert int(late.headers["Retry-After"]) >= 1
                assert (await late.json())["error"]["code"] == "unavailable"
            async with http.get("/ready") as ready:
                assert ready.status == 503
            assert (await stream.text()).endswith("data: [DONE]\n\n")
        async with asyncio.timeout(20):
            assert await gateway.process.wait() == 0
