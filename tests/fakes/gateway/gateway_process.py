"""A real gateway as a process of its own, with one pair of nodes that the test simulates."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes.node.node import FakeNode

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.core.membership import Role

PROGRAM = ("-c", "import sys; from baton.cli.launch import gateway; sys.exit(gateway())")


@dataclass
class GatewayProcess:
    """`base` is the HTTP front's URL, `grpc` an address; `alone`: where several gateways share
    them, the URL of each gateway by its name."""

    process: asyncio.subprocess.Process
    base: str
    grpc: str
    alone: dict[str, str]
    prefill: FakeNode
    decode: FakeNode

    @property
    def pid(self) -> int:
        return self.process.pid


@asynccontextmanager
async def gateway_process(
    redis_url: str, model_dir: Path, *flags: str, num_links: int = 1
) -> AsyncIterator[GatewayProcess]:
    """Yields once the gateway is ready and its nodes have `num_links` links each."""
    name = f"g{time.monotonic_ns()}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *PROGRAM, "--http-port", "0", "--grpc-port", "0"),
        *("--redis-url", redis_url, "--cluster", name, "--model", str(model_dir), *flags),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
    )
    prefill = FakeNode(Role.PREFILL, "p1", "1" * 32)
    decode = FakeNode(Role.DECODE, "d1", "2" * 32, [prefill.incarnation])
    directory = RedisDirectory(RedisClient(redis_url, name))
    for node in (prefill, decode):
        await node.start()
        await directory.announce(node.member, 30.0)
    assert process.stdout is not None
    line, alone = b"", {}
    async with asyncio.timeout(20):
        while not line.startswith(b"ready: "):
            line = await process.stdout.readline()
            assert line, "it ended: its last words are in the test's output"
            if match := re.match(r"(\S+) alone: (\S+)", line.decode()):
                alone[match[1]] = match[2]
    *_, base, grpc_address = line.decode().split()
    await until_links(decode, num_links)
    yield GatewayProcess(process, base, grpc_address, alone, prefill, decode)
    if process.returncode is None:
        process.kill()
    await process.wait()
    await directory.close()
    for node in (prefill, decode):
        await node.kill()


async def until_links(node: FakeNode, count: int) -> None:
    """Wait until `count` gateways are linked to the node and have received a heartbeat."""
    async with asyncio.timeout(15):
        while node.num_sessions != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
