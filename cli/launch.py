"""The commands launch_gateway, launch_prefill and launch_decode: they parse flags and run a
process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from ..core import flags
from ..core.config import ClusterConfig, GatewayConfig, NodeConfig
from ..core.engine_config import EngineConfig
from ..core.errors import BatonError, StartupFailed
from ..core.membership import Role
from ..core.process import event_loop

_NODE = (EngineConfig, NodeConfig, ClusterConfig)


def run_reporting(start: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """`reporting` of a process's main coroutine.

    `start` does its imports before the event loop exists: Ctrl-C during long imports then ends the
    process, instead of a half-built server.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else grpc logs every fork and GOAWAY
    return reporting(lambda: event_loop.run(start))


def reporting(run: Callable[[], int]) -> int:
    """Run a command; a BatonError becomes its cause, what to do about it, and exit code 1."""
    try:
        return run()
    except BatonError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if isinstance(error, StartupFailed) and error.hint:
            print(f"  try: {error.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143  # by SIGTERM


def node_parser(role: Role) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"launch_{role.value}", description=f"Start a {role.value} node."
    )
    flags.add_flags(parser, *_NODE)
    return parser


def gateway_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch_gateway", description="Start a gateway.")
    flags.add_flags(parser, GatewayConfig, ClusterConfig)
    return parser


def _node(role: Role) -> int:
    arguments = node_parser(role).parse_args()

    def start() -> Coroutine[Any, Any, int]:
        from ..node.supervisor import rank_host, supervisor

        engine, node, cluster = flags.parse_all(arguments, *_NODE)
        run = rank_host.run if engine.node_rank else supervisor.run
        return run(role, engine, node, cluster)

    return run_reporting(start)


def prefill() -> int:
    return _node(Role.PREFILL)


def decode() -> int:
    return _node(Role.DECODE)


def gateway() -> int:
    arguments = gateway_parser().parse_args()

    def start() -> Coroutine[Any, Any, int]:
        config, cluster = flags.parse_all(arguments, GatewayConfig, ClusterConfig)
        if config.num_gateways > 1:
            from .deployment import gateways

            return gateways.run(config, cluster)
        from ..gateway.process import server

        return server.run(config, cluster)

    return run_reporting(start)
