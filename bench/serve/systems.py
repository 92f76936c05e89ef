"""Starts a system to measure, and gives the target by which a driver reaches it.

deployed         Redis, gateway and nodes, as `baton up` starts them, over HTTP
over_grpc        the same over gRPC, and no tokenizer
joined           the same, for a gateway of the driver's own
mixed            the same engines, each prefilling and decoding; no gateway, no hand-off
vllm             replicas of vLLM, one per GPU, that get requests in turn
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

from baton.cli.deployment.deployment import Deployment, running_in_background
from baton.cluster.redis_server import RedisServer
from baton.core import flags
from baton.core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.process.children import bound_to_us
from baton.gateway.security.key_file import add_key

from .clients.node_driver import CLUSTER

_SERVER_STOP_S = 20.0
_MIXED_CHUNK_TOKENS = 1024  # for engines whose decodes must not wait long for a prefill


def _say(name: str, line: str) -> None:
    print(f"{name} | {line}", flush=True)


@contextmanager
def deployed(
    engine: EngineConfig, up: UpConfig, node: NodeConfig, gateway: GatewayConfig
) -> Iterator[str]:
    """The target of a deployment's gateways over HTTP, at free ports."""
    gateway = replace(gateway, grpc_port=0, http_port=0, model=engine.model)
    deployment = Deployment(up, engine, node, gateway, _say)
    with running_in_background(deployment):
        yield deployment.gateways[0].addresses[-2]


@contextmanager
def over_grpc(
    engine: EngineConfig, up: UpConfig, node: NodeConfig, *, is_one_caller: bool = False
) -> Iterator[str]:
    """The target of a deployment's gateway. `is_one_caller`: it requires a key, which all clients
    of this process and its children find in BATON_API_KEY; else each connection is a caller."""
    gateway = GatewayConfig(grpc_port=0, http_port=0, model=engine.model, skip_tokenizer_init=True)
    with ExitStack() as stack:
        if is_one_caller:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-keys-")))
            key = add_key(folder / "keys.json", "bench", frozenset({"infer", "metrics"}))
            stack.enter_context(_environment("BATON_API_KEY", key))
            gateway = replace(gateway, api_keys=str(folder / "keys.json"))
        deployment = Deployment(up, engine, node, gateway, _say)
        yield f"grpc://{stack.enter_context(running_in_background(deployment))}"


@contextmanager
def joined(engine: EngineConfig, up: UpConfig, node: NodeConfig) -> Iterator[ClusterConfig]:
    """The cluster of a deployment; its own gateway is not used."""
    gateway = GatewayConfig(grpc_port=0, http_port=0, model=engine.model, skip_tokenizer_init=True)
    deployment = Deployment(up, engine, node, gateway, _say)
    with running_in_background(deployment):
        yield deployment.cluster


@contextmanager
def mixed(engine: EngineConfig, gpus: str | None, num_engines: int) -> Iterator[str]:
    """The target of one node with several engines that take whole requests."""
    if engine.max_num_batched_tokens == EngineConfig().max_num_batched_tokens:
        engine = replace(engine, max_num_batched_tokens=_MIXED_CHUNK_TOKENS)
    secret = secrets.token_hex(16)
    with RedisServer.start() as redis:
        node = NodeConfig(gpus=gpus, num_engines=None if gpus else num_engines)
        cluster = ClusterConfig(redis_url=redis.url, cluster=CLUSTER)
        with _node(engine, node, cluster, secret), _environment("BATON_CLUSTER_SECRET", secret):
            yield f"nodes:{redis.url}"


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the load generators to inherit."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _node(
    engine: EngineConfig, node: NodeConfig, cluster: ClusterConfig, secret: str
) -> Iterator[None]:
    """A decode node: its engines accept local work as well."""
    argv = [flag for config in (engine, node, cluster) for flag in flags.to_argv(config)]
    program = "import sys; from baton.cli.launch import decode; sys.exit(decode())"
    process = subprocess.Popen(
        bound_to_us([sys.executable, "-c", program, *argv], signal.SIGTERM),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONSAFEPATH": "1", "BATON_CLUSTER_SECRET": secret},
    )
    assert process.stdout is not None
    lines = iter(process.stdout)
    rest = threading.Thread(target=lambda: [None for _ in lines], daemon=True)
    try:
        for line in lines:
            _say("mixed", line.rstrip())
            if line.startswith("ready: "):
                break
        else:
            raise RuntimeError(f"the node ended with code {process.wait()}")
        rest.start()
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
        if rest.ident is not None:
            rest.join(20)
        process.stdout.close()


@contextmanager
def vllm(command: Sequence[str], gpus: Sequence[str], timeout_s: float = 600.0) -> Iterator[str]:
    """The target of servers that `command` starts, one on each of these GPUs, once all are ready.

    Raises RuntimeError if a server ends before.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(_Server(command, gpu)) for gpu in gpus]
        for server in servers:
            server.wait_until_ready(timeout_s)
        yield ",".join(server.url for server in servers)


class _Server:
    """One process, with children of its own, that listens at `--port`."""

    def __init__(self, command: Sequence[str], gpu: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--port", str(port)]
        self._environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until we exit)

    def __enter__(self) -> _Server:
        self._process = subprocess.Popen(
            bound_to_us(self._command, signal.SIGTERM),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=tempfile.gettempdir(),  # this package's folders must not become modules
            start_new_session=True,
        )
        return self

    def wait_until_ready(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self._log.seek(0)
                raise RuntimeError(f"{self._command[0]} is not ready:\n{self._log.read()[-4000:]}")
            time.sleep(0.2)

    def _is_healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SERVER_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # remaining children
        self._process.wait()
        self._log.close()
