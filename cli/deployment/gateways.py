"""`--num-gateways N`: gateway processes that share two ports, and their parent, the process of
`launch_gateway`.

    clients ──► ports (SO_REUSEPORT: the kernel deals connections) ─┬─► gateway-0 ──► all nodes
    scrapers ──► each gateway's own HTTP port                       └─► gateway-1 ──► all nodes
Gateways share nothing but Redis: each has links, sessions, limits and metrics of its own. Restarts
are in child_group.py.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from ...core.config import ClusterConfig, GatewayConfig
from ...core.errors import StartupFailed
from ...core.process.logs import print_line, set_up_logging
from ...gateway.process.startup_message import READY, TRY
from . import child_group
from .child import GATEWAY
from .child_group import ChildGroup

log = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0  # after --shutdown-timeout-s: to close connections and exit


@contextmanager
def shared_ports(config: GatewayConfig) -> Iterator[Mapping[str, GatewayConfig]]:
    """The configuration of each gateway, by name; the ports are reserved within the context. Raises
    StartupFailed if one is taken."""
    if config.num_gateways == 1:
        for port, flag in ((config.http_port, "--http-port"), (config.grpc_port, "--grpc-port")):
            with _held(config, port, flag):
                pass  # it is free: the gateway binds it once it has loaded
        yield {GATEWAY: config}
        return
    with (
        _held(config, config.http_port, "--http-port") as http_port,
        _held(config, config.grpc_port, "--grpc-port") as grpc_port,
    ):
        each = replace(
            config, num_gateways=1, reuse_port=True, http_port=http_port, grpc_port=grpc_port
        )
        first = config.own_http_port or None  # 0 also means a free one
        yield {
            f"{GATEWAY}-{index}": replace(each, own_http_port=first and first + index)
            for index in range(config.num_gateways)
        }


@contextmanager
def _held(config: GatewayConfig, port: int, flag: str) -> Iterator[int]:
    """Reserve a port against other processes while no gateway listens on it; 0 finds a free one.
    The socket that reserves it never listens, so it gets no connections."""
    host = config.host
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not config.reuse_port:
            with socket.create_server(address, family=family) as alone:
                address = alone.getsockname()  # free, also of gateways that share ports
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # else others bind it as well
    except OSError as error:
        raise StartupFailed(
            f"the gateway cannot listen on {host}:{port}",
            hint=f"the port is taken or the address is not this host's: another {flag} "
            "(0 takes a free one) or --host",
        ) from error
    with holder:
        yield holder.getsockname()[1]


@asynccontextmanager
async def _running(
    group: ChildGroup, config: GatewayConfig, cluster: ClusterConfig
) -> AsyncIterator[None]:
    with shared_ports(config) as configs:
        try:
            for name, each in configs.items():
                await group.launch(name, each, cluster)
            await group.until_ready()
            yield
        finally:
            await group.end([*group.children], config.shutdown_timeout_s + _STOP_GRACE_S)


async def run(config: GatewayConfig, cluster: ClusterConfig) -> int:
    """The process of `launch_gateway`: runs until SIGINT or SIGTERM, and returns the exit code. A
    gateway that ends is restarted, however often."""
    set_up_logging(GATEWAY, as_json=config.log_json)
    group = ChildGroup(_report, inherits_stderr=True)
    return await child_group.run(group, _running(group, config, cluster), _announce)


async def _announce(group: ChildGroup) -> None:
    for child in group.children:
        own_url, *shared = child.addresses
        print_line(f"{child.name} alone: {own_url}")
    print_line(" ".join(("ready: gateway gateway", *shared)))


def _report(name: str, line: str) -> None:
    if not line.startswith((READY, TRY)):
        log.info("%s: %s", name, line)
    elif name == f"{GATEWAY}-0":  # one such message is enough
        print_line(line)
