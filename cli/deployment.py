"""A whole deployment on one host: Redis, nodes, gateway, as child processes.

Owns their start, their readiness and their end; knows nothing of requests. Children print one line
`ready: <role> <name> <address>` when they can serve; their other lines go to `report`, but the
gateway's greeting, which is for the end of the start, is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from ..client import AsyncClient
from ..cluster.redis_client import require_redis
from ..cluster.redis_server import RedisServer
from ..cluster.secret import operator_key
from ..core import flags
from ..core.children import bound_to_us
from ..core.config import ClusterConfig, EngineConfig, GatewayConfig, NodeConfig, UpConfig
from ..core.errors import BatonError, StartupFailed
from ..core.loop_watch import HUNG_S, LoopWatch
from ..gateway.greeting import READY, TRY
from ..node.placement import engine_configs
from .certs import ca_of, with_role_certificate, with_server_certificate

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # how to dial who listens everywhere
SPAWN_URL = "redis+spawn://"
_STOP_GRACE_S = 8.0
_LOOK_AGAIN_S = 0.05
_MOST_ENDS = 5  # of one part, one soon after the other
_RESTART_S = 0.2  # longer each time: what holds a port may take a moment to let it go
_WELL_S = 30.0  # after so long an end is the first again
_NODE_HUNG_S = 30.0  # gateways go around a node long before; as long as its engines have
_GATEWAY = "gateway"
_CAUSE, _HINT = "error: ", "  try: "  # how launch.py reports a failure

# A part that is stopped while it imports ends by the signal, not with a trace of its imports.
_PART = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from baton.cli.launch import {role}
sys.exit({role}())
"""

Report = Callable[[str, str], None]  # (name of the child, one line)


