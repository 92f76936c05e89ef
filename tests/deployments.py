"""A real deployment (Redis, gateway, nodes as processes) for tests, behind a plain context manager.

After each use it checks the invariants: every node's ledger is idle and balanced, and no process is
left behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from patience import AT_ONCE_S

from baton.cli.cluster.survey import ask_ledgers
from baton.cli.deployment.deployment import Deployment
from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.secret import ClusterSecret
from baton.cluster.tls import role_name
from baton.core.config import GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.membership import Member
from baton.proto.v1 import node_pb2_grpc

MARK = "BATON_TEST_MARK"
# Below the range from which the kernel assigns ephemeral ports.
_OURS = range(20_000, 29_000)
_given: set[int] = set()


def free_port(host: str = "127.0.0.1") -> int:
    """A port to pass to a process; the kernel does not assign it to others meanwhile."""
    for port in random.sample(_OURS, len(_OURS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            if port not in _given:
                _given.add(port)
                return port
    raise OSError(f"no port of {_OURS} is free")


@dataclass
class Running:
    """A running deployment; `lines` has all output of its processes.

    `call` runs a coroutine in the deployment's event loop, on a thread of its own.
    """

    deployment: Deployment
    call: Callable[[Any], Any]
    lines: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.deployment.address

    def node_addresses(self) -> dict[str, str]:
        return {
            child.name: child.ready.result()
            for child in self.deployment.children
            if child.name != "gateway"
        }

    def pids(self) -> list[int]:
        return [child.process.pid for child in self.deployment.children]

    def ledgers(self) -> dict[str, list[dict[str, Any]]]:
        """The ledgers of every engine, by node."""
        found: dict[str, list[dict[str, Any]]] = self.call(self._ledgers())
        return found

    def engines(self) -> dict[str, Member]:
        """The engines in the directory, by name."""
        found: dict[str, Member] = self.call(self._engines())
        return found

    async def _engines(self) -> dict[str, Member]:
        cluster = self.deployment.cluster
        secret = ClusterSecret.of(cluster)
        directory = RedisDirectory(RedisClient(cluster.redis_url, cluster.cluster, secret))
        try:
            async for found in directory.watch():
                if found:
                    return {member.name: member for member in found}
        finally:
            await directory.close()
        raise AssertionError("the watch ended")

    async def _ledgers(self) -> dict[str, list[dict[str, Any]]]:
        secret = ClusterSecret.of(self.deployment.cluster)
        found = {}
        for name, address in self.node_addresses().items():
            async with self._channel_to(name.partition("-")[0], address) as channel:
                texts = await ask_ledgers(node_pb2_grpc.NodeStub(channel), secret, address)
            found[name] = [json.loads(text) for text in texts]
        return found

    def _channel_to(self, role: str, address: str) -> grpc.aio.Channel:
        """A channel to a node like a gateway's."""
        if self.deployment.up.certs is None:
            return grpc.aio.insecure_channel(address)
        folder = Path(self.deployment.up.certs)
        names = ("ca.crt", "gateway.key", "gateway.crt")
        credentials = grpc.ssl_channel_credentials(*((folder / n).read_bytes() for n in names))
        options = (("grpc.ssl_target_name_override", role_name(role)),)
        return grpc.aio.secure_channel(address, credentials, options)

    def wait_idle(self, timeout_s: float = 5.0) -> dict[str, list[dict[str, Any]]]:
        """Wait until no node holds a block; fails with the ledgers otherwise."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            ledgers = self.ledgers()
            if all(is_idle(ledger) for node in ledgers.values() for ledger in node):
                return ledgers
            if time.monotonic() > deadline_s:
                raise AssertionError(f"blocks are still held: {json.dumps(ledgers, indent=1)}")
            time.sleep(0.01)


def is_idle(ledger: dict[str, Any]) -> bool:
    """Whether nothing is held, and the counts balance."""
    blocks = ledger["blocks"]
    total = blocks["free"] + blocks["cached"] + blocks["held"] + blocks["reserved"]
    assert total == blocks["total"], ledger
    return blocks["held"] == 0 and not ledger["requests"] and not ledger["transfers"]


@contextmanager
def running(
    engine: EngineConfig,
    *,
    up: UpConfig | None = None,
    node: NodeConfig | None = None,
    gateway: GatewayConfig | None = None,
) -> Iterator[Running]:
    """Start a deployment, yield it, check its ledgers, stop it, check that nothing is left."""
    mark = secrets.token_hex(8)
    os.environ[MARK] = mark  # inherited by child processes
    lines: list[str] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    deployment = Deployment(
        up or UpConfig(mode="disaggregated"),
        engine,
        node or NodeConfig(),
        gateway or GatewayConfig(grpc_port=0, http_port=0, model=engine.model),
        lambda name, line: lines.append(f"{name} | {line}"),
    )
    try:
        call(deployment.__aenter__())
        state = Running(deployment, call, lines)
        try:
            yield state
            state.wait_idle()
        finally:
            call(deployment.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    deadline_s = time.monotonic() + AT_ONCE_S  # a process's helpers end after it
    while left := marked_processes(mark):
        print("ends behind its deployment:", *map(command_of, left))
        assert time.monotonic() < deadline_s, [*map(command_of, left)]
        time.sleep(0.01)


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return f"{pid}, which has ended"


def marked_processes(mark: str) -> list[int]:
    """Processes that descend from one started with `mark`, whoever their parent is by now.

    Abstract sockets and memfds live only as long as their processes, so none of these are left
    either.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
