"""`python -m baton.decode_node.engine_main FD`: an engine process with the decode role.

Its steps are short, since every running request waits for them: a prompt that is computed here,
after a preemption or because the gateway finds it cheaper here, shares its steps with everybody's
next token. With `--tbt-target-ms` the scheduler cuts steps where it must, and only then.
"""

from __future__ import annotations

import dataclasses
import gc
import sys

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a sixth of the start

from ..core.channels.addresses import host_id
from ..core.config import EngineConfig
from ..core.membership import Role
from ..engine.kv.limits import seqs_for_pool
from ..engine.model import fingerprint
from ..kv_transfer.device_transports import transports, wrapping
from ..kv_transfer.protocol.puller import Puller
from ..kv_transfer.ranks.ranked import RankedTransport
from ..kv_transfer.window.network_address import Routes
from ..node.engine_process.engine_process import EngineParts, RolePlan, main
from .role import DecodeRole
from .windows import Windows

LINK_WAIT_S = 5.0  # how long an intent waits for a pair that is being set up
MAX_NUM_BATCHED_TOKENS = 512
MIN_PROMPT_TOKENS = 128  # of a step, however many decode


def adjust(config: EngineConfig) -> EngineConfig:
    """Small steps, unless the operator chose a size (any but the general default)."""
    config = dataclasses.replace(config, prefill_chunk_tokens=None)  # running streams would wait
    is_chosen = config.max_num_batched_tokens != EngineConfig().max_num_batched_tokens
    if is_chosen or config.tbt_target_ms is not None:
        return config
    # Or decodes would take turns, and a prompt beside as many as can run would get on by a token.
    max_num_seqs = config.max_num_seqs or seqs_for_pool(config.num_kv_blocks, config.block_size)
    budget = max(MAX_NUM_BATCHED_TOKENS, max_num_seqs + MIN_PROMPT_TOKENS)
    return dataclasses.replace(config, max_num_batched_tokens=budget)


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
    adjust=adjust,
    max_held_blocks=lambda config, capacity: None,
    build=build,
    is_source=False,
)

if __name__ == "__main__":
    sys.exit(main(PLAN))