@dataclass(slots=True)
class Child:
    """One child process; `address` is known once it is ready."""

    name: str
    configs: tuple[object, ...]
    process: asyncio.subprocess.Process
    watch: LoopWatch
    ready: asyncio.Future[str]
    began_s: float = field(default_factory=time.monotonic)
    reader: asyncio.Task[None] | None = None
    addresses: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    greeting: list[str] = field(default_factory=list)
    is_greeting_over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Deployment:
    """`async with Deployment(...) as d`: everything runs; `d.address` is the gateway's."""

    up: UpConfig
    engine: EngineConfig
    node: NodeConfig
    gateway: GatewayConfig
    report: Report
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    children: list[Child] = field(default_factory=list)
    address: str = ""
    greeting: tuple[str, ...] = ()  # gateway/greeting.py
    _redis: RedisServer | None = None

    async def __aenter__(self) -> Deployment:
        try:
            async with asyncio.timeout(self.up.start_timeout_s):
                await self._start()
        except TimeoutError as error:
            starting = [child.name for child in self.children if not child.addresses]
            what = ", ".join(starting) or "the links between its parts"
            await self.stop()
            raise StartupFailed(
                f"not ready after {self.up.start_timeout_s:.0f} s: {what}", hint="--start-timeout-s"
            ) from error
        except BaseException:  # a cancel too: what was started must end
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        self.num_engines()  # what the nodes would refuse is refused before any is started
        if self.up.certs is not None:
            self.gateway = with_server_certificate(self.gateway, Path(self.up.certs))
        self.cluster = replace(
            self.cluster,
            redis_url=await self._redis_url(),
            cluster_secret=self.cluster.cluster_secret or secrets.token_hex(16),
        )
        gateway = await self._launch(_GATEWAY, self.gateway)
        for name, node in self._nodes():
            await self._launch(name, self.engine, node)
        await asyncio.gather(*(self._wait_ready(child) for child in self.children))
        self.address = gateway.ready.result()
        await self._until_linked()
        await gateway.is_greeting_over.wait()
        self.greeting = tuple(gateway.greeting)

    async def _redis_url(self) -> str:
        if self.up.redis_url != SPAWN_URL:
            await require_redis(self.up.redis_url)
            return self.up.redis_url
        self._redis = RedisServer.start()
        return self._redis.url

    def _nodes(self) -> list[tuple[str, NodeConfig]]:
        """One node per role over its GPUs; without GPUs, as many nodes as were asked for."""
        up, nodes = self.up, []
        for role, gpus, count in (
            ("prefill", up.prefill_gpus, up.num_prefill_nodes),
            ("decode", up.decode_gpus, up.num_decode_nodes),
        ):
            for i in range(1 if gpus else count):
                name = f"{role}-{i}"
                nodes.append((name, replace(self.node, gpus=gpus, name=name, port=0)))
        return nodes

    async def _launch(self, name: str, *configs: object) -> Child:
        role = name.partition("-")[0]
        cluster = self.cluster
        if self.up.certs is not None:
            cluster = with_role_certificate(cluster, Path(self.up.certs), role)
        argv = [
            flag
            for config in (*configs, cluster)
            for flag in flags.to_argv(config, leave_out=flags.SECRET_FIELDS)
        ]
        watch = LoopWatch(HUNG_S if name == _GATEWAY else _NODE_HUNG_S)
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_us(
                    [sys.executable, "-c", _PART.format(role=role), *argv], signal.SIGTERM
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ
                | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
                | flags.to_environment(cluster)
                | watch.environment,
                pass_fds=[watch.fd],
                start_new_session=True,  # Ctrl-C reaches us alone: we stop the parts in order
            )
        except BaseException:  # a cancel too
            watch.close()
            raise
        ready = asyncio.get_running_loop().create_future()
        child = Child(name, configs, process, watch, ready)
        child.reader = asyncio.create_task(self._read(child))
        self.children.append(child)
        return child

    async def _read(self, child: Child) -> None:
        """Pass a child's lines on until it ends; note its ready line."""
        assert child.process.stdout is not None
        async for raw in child.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            child.last_lines = [*child.last_lines[-9:], line]
            if line.startswith("ready: ") and not child.ready.done():
                child.addresses = line.split()[3:]
                child.ready.set_result(child.addresses[-1])
            if line.startswith((READY, TRY)):
                child.greeting.append(line)
            else:
                self.report(child.name, line)
            if line.startswith(TRY):
                child.is_greeting_over.set()
        child.is_greeting_over.set()
        await child.process.wait()
        if not child.ready.done():
            child.ready.set_exception(_failure_of(child))

    async def _wait_ready(self, child: Child) -> None:
        await child.ready

    async def _until_linked(self) -> None:
        """Raises StartupFailed if a part ends meanwhile: nobody starts it again yet."""
        linking = asyncio.create_task(self.wait_linked())
        ends = {asyncio.create_task(child.process.wait()): child for child in self.children}
        try:
            await asyncio.wait({linking, *ends}, return_when=asyncio.FIRST_COMPLETED)
            for end, child in ends.items():
                if end.done():
                    assert child.reader is not None
                    await child.reader
                    raise _failure_of(child)
            linking.result()
        finally:
            for task in (linking, *ends):
                task.cancel()

    async def wait_linked(self) -> None:
        """Wait until the gateway sees every engine, each decode engine linked to all sources."""
        num_engines = self.num_engines()
        async with self.client() as client:
            while True:
                try:
                    nodes = (await client.model_info()).nodes
                except BatonError as error:
                    raise StartupFailed(
                        f"the gateway does not answer at {self.address}: {error.message}",
                        hint="with TLS: does --tls-cert name this address? (baton certs --hosts)",
                    ) from error
                sources = {node.incarnation for node in nodes if node.role == "prefill"}
                pullers = [node for node in nodes if node.role == "decode"]
                num_ready = sum(node.is_ready for node in nodes)  # has said how it is
                if num_ready == num_engines and all(sources <= set(node.links) for node in pullers):
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)

    def num_engines(self) -> int:
        """As many as the nodes will start. Raises StartupFailed where they would."""
        return sum(len(engine_configs(self.engine, node)) for _, node in self._nodes())

    def client(self) -> AsyncClient:
        """A client of the gateway that may look at its nodes, keys or not."""
        key = operator_key(self.cluster.cluster_secret or "")
        host, _, port = self.address.rpartition(":")
        address = f"{_LOOPBACK.get(host, host)}:{port}"
        return AsyncClient(address, api_key=key, ca_file=ca_of(self.up.certs))

    async def keep(self) -> str:
        """Start parts again that end by themselves, or whose event loop stands still. Returns the
        name of one that keeps ending."""
        keepers = {asyncio.create_task(self._keep(c)): c.name for c in self.children}
        if self._redis is not None:
            keepers[asyncio.create_task(self._keep_redis(self._redis))] = "redis"
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            ended.result()
            return keepers[ended]
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, child: Child) -> None:
        """Until it has ended too often, one soon after the other."""
        num_ends = 0
        while True:
            await self._until_over(child)
            num_ends = 1 if time.monotonic() - child.began_s > _WELL_S else num_ends + 1
            if num_ends > _MOST_ENDS:
                return
            self.report(child.name, f"ended with code {child.process.returncode}: starts again")
            await asyncio.sleep(_RESTART_S * (num_ends - 1))
            self.children.remove(child)
            await self._end(child)
            child = await self._launch(child.name, *_with_the_same_ports(child))

    async def _until_over(self, child: Child) -> None:
        """Its process has ended; one that is hung is killed."""
        ended = asyncio.create_task(child.process.wait())
        hung = asyncio.create_task(child.watch.until_hung())
        try:
            await asyncio.wait({ended, hung}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                stood_s = child.watch.hung_s
                self.report(child.name, f"its event loop stood still for {stood_s:g} s: killed")
                child.process.kill()
                await child.process.wait()
        finally:
            ended.cancel()
            hung.cancel()

    async def _keep_redis(self, redis: RedisServer) -> None:
        """An empty one at the same address: nodes announce themselves and their caches again."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            if (code := redis.process.poll()) is not None:
                self.report("redis", f"ended with code {code}: starts again, empty")
                redis.start_again()
                await asyncio.sleep(_RESTART_S)

    def hurry(self) -> None:
        """While it stops: whatever is still there need not end in order."""
        for child in self.children:
            if child.process.returncode is None:
                child.process.send_signal(signal.SIGINT)

    async def stop(self) -> None:
        """End every child, the gateway first, and Redis last; what will not end is killed."""
        gateway = [child for child in self.children if child.name == _GATEWAY]
        nodes = [child for child in self.children if child.name != _GATEWAY]
        await self._stop_group(gateway, self.gateway.shutdown_timeout_s + _STOP_GRACE_S)
        await self._stop_group(nodes, _STOP_GRACE_S)
        self.children.clear()
        if self._redis is not None:
            self._redis.stop()
            self._redis = None

    async def _stop_group(self, group: Sequence[Child], grace_s: float) -> None:
        for child in group:
            if child.process.returncode is None:
                # Of an interpreter that just starts, Ctrl-C's signal would make a trace.
                number = signal.SIGINT if child.addresses else signal.SIGTERM
                child.process.send_signal(number)
        for child in group:
            try:
                async with asyncio.timeout(grace_s):
                    await child.process.wait()
            except TimeoutError:
                child.process.kill()
                await child.process.wait()
            await self._end(child)

    async def _end(self, child: Child) -> None:
        """Its process has ended: hear its last words."""
        child.watch.close()
        if child.reader is not None:
            await child.reader
        if child.ready.done():
            with contextlib.suppress(StartupFailed, asyncio.CancelledError):
                child.ready.result()  # looked at, so asyncio does not complain


def _failure_of(child: Child) -> StartupFailed:
    """What a part that ended said of it, in its own two lines if it did so."""
    lines = child.last_lines
    causes = [number for number, line in enumerate(lines) if line.startswith(_CAUSE)]
    if causes:
        cause, after = lines[causes[-1]], "".join(lines[causes[-1] + 1 : causes[-1] + 2])
        hint = after.removeprefix(_HINT) if after.startswith(_HINT) else ""
        return StartupFailed(f"{child.name}: {cause.removeprefix(_CAUSE)}", hint=hint)
    said = "\n  ".join(lines) or "nothing"
    code = child.process.returncode
    return StartupFailed(f"{child.name} ended with code {code}; it said:\n  {said}")


def _with_the_same_ports(child: Child) -> tuple[object, ...]:
    """Its configurations, with the ports that it found in place of those it was to find."""
    ports = [int(address.rpartition(":")[2]) for address in child.addresses]
    if child.name != _GATEWAY or len(ports) < 2:
        return child.configs
    http_port, grpc_port = ports
    return tuple(
        replace(config, http_port=http_port, grpc_port=grpc_port)
        for config in child.configs
        if isinstance(config, GatewayConfig)
    )
