"""The step that needs most memory, to be measured before the KV pool takes what is left."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.engine_config import EngineConfig
from ...core.request.request import SAMPLING, SamplingParams
from ...kernels.sampling.sample_spec import SampleSpec
from ..kv.block_pool import PADDING_BLOCK
from ..kv.limits import spare_tokens
from .batch import SequenceSlice

# Every row sampled with all there is.
_NUMBERS: dict[str, Any] = {n: 0.5 for n, one in SAMPLING.items() if isinstance(one.default, float)}
_DEAREST_PARAMS = SamplingParams(top_k=50, logit_bias=((0, 1.0),), logprobs=20, **_NUMBERS)


def largest_batch(
    config: EngineConfig, max_num_seqs: int, max_model_len: int, vocab_size: int
) -> list[SequenceSlice]:
    """A step of as many tokens and sampled rows as any, all in the padding block."""
    budget = config.max_num_batched_tokens
    chunk = min(config.prefill_chunk_tokens or 0, max_model_len + max_num_seqs - 2)
    budget = max(budget + spare_tokens(budget), chunk)
    num_tokens = min(budget, max_num_seqs * (max_model_len - 1))
    num_slices = min(max_num_seqs, num_tokens)
    first = min(num_tokens - num_slices + 1, max_model_len - 1)
    lens = [first, *[1] * (num_slices - 1)]
    num_left = num_tokens - sum(lens)
    for index in range(1, num_slices):
        more = min(num_left, max_model_len - 2)
        lens[index] += more
        num_left -= more
    all_allowed = np.full(-(-vocab_size // 32), -1, np.int32)
    dearest = SampleSpec(
        _DEAREST_PARAMS, key=1, fork_keys=(2, 3), allowed=all_allowed, num_candidates=20
    )
    return [
        SequenceSlice(
            [0] * length,
            0,
            [PADDING_BLOCK] * -(-length // config.block_size),
            dearest,
            prompt_targets=[0] * (length - 1),
            num_prompt_top=20,
            is_prompt=True,
        )
        for length in sorted(lens)
    ]
