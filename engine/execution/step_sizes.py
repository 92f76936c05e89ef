"""The largest sizes of steps, for which buffers and graphs are prepared at the start."""

from __future__ import annotations

from ...core.engine_config import EngineConfig
from ..kv.block_pool import NUM_RESERVED_BLOCKS
from ..kv.limits import MAX_NUM_SEQS, spare_tokens

_MOST_GRAPH_ROWS = 512  # of decodes with drafts; what is launched is short beside longer steps
_SHORT_SEQ_TOKENS = 64


def seqs_for_pool(num_blocks: int | None, block_size: int) -> int:
    """How many sequences may run at once over a pool of `num_blocks`; None: of unknown size.

    The pool is the real limit; this one should bind first only with short sequences. It bounds what
    is prepared for each number of sequences (graphs, buffers), so a sequence counts as a short
    question with its answer. 16 cost nothing; with over 512 a step takes long for all.
    """
    if num_blocks is None:
        return MAX_NUM_SEQS
    capacity_tokens = (num_blocks - NUM_RESERVED_BLOCKS) * block_size
    return min(max(capacity_tokens // _SHORT_SEQ_TOKENS, 16), MAX_NUM_SEQS)


def decode_graph_rows(max_num_seqs: int, max_drafts: int) -> int:
    """Tokens of decodes, their drafts included, that a CUDA graph has at most."""
    return max(max_num_seqs, min(max_num_seqs * (1 + max_drafts), _MOST_GRAPH_ROWS))


def most_step_tokens(config: EngineConfig) -> int:
    """The most tokens of any step, with the padding of decodes in graphs, but not of prompts."""
    most = config.max_num_batched_tokens
    most = max(most + spare_tokens(most), config.prefill_chunk_tokens or 0)
    return max(most, decode_graph_rows(config.max_num_seqs or MAX_NUM_SEQS, config.max_drafts))
