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

from ..core.engine_config import EngineConfig
from ..core.membership import Role
from ..engine.execution.step_sizes import seqs_for_pool
from ..node.engine_process.engine_process import main
from ..node.engine_process.role_plan import RolePlan
from .role import DecodeRole

MAX_NUM_BATCHED_TOKENS = 512
MIN_PROMPT_TOKENS = 128  # of a step, however many decode


def adjust(config: EngineConfig) -> EngineConfig:
    """Small steps, unless the operator chose a size (any but the general default)."""
    config = dataclasses.replace(config, prefill_chunk_tokens=None)  # running streams would wait
    is_chosen = config.max_num_batched_tokens != EngineConfig().max_num_batched_tokens
    if is_chosen or config.tbt_target_ms is not None:
        return config
    # Or decodes would take turns, and a prompt beside as many as can run would get on by a token.
    max_num_seqs = config.max_num_seqs or seqs_for_pool(config.num_kv_blocks, config.kv_block_size)
    budget = max(MAX_NUM_BATCHED_TOKENS, max_num_seqs + MIN_PROMPT_TOKENS)
    return dataclasses.replace(config, max_num_batched_tokens=budget)


PLAN = RolePlan(
    name=Role.DECODE,
    adjust=adjust,
    max_held_blocks=lambda config, capacity: None,
    build=DecodeRole,
)

if __name__ == "__main__":
    sys.exit(main(PLAN))
