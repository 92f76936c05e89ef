"""`python -m baton.prefill_node.engine_main FD`: an engine process with the prefill role."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a sixth of the start

from ..core.membership import Role
from ..kv_transfer.protocol.source import Source
from ..node.engine_process.engine_process import EngineParts, RolePlan, main
from . import policy
from .role import PrefillRole


def build(parts: EngineParts) -> PrefillRole:
    source = Source(parts.hello, parts.clock, parts.config.lease_s)
    assert parts.access is not None
    return PrefillRole(
        parts.engine, parts.requests, parts.outbox, source, parts.clock, parts.access
    )


PLAN = RolePlan(
    name=Role.PREFILL,
    adjust=policy.adjust,
    max_held_blocks=policy.max_held_blocks,
    build=build,
    is_source=True,
)

if __name__ == "__main__":
    sys.exit(main(PLAN))
