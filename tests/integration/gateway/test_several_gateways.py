"""`launch_gateway --num-gateways 2` as processes: shared ports, an address for each, a killed and a
hung gateway, a clean shutdown; and gateways that share a port only by `--reuse-port`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from deployments import free_port
from fakes.gateway.byte_model import write_byte_model
from fakes.gateway.gateway_process import PROGRAM, GatewayProcess, gateway_process, until_links
from fakes.node.node import expected_text
from patience import AT_ONCE_S
from preloaded.starts import children_of

from baton.client import AsyncClient
from baton.cluster.redis_server import RedisServer
from baton.core.errors import Cancelled
from baton.core.process.event_loop import HUNG_S

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_CALLS = 24
BODY = {"model": "demo", "prompt": "hello", "max_tokens": 20, "temperature": 0}
TEXT = expected_text("hello", 20)


@dataclass
class World:
    """Two gateways under their parent."""

    gateway: GatewayProcess

    @asynccontextmanager
    async def http(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Each request has a new connection, which the kernel assigns to one of the gateways."""
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
        """The number of finished calls by each gateway's own address."""
        found = {}
        async with self.http() as http:
            for name, url in self.gateway.alone.items():
                async with http.get(f"{url}/metrics") as answer:
                    text = await answer.text()
                values = re.findall(r"baton_request_success_total\{.*\} (\S+)", text)
                found[name] = sum(map(float, values))
                assert text.count("# TYPE baton_request_success") == 1
        return found

    def gateways(self) -> list[int]:
        return children_of(self.gateway.pid)

    async def until_replaced(self, pid: int) -> None:
        """Wait until that process is gone and its replacement is linked."""
        while pid in self.gateways() or len(self.gateways()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await until_links(self.gateway.decode, 2)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("model") / "demo")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    """The world for tests that leave it whole."""
    async with started(redis_server, model_dir) as world:
        yield world


