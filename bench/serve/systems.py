"""Brings up a system to measure, and says how a driver reaches it.

disaggregated    Redis, gateway, prefill and decode node, as `baton up` starts them
mixed            the same engines, each prefilling and decoding; no gateway, no hand-off
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from baton.cli.deployment.deployment import Deployment, running_in_background
from baton.cluster.redis_server import RedisServer
from baton.core import flags
from baton.core.config import ClusterConfig, EngineConfig, GatewayConfig, NodeConfig, UpConfig
from baton.core.process.children import bound_to_us

from .clients.node_driver import CLUSTER

_MIXED_CHUNK_TOKENS = 1024  # what peers take when decodes must not wait long for a prefill


def _say(name: str, line: str) -> None:
    print(f"{name} | {line}", flush=True)


@contextmanager
def disaggregated(engine: EngineConfig, up: UpConfig, node: NodeConfig) -> Iterator[str]:
    """The target of a deployment's gateway."""
    gateway = GatewayConfig(grpc_port=0, http_port=0, model=engine.model, skip_tokenizer_init=True)
    deployment = Deployment(up, engine, node, gateway, _say)
    with running_in_background(deployment) as address:
        yield f"grpc://{address}"


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
    """For the load generators to inherit."""
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
    """A decode node: its engines take local work as well."""
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
