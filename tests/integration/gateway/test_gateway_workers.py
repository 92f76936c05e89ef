"""`--workers 2` as processes: one address, all metrics, a killed worker, a clean end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from fakes.gateway.byte_model import write_byte_model
from fakes.gateway.gateway_process import PROGRAM, GatewayProcess, gateway_process, until_links
from fakes.node.node import expected_text

from baton.client import AsyncClient
from baton.cluster.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CALLS = 24
BODY = {"model": "demo", "prompt": "hello", "max_tokens": 20, "temperature": 0}


@dataclass
class World:
    """Two workers under their parent."""

    gateway: GatewayProcess

    @asynccontextmanager
    async def http(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Each request has a connection of its own, and so a worker by chance."""
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(20)
        async with aiohttp.ClientSession(
            self.gateway.base, connector=connector, timeout=timeout
        ) as http:
            yield http

    async def calls(self, count: int) -> list[str]:
        async with self.http() as http:

            async def one() -> str:
                async with http.post("/v1/completions", json=BODY) as answer:
                    assert answer.status == 200, await answer.text()
                    return str((await answer.json())["choices"][0]["text"])

            return await asyncio.gather(*(one() for _ in range(count)))

    async def finished(self) -> dict[str, float]:
        """Calls that finished, by worker."""
        async with self.http() as http, http.get("/metrics") as answer:
            text = await answer.text()
        found = {}
        for name in re.findall(r'process_resident_memory_bytes\{worker="(\d)"\}', text):
            pattern = rf'baton_request_success_total\{{.*worker="{name}"\}} (\S+)'
            found[name] = sum(float(value) for value in re.findall(pattern, text))
        assert text.count("# TYPE baton_request_success") == 1
        return found

    def workers(self) -> list[int]:
        return children_of(self.gateway.pid)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("model") / "demo")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    """For all tests that leave it whole."""
    async with started(redis_server, model_dir) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def ending(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    """To be ended by its test."""
    async with started(redis_server, model_dir) as world:
        yield world


@asynccontextmanager
async def started(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    flags = ("--workers", "2")
    async with gateway_process(redis_server.url, model_dir, *flags, num_links=2) as process:
        yield World(process)


async def test_all_serve_and_one_tells_of_all(world: World) -> None:
    before = await world.finished()
    assert await world.calls(NUM_CALLS) == [expected_text("hello", 20)] * NUM_CALLS
    async with AsyncClient(world.gateway.grpc) as client:
        found = [chunk async for chunk in client.generate("hello", max_tokens=20)]
        assert "".join(chunk.text for chunk in found) == expected_text("hello", 20)
    finished = await world.finished()
    assert set(finished) == set(before) == {"0", "1"}
    counts = [finished[worker] - before[worker] for worker in finished]
    assert sum(counts) == NUM_CALLS + 1
    assert min(counts) > 0  # one chance in 2^23 that the kernel deals otherwise


async def test_an_abort_reaches_calls_of_every_worker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.gateway.decode, "token_s", 0.05)
    async with world.http() as http, AsyncClient(world.gateway.grpc) as client:

        async def one() -> str:
            body = BODY | {"max_tokens": 400, "stream": True}
            headers = {"X-Request-ID": "mine"}
            async with http.post("/v1/completions", json=body, headers=headers) as answer:
                started.release()
                return await answer.text()

        started = asyncio.Semaphore(0)
        calls = [asyncio.create_task(one()) for _ in range(8)]
        for _ in calls:
            await started.acquire()
        assert await client.abort("mine") == 8
        for text in await asyncio.gather(*calls):
            last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
            assert last["error"]["code"] == "cancelled"


async def test_a_killed_worker_comes_back_and_the_other_never_went(world: World) -> None:
    dead, other = world.workers()
    os.kill(dead, signal.SIGKILL)
    await until_links(world.gateway.decode, 1)
    assert await world.calls(8) == [expected_text("hello", 20)] * 8
    await until_links(world.gateway.decode, 2)
    assert other in world.workers() and dead not in world.workers()
    assert set(await world.finished()) == {"0", "1"}


async def test_a_worker_that_hangs_is_replaced(world: World) -> None:
    """And the other is not."""
    hung, other = world.workers()
    os.kill(hung, signal.SIGSTOP)
    began_s = time.monotonic()
    while hung in world.workers():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert 1.0 < time.monotonic() - began_s < 2.5
    while len(world.workers()) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await until_links(world.gateway.decode, 2)
    assert await world.calls(NUM_CALLS) == [expected_text("hello", 20)] * NUM_CALLS
    assert other in world.workers()


@pytest.mark.slow
async def test_a_parent_that_hangs_for_a_while_kills_nobody(world: World) -> None:
    workers = world.workers()
    os.kill(world.gateway.pid, signal.SIGSTOP)
    await asyncio.sleep(3)
    os.kill(world.gateway.pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert world.workers() == workers


async def test_streams_end_before_the_workers_do(ending: World) -> None:
    ending.gateway.decode.token_s = 0.02
    async with ending.http() as http:
        body = BODY | {"max_tokens": 50, "stream": True}
        async with http.post("/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            ending.gateway.process.terminate()
            assert (await answer.text()).endswith("data: [DONE]\n\n")
    async with asyncio.timeout(10):
        assert await ending.gateway.process.wait() == 0
    await until_links(ending.gateway.decode, 0)


async def test_workers_end_with_their_parent(ending: World) -> None:
    workers = ending.workers()
    ending.gateway.process.kill()
    await until_links(ending.gateway.decode, 0)
    async with asyncio.timeout(10):
        while any(map(is_alive, workers)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_taken_port_is_said_at_once(redis_server: RedisServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        began_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *PROGRAM, "--workers", "2", "--grpc-port", "0"),
            *("--http-port", str(taken.getsockname()[1]), "--redis-url", redis_server.url),
            stderr=asyncio.subprocess.PIPE,
        )
        _, words = await process.communicate()
    assert process.returncode == 1 and time.monotonic() - began_s < 5
    assert b"cannot listen" in words and b"--http-port" in words
