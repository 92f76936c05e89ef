"""`python -m baton.decode_node.engine_main FD`: an engine process with the decode role."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a sixth of the start

from ..core.channels.addresses import host_id
from ..core.membership import Role
from ..engine.model import fingerprint
from ..kv_transfer.device_transports import transports, wrapping
from ..kv_transfer.protocol.puller import Puller
from ..kv_transfer.ranks.ranked import RankedTransport
from ..kv_transfer.window.network_address import Routes
from ..node.engine_process.engine_process import EngineParts, RolePlan, main
from . import policy
from .role import DecodeRole
from .windows import Windows

LINK_WAIT_S = 5.0  # how long an intent waits for a pair that is being set up


def build(parts: EngineParts) -> DecodeRole:
    mine = transports(parts.runner.kv, parts.config, parts.tls)
    routes = Routes(host_id(), parts.hello.incarnation)
    ranked = RankedTransport(mine, parts.pool_parts, parts.followers, routes, wrapping(parts.tls))
    return DecodeRole(
        parts.engine,
        parts.requests,
        parts.outbox,
        Puller(parts.hello, parts.clock, LINK_WAIT_S),
        Windows([ranked], parts.post),
        routes,
        parts.clock,
        fingerprint=fingerprint.short(parts.hello.fingerprint),
        block_bytes=parts.runner.kv.block_bytes * len(parts.pool_parts),
    )


PLAN = RolePlan(
    name=Role.DECODE,
    adjust=policy.adjust,
    max_held_blocks=lambda config, capacity: None,
    build=build,
    is_source=False,
)

if __name__ == "__main__":
    sys.exit(main(PLAN))
