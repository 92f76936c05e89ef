"""How a decode node sets up its engine: short steps, since every running request waits for them.

A prompt is computed here only after a preemption, or when the gateway finds it cheaper here; it
then shares its steps with everybody's next token.
"""

from __future__ import annotations

import dataclasses

from ..core.config import EngineConfig
from ..engine.kv.limits import seqs_for_pool

MAX_NUM_BATCHED_TOKENS = 512
MIN_PROMPT_TOKENS = 128  # of a step, however many decode


def adjust(config: EngineConfig) -> EngineConfig:
    """Small steps, unless the operator chose a size (any but the general default)."""
    config = dataclasses.replace(config, prefill_chunk_tokens=None)  # running streams would wait
    if config.max_num_batched_tokens != EngineConfig().max_num_batched_tokens:
        return config
    # Or decodes would take turns, and a prompt beside as many as can run would get on by a token.
    max_num_seqs = config.max_num_seqs or seqs_for_pool(config.num_kv_blocks, config.block_size)
    budget = max(MAX_NUM_BATCHED_TOKENS, max_num_seqs + MIN_PROMPT_TOKENS)
    return dataclasses.replace(config, max_num_batched_tokens=budget)
