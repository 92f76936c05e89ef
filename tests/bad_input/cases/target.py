"""The target: a gateway, its Redis and two nodes without engines, in a process of its own; also a
node's gRPC server and an engine's listener as in production.

    python tests/bad_input/cases/target.py CONFIG

CONFIG: JSON of GatewayConfig's fields, and of HTTP limits that are shorter than in production.

Prints one line of JSON with its ports once it can serve, and serves until its stdin ends. As a
process of its own, its memory, log and crashes can be observed.
"""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fakes.node.node import FakeNode

from baton.cluster.redis_client import RedisClient
from baton.cluster.redis_directory import RedisDirectory
from baton.cluster.redis_server import RedisServer
from baton.cluster.secret import ClusterSecret
from baton.core.channels.admission import GATEWAY
from baton.core.channels.channel_listener import AcceptPolicy, ChannelListener
from baton.core.config import ClusterConfig, GatewayConfig
from baton.core.membership import Role
from baton.core.process.logs import set_up_logging
from baton.gateway.http.protocol import body, connections
from baton.gateway.process.server import serve
from baton.gateway.request.setbacks import SessionLimits
from baton.node.supervisor.rpc import NodeServicer, make_server
from baton.proto.v1 import node_pb2_grpc

SECRET = "test secret"
HOST = "127.0.0.1"
ENGINE = secrets.token_hex(16)  # several targets may run on one host
NUM_BLOCKS = 26  # 24 of them usable: 384 tokens, less than the context of 512
_ENTRY_TTL_S = 3600.0


def _shorten(config: dict[str, Any]) -> None:
    """Remove fields that are not GatewayConfig's, and apply them."""
    connections.HEAD_S = config.pop("head_s", connections.HEAD_S)
    connections.IDLE_S = config.pop("idle_s", connections.IDLE_S)
    connections.UNREAD_S = config.pop("unread_s", connections.UNREAD_S)
    body.MAX_BODY_S = config.pop("body_s", body.MAX_BODY_S)
    body.MAX_BODIES_BYTES = config.pop("bodies_bytes", body.MAX_BODIES_BYTES)
    if max_files := config.pop("max_files", None):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    connections.MAX_CONNECTIONS = config.pop("max_connections", connections.MAX_CONNECTIONS)


async def _run(config: dict[str, Any], redis_url: str) -> None:
    _shorten(config)
    set_up_logging("gateway", as_json=False)
    cluster = ClusterConfig(redis_url, f"c{time.monotonic_ns()}", SECRET)
    gateway = await serve(
        GatewayConfig(grpc_port=0, http_port=0, heartbeat_timeout_s=30.0, **config),
        cluster,
        session_limits=SessionLimits(recovery_wait_s=5.0, avoid_s=0.1),
    )
    prefill = FakeNode(Role.PREFILL, "p1", "1" * 32, secret=SECRET, num_blocks=NUM_BLOCKS)
    decode = FakeNode(
        Role.DECODE, "d1", "2" * 32, [prefill.incarnation], secret=SECRET, num_blocks=NUM_BLOCKS
    )
    directory = RedisDirectory(
        RedisClient(cluster.redis_url, cluster.cluster, ClusterSecret(SECRET))
    )
    for node in (prefill, decode):
        node.dispatched = _Forgetful()
        node.cancelled = _Forgetful()
        await node.start()
        await directory.announce(node.member, _ENTRY_TTL_S)
    await asyncio.wait_for(gateway.startup_lines(), 30)
    routes = sorted(
        {
            (route.method, route.resource.canonical)
            for route in gateway._http._runner.app.router.routes()
            if route.resource is not None
        }
    )
    server, node_port = make_server(HOST, 0)
    servicer = NodeServicer(tuple, tuple, ClusterSecret(SECRET), (f"{HOST}:{node_port}",))
    node_pb2_grpc.add_NodeServicer_to_server(servicer, server)
    await server.start()
    listener = ChannelListener(
        *(ENGINE, HOST, 0, lambda port: (f"{HOST}:{port}",)),
        AcceptPolicy(ClusterSecret(SECRET).keys_by_id(), (GATEWAY,), lambda *_: None),
    )
    listener.start(lambda _, channel: channel.close())
    ports = {
        "http": gateway.http_port,
        "grpc": gateway.port,
        "node": node_port,
        "engine": listener.port,
    }
    print(json.dumps({**ports, "incarnation": ENGINE, "routes": routes}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    listener.close()
    await server.stop(None)
    await gateway.stop(grace_s=0.0)
    await directory.close()
    for node in (prefill, decode):
        await node.kill()


class _Forgetful(list[Any]):
    """Drops what the fake nodes would record for tests, since memory is measured here."""

    def append(self, item: Any) -> None:
        pass


if __name__ == "__main__":
    with RedisServer.start() as server:
        asyncio.run(_run(json.loads(sys.argv[1]), server.url))
