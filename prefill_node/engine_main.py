"""`python -m baton.prefill_node.engine_main FD`: an engine process with the prefill role.

A long prompt is computed in few steps: four of 2048 tokens take a GPU 9 % longer than one of 8192.
Its last chunk is small, since that is what is left to pull when the first token is there. But 7168
and 1024 tokens take 3 ms longer than 8192 of an 8B model, which in a queue delays all behind it:
there prompts of up to 8192 are computed whole.

What may not wait to be pulled is for prompts that are being computed and for the prefix cache. Over
the limit nothing more is admitted; the heartbeat reports it, and gateways route around it.
"""

from __future__ import annotations

import dataclasses
import gc
import sys

if __name__ == "__main__":
    gc.disable()  # while modules load, of which nothing is garbage: a sixth of the start

from ..core.config import NodeConfig
from ..core.engine_config import EngineConfig
from ..core.membership import Role
from ..node.engine_process.engine_process import main
from ..node.engine_process.role_plan import RolePlan
from .role import PrefillRole

PREFILL_CHUNK_TOKENS = 8192


def adjust(config: EngineConfig) -> EngineConfig:
    """Large chunks, unless the operator chose a size of chunks or steps; stages that are equally
    long for prompts, unless it decodes too."""
    if config.pp_balance is None and config.tbt_target_ms is None:
        config = dataclasses.replace(config, pp_balance="prefill")
    is_chosen = config.max_num_batched_tokens != EngineConfig().max_num_batched_tokens
    if is_chosen or config.prefill_chunk_tokens is not None:
        return config
    return dataclasses.replace(config, prefill_chunk_tokens=PREFILL_CHUNK_TOKENS)


def max_held_blocks(config: NodeConfig, capacity: int) -> int:
    """The credit in blocks: `--credit-fraction` of the pool, at least one."""
    return max(1, int(capacity * config.credit_fraction))


PLAN = RolePlan(
    name=Role.PREFILL,
    adjust=adjust,
    max_held_blocks=max_held_blocks,
    build=PrefillRole,
)

if __name__ == "__main__":
    sys.exit(main(PLAN))
