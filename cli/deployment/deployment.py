"""A whole deployment on one host: Redis, nodes, gateway, as child processes.

Responsible for their start, readiness, and ordered shutdown. Knows no request. Restarts of children
are in child_group.py.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...client import AsyncClient
from ...cluster.redis_client import answering_redis
from ...cluster.redis_server import RedisServer
from ...cluster.secret import operator_key
from ...core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from ...core.engine_config import TBT_TARGET_MS, EngineConfig
from ...core.errors import BatonError, StartupFailed
from ...node.supervisor.placement import engine_configs
from ..host.certs import ca_of, with_role_certificate, with_server_certificate
from .child import GATEWAY, Child, Report, role_of
from .child_group import ChildGroup
from .gateways import shared_ports

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # to dial a listener on all addresses
SPAWN_URL = "redis+spawn://"
_STOP_GRACE_S = 8.0
_LOOK_AGAIN_S = 0.05
_MOST_ENDS = 5  # of one part, in quick succession
_REDIS_RESTART_S, _REDIS_RESTART_MAX_S = 0.2, 5.0  # running requests go on without it
_REDIS_WELL_S = 30.0  # after this uptime, an end counts as the first again


class Deployment(ChildGroup):
    """Runs within `async with Deployment(...) as d`; `d.address` is that of the gateways."""

    def __init__(
        self,
        up: UpConfig,
        engine: EngineConfig,
        node: NodeConfig,
        gateway: GatewayConfig,
        report: Report,
        cluster: ClusterConfig | None = None,
    ) -> None:
        super().__init__(report, _MOST_ENDS)
        self.up, self.node, self.gateway = up, node, gateway
        self.engine = _with_promise(engine, up)
        _check_adapters(engine, gateway)
        _check_node(node)
        self.cluster = cluster or ClusterConfig()
        self.address = ""
        self.startup_lines: tuple[str, ...] = ()  # gateway/process/startup_message.py
        self._redis: RedisServer | None = None
        self._ports = ExitStack()

    @property
    def gateways(self) -> list[Child]:
        return [child for child in self.children if role_of(child.name) == GATEWAY]

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
        except BaseException:  # also if cancelled: started children must end
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        self.num_engines()  # raises what the nodes would raise, before any of them is started
        if self.up.certs is not None:
            self.gateway = with_server_certificate(self.gateway, Path(self.up.certs))
        self.cluster = replace(
            self.cluster,
            redis_url=await self._redis_url(),
            cluster_secret=self.cluster.cluster_secret or secrets.token_hex(16),
        )
        gateways = self._ports.enter_context(shared_ports(self.gateway))
        for name, gateway in gateways.items():
            await self._launch(name, gateway)
        for name, node in self._nodes():
            await self._launch(name, self.engine, node)
        await self.until_ready()
        self.address = self.gateways[0].ready.result()
        await self._until_linked()
        for child in self.gateways:
            await child.are_startup_lines_complete.wait()
        self.startup_lines = tuple(self.gateways[0].startup_lines)

    async def _redis_url(self) -> str:
        if self.up.redis_url != SPAWN_URL:
            async with answering_redis(self.up.redis_url, self.cluster.cluster):
                return self.up.redis_url
        self._redis = RedisServer.start()
        return self._redis.url

    def _nodes(self) -> list[tuple[str, NodeConfig]]:
        """One node per role with its GPUs; without GPUs, as many nodes as the flags request. If
        every engine does both, all nodes are decode nodes."""
        up, nodes = self.up, []
        prefill = ("prefill", up.prefill_gpus, up.num_prefill_nodes)
        decode = ("decode", up.decode_gpus, up.num_decode_nodes)
        for role, gpus, count in [decode] if up.mode == "aggregated" else [prefill, decode]:
            for i in range(1 if gpus else count):
                name = f"{role}-{i}"
                nodes.append((name, replace(self.node, gpus=gpus, name=name, port=0)))
        return nodes

    async def _launch(self, name: str, *configs: object) -> None:
        cluster = self.cluster
        if self.up.certs is not None:
            cluster = with_role_certificate(cluster, Path(self.up.certs), role_of(name))
        await self.launch(name, *configs, cluster)

    async def _until_linked(self) -> None:
        """Raises StartupFailed if a part ends meanwhile: parts are not restarted yet."""
        linking = asyncio.create_task(self.wait_linked())
        ends = {asyncio.create_task(child.process.wait()): child for child in self.children}
        try:
            await asyncio.wait({linking, *ends}, return_when=asyncio.FIRST_COMPLETED)
            for end, child in ends.items():
                if end.done():
                    assert child.reader is not None
                    await child.reader
                    raise child.failure()
            linking.result()
        finally:
            for task in (linking, *ends):
                task.cancel()

    async def wait_linked(self) -> None:
        """Wait until the gateway sees every engine of this deployment, each decode engine linked to
        all of its sources. Engines of others that use the same Redis are ignored."""
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
                addresses = {each.addresses[-1] for each in self.children if each.addresses}
                ours = [node for node in nodes if node.address in addresses]
                sources = {node.incarnation for node in ours if node.role == "prefill"}
                pullers = [node for node in ours if node.role == "decode"]
                num_ready = sum(node.is_ready for node in ours)  # sent a heartbeat
                if num_ready == num_engines and all(sources <= set(node.links) for node in pullers):
                    return
                await asyncio.sleep(_LOOK_AGAIN_S)

    def num_engines(self) -> int:
        """The number of engines that the nodes will start. Raises StartupFailed if they would."""
        return sum(len(engine_configs(self.engine, node)) for _, node in self._nodes())

    def client(self) -> AsyncClient:
        """A client of the gateway that may list its nodes, with or without API keys."""
        key = operator_key(self.cluster.cluster_secret or "")
        host, _, port = self.address.rpartition(":")
        address = f"{_LOOPBACK.get(host, host)}:{port}"
        return AsyncClient(address, api_key=key, ca_file=ca_of(self.up.certs))

    def beside(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {} if self._redis is None else {"redis": self._keep_redis(self._redis)}

    async def _keep_redis(self, redis: RedisServer) -> None:
        """Restart Redis, empty, at the same address: nodes announce themselves and their caches
        again."""
        began_s, delay_s = time.monotonic(), _REDIS_RESTART_S
        while True:
            end = await _end_of(redis)
            if time.monotonic() - began_s > _REDIS_WELL_S:
                delay_s = _REDIS_RESTART_S
            self.report("redis", f"{end}: restarting, empty")
            await asyncio.sleep(delay_s)
            began_s, delay_s = time.monotonic(), min(2 * delay_s, _REDIS_RESTART_MAX_S)
            try:
                redis.start_again()
            except OSError as error:
                self.report("redis", f"cannot be started: {error}")

    async def stop(self) -> None:
        """Stop every child, the gateways first, and Redis last; kill those that do not end."""
        await self.end(self.gateways, self.gateway.shutdown_timeout_s + _STOP_GRACE_S)
        await self.end([*self.children], _STOP_GRACE_S)
        self._ports.close()
        if self._redis is not None:
            self._redis.stop()
            self._redis = None


async def _end_of(redis: RedisServer) -> str:
    """Wait until Redis has ended, or its socket was removed; returns which, as text."""
    was_there = False
    while (code := redis.process.poll()) is None:
        is_there = redis.socket_path.exists()
        if was_there and not is_there:
            return f"{redis.socket_path} is gone"
        was_there = is_there
        await asyncio.sleep(_LOOK_AGAIN_S)
    return f"ended with code {code}"


def _with_promise(engine: EngineConfig, up: UpConfig) -> EngineConfig:
    """Engines with a step-time promise take whole requests: all engines have one, or none."""
    if up.mode != "disaggregated":
        return replace(engine, tbt_target_ms=engine.tbt_target_ms or TBT_TARGET_MS)
    if engine.tbt_target_ms is not None:
        raise StartupFailed("--tbt-target-ms needs --mode auto or aggregated")
    return engine


def _check_adapters(engine: EngineConfig, gateway: GatewayConfig) -> None:
    """Raises StartupFailed if adapters are to be served but the engines do not support them."""
    if gateway.lora_modules and not engine.enable_lora:
        raise StartupFailed(
            "--lora-modules needs engines that serve LoRA adapters", hint="add --enable-lora"
        )


def _check_node(node: NodeConfig) -> None:
    """Raises StartupFailed for flags that only a single node can have: here are several nodes."""
    for name in ("port", "engine_port", "advertise", "advertise_engine", "name"):
        if getattr(node, name):
            raise StartupFailed(
                f"--{name.replace('_', '-')} is for a single node: `baton up` sets it for each",
                hint="leave it out; clients connect to --http-port and --grpc-port",
            )


@contextmanager
def running_in_background(
    deployment: Deployment, give_up: Callable[[str], None] = lambda name: None
) -> Iterator[str]:
    """Start it on a thread of its own, yield the gateway's address, stop it. Raises StartupFailed.

    Its children end with the thread that started them, which lives as long as this context.
    `give_up` is called on that thread with the name of a part that keeps ending, once all have
    ended.
    """
    started: Future[str] = Future()

    async def serve() -> None:
        try:
            async with deployment:
                started.set_result(deployment.address)
                name = await deployment.keep()
            give_up(name)
        except asyncio.CancelledError:
            return  # the context is left
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)  # of any type: the caller's thread raises it

    loop = asyncio.new_event_loop()
    serving = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,), name="deployment")
    try:
        thread.start()  # within `try`: a signal may raise here as well
        yield started.result()
    finally:
        loop.call_soon_threadsafe(serving.cancel)  # no error if it has ended
        if thread.ident is not None:
            thread.join()
        loop.close()
