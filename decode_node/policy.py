"""How a decode node sets up its engine: short steps, since every running request waits for them.

A prompt is computed here only after a preemption, or when the gateway finds it cheaper here; it
then shares its steps with everybody's next token.
"""

from __future__ import annotations

import dataclasses

from ..core.config import EngineConfig

MAX_NUM_BATCHED_TOKENS = 512


def adjust(config: EngineConfig) -> EngineConfig:
    """Small steps, unless the operator chose a size (any but the general default)."""
    config = dataclasses.replace(config, prefill_chunk_tokens=None)  # running streams would wait
    if config.max_num_batched_tokens != EngineConfig().max_num_batched_tokens:
        return config
    budget = max(MAX_NUM_BATCHED_TOKENS, config.max_num_seqs)  # or decodes would take turns
    return dataclasses.replace(config, max_num_batched_tokens=budget)