@pytest_asyncio.fixture(loop_scope="module")
async def ending(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    """A world that the test ends."""
    async with started(redis_server, model_dir) as world:
        yield world


@asynccontextmanager
async def started(redis_server: RedisServer, model_dir: Path) -> AsyncIterator[World]:
    flags = ("--num-gateways", "2")
    async with gateway_process(redis_server.url, model_dir, *flags, num_links=2) as process:
        yield World(process)


async def test_all_serve_and_each_has_an_address_of_its_own(world: World) -> None:
    before = await world.finished()
    assert await world.calls(NUM_CALLS) == [TEXT] * NUM_CALLS
    async with AsyncClient(world.gateway.grpc) as client:
        found = [chunk async for chunk in client.generate("hello", max_tokens=20)]
        assert "".join(chunk.text for chunk in found) == TEXT
    finished = await world.finished()
    assert [*finished] == [*before] == ["gateway-0", "gateway-1"]
    counts = [finished[name] - before[name] for name in finished]
    assert sum(counts) == NUM_CALLS + 1
    assert min(counts) > 0  # fails once in 2^23 by the kernel's choice
    async with world.http() as http:
        for url in world.gateway.alone.values():
            for path in ("/ready", "/dashboard"):
                async with http.get(f"{url}{path}") as answer:
                    assert answer.status == 200
            async with http.post(f"{url}/v1/completions", json=BODY) as answer:
                assert answer.status == 200
    after = await world.finished()
    assert after == {name: count + 1 for name, count in finished.items()}


async def test_each_page_shows_the_calls_of_all(world: World) -> None:
    counted = round(sum((await world.finished()).values()))
    await world.calls(NUM_CALLS)
    async with asyncio.timeout(10), world.http() as http:
        for url in world.gateway.alone.values():
            for span_s in (300, 3600):
                shown = 0
                while shown != counted + NUM_CALLS:
                    async with http.get(f"{url}/api/snapshot?span_s={span_s}") as answer:
                        snapshot = await answer.json()
                    shown = snapshot["counts"]["finished"]
                    await asyncio.sleep(0.05)
                assert snapshot["latency"]["ttft"]["num_samples"] == shown
                scope = snapshot["scope"]
                assert scope["is_shared"] and len(scope["gateways"]) == 2
                assert scope["gateways"][0]["name"].endswith(url.rpartition(":")[2])


async def test_an_abort_ends_the_calls_of_its_connection_s_gateway(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gRPC client's calls and its abort use one connection, and so one gateway."""
    monkeypatch.setattr(world.gateway.decode, "token_s", 0.05)
    started = asyncio.Semaphore(0)

    async def over_http(http: aiohttp.ClientSession, url: str) -> str:
        body = BODY | {"max_tokens": 60, "stream": True}
        headers = {"X-Request-ID": "mine"}
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            started.release()
            return await answer.text()

    async with world.http() as http, AsyncClient(world.gateway.grpc) as client:
        urls = world.gateway.alone.values()
        streams = [asyncio.create_task(over_http(http, url)) for url in urls]
        own = client.generate("hello", max_tokens=400, request_id="mine")
        await anext(own)
        for _ in streams:
            await started.acquire()
        assert await client.abort("mine") == 2, "its own, and the other of the same gateway"
        with pytest.raises(Cancelled):
            await own.finish()
        ends = [text.split("\n\n") for text in await asyncio.gather(*streams)]
    assert sorted(end[-2] == "data: [DONE]" for end in ends) == [False, True]
    (cut,) = (end for end in ends if end[-2] != "data: [DONE]")
    assert json.loads(cut[-2].removeprefix("data: "))["error"]["code"] == "cancelled"


async def test_a_killed_gateway_comes_back_and_the_other_never_went(world: World) -> None:
    dead, other = world.gateways()
    os.kill(dead, signal.SIGKILL)
    await until_links(world.gateway.decode, 1)
    assert await world.calls(8) == [TEXT] * 8
    async with asyncio.timeout(15):
        await world.until_replaced(dead)
    assert other in world.gateways() and dead not in world.gateways()
    assert len(await world.finished()) == 2, "at the addresses that they had"


async def test_a_gateway_that_hangs_is_replaced_and_the_other_s_streams_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.gateway.decode, "token_s", 0.1)
    started = asyncio.Semaphore(0)

    async def stream(http: aiohttp.ClientSession, url: str) -> bool:
        """Whether the stream completed."""
        body = BODY | {"max_tokens": 40, "stream": True}
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            started.release()
            with contextlib.suppress(aiohttp.ClientError):
                return (await answer.text()).endswith("data: [DONE]\n\n")
        return False

    async with world.http() as http:
        urls = world.gateway.alone.values()
        streams = [asyncio.create_task(stream(http, url)) for url in urls]
        for _ in streams:
            await started.acquire()
        hung, other = world.gateways()
        os.kill(hung, signal.SIGSTOP)
        began_s = time.monotonic()
        while hung in world.gateways():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert 1.0 < time.monotonic() - began_s < HUNG_S + AT_ONCE_S
        assert sorted(await asyncio.gather(*streams)) == [False, True]
    monkeypatch.undo()
    async with asyncio.timeout(15):
        await world.until_replaced(hung)
    assert await world.calls(NUM_CALLS) == [TEXT] * NUM_CALLS
    assert other in world.gateways()


@pytest.mark.slow
async def test_a_parent_that_hangs_for_a_while_kills_nobody(world: World) -> None:
    gateways = world.gateways()
    os.kill(world.gateway.pid, signal.SIGSTOP)
    await asyncio.sleep(3)
    os.kill(world.gateway.pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert world.gateways() == gateways


async def test_streams_end_before_the_gateways_do(ending: World) -> None:
    ending.gateway.decode.token_s = 0.02
    async with ending.http() as http:
        body = BODY | {"max_tokens": 50, "stream": True}
        async with contextlib.AsyncExitStack() as stack:
            answers = [
                await stack.enter_async_context(http.post(f"{url}/v1/completions", json=body))
                for url in ending.gateway.alone.values()
            ]
            for answer in answers:
                await answer.content.readuntil(b"\n\n")
            ending.gateway.process.terminate()
            for answer in answers:
                assert (await answer.text()).endswith("data: [DONE]\n\n")
    async with asyncio.timeout(10):
        assert await ending.gateway.process.wait() == 0
    await until_links(ending.gateway.decode, 0)


async def test_gateways_end_with_their_parent(ending: World) -> None:
    gateways = ending.gateways()
    ending.gateway.process.kill()
    await until_links(ending.gateway.decode, 0)
    async with asyncio.timeout(10):
        while any(map(is_alive, gateways)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "flags", [("--num-gateways", "2"), pytest.param((), marks=pytest.mark.slow)]
)
async def test_a_taken_port_is_said_at_once(
    redis_server: RedisServer, flags: tuple[str, ...]
) -> None:
    """A port in use is reported at once, even if its owner would share it."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        began_s = time.monotonic()
        port = str(taken.getsockname()[1])
        code, words = await _ends(redis_server, *flags, "--grpc-port", "0", "--http-port", port)
        assert code == 1 and "cannot listen" in words and "--http-port" in words
        if flags:
            assert time.monotonic() - began_s < 5
        code, words = await _ends(redis_server, *flags, "--http-port", "0", "--grpc-port", port)
        assert code == 1 and "cannot listen" in words and "--grpc-port" in words


async def _ends(redis_server: RedisServer, *flags: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *PROGRAM, "--redis-url", redis_server.url, *flags),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    _, words = await process.communicate()
    return process.returncode, words.decode()


async def test_gateways_that_were_started_one_by_one_share_a_port(
    redis_server: RedisServer, model_dir: Path
) -> None:
    """Gateways started separately share a port by --reuse-port, and each has one of its own; a
    gateway whose own port is taken reports it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port, own_port = str(holder.getsockname()[1]), str(free_port())
        shared = ("--reuse-port", "--http-port", port)
        own = ("--own-http-port", own_port)
        async with (
            gateway_process(redis_server.url, model_dir, *shared, *own) as first,
            gateway_process(redis_server.url, model_dir, *shared) as second,
            aiohttp.ClientSession() as http,
        ):
            assert first.base == second.base == f"http://127.0.0.1:{port}"
            for url in (first.base, f"http://127.0.0.1:{own_port}"):
                async with http.post(f"{url}/v1/completions", json=BODY) as answer:
                    assert (await answer.json())["choices"][0]["text"] == TEXT
            code, words = await _ends(redis_server, *shared, "--grpc-port", "0", *own)
            assert code == 1 and "--own-http-port" in words


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_the_kernel_keeps_another_user_off_a_shared_port(world: World) -> None:
    for address in (world.gateway.base.removeprefix("http://"), world.gateway.grpc):
        for host in ("127.0.0.1", "0.0.0.0"):
            port = address.rpartition(":")[2]
            stranger = (
                "import os, socket, sys; os.setuid(65534); s = socket.socket()\n"
                "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
                "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
                f"s.bind(({host!r}, {port}))"
            )
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", stranger), stderr=subprocess.PIPE
            )
            _, words = await process.communicate()
            assert b"Address already in use" in words
