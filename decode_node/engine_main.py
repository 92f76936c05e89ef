"""`python -m baton.decode_node.engine_main FD`: an engine process with the decode role."""

from __future__ import annotations

import sys

from ..core.membership import Role
from ..engine import fingerprint
from ..engine.kv_memory import CpuKvMemory
from ..kv_transfer.puller import Puller
from ..kv_transfer.shm import ShmTransport
from ..kv_transfer.transport import Transport
from ..node.engine_process import Parts, RolePlan, main
from . import policy
from .role import DecodeRole
from .windows import Windows

LINK_WAIT_S = 5.0  # how long an intent waits for a pair that is being set up


def transports(parts: Parts) -> list[Transport]:
    """The ways in which blocks can reach this engine's pool, best first."""
    kv = parts.runner.kv
    if isinstance(kv, CpuKvMemory):
        return [ShmTransport(kv)]
    from ..kv_transfer.cuda_ipc import CudaIpcTransport  # needs Triton

    return [CudaIpcTransport(kv)]


def build(parts: Parts) -> DecodeRole:
    return DecodeRole(
        parts.engine,
        parts.desk,
        parts.outbox,
        Puller(parts.hello, parts.clock, LINK_WAIT_S),
        Windows(transports(parts), parts.post),
        parts.clock,
        fingerprint=fingerprint.short(parts.hello.fingerprint),
        block_bytes=parts.runner.kv.block_bytes,
    )


PLAN = RolePlan(
    name=Role.DECODE,
    adjust=policy.adjust,
    max_held_blocks=lambda config, capacity: None,
    build=build,
)

if __name__ == "__main__":
    sys.exit(main(PLAN))
