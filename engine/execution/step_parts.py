"""What steps on either device share: the batch as arrays, and what attention and adapters plan it
by."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...kernels.attention.attention import AttentionMetadata
from ..lora.rank_adapters import RankAdapters
from .batch import Int64s, SequenceSlice, StepBatch


def flatten(batch: StepBatch, block_size: int) -> Int64s:
    """[3, tokens] int64: token ids, positions, slots (block_id * block_size + offset)."""
    decodes, n = batch.decodes, len(batch.decodes)
    arrays = np.empty((3, sum(batch.query_lens)), np.int64)
    offsets = decodes.starts % block_size
    arrays[:, :n] = decodes.token_ids, decodes.starts, decodes.blocks * block_size + offsets
    if batch.others:
        _flatten_chunks(batch.others, batch.query_lens[n:], arrays[:, n:], block_size)
    return arrays


def _flatten_chunks(
    chunks: Sequence[SequenceSlice], lens: Sequence[int], arrays: Int64s, block_size: int
) -> None:
    """The same of slices of any length, all at once too: decodes with drafts are many."""
    token_ids, positions, slots = arrays
    blocks: list[int] = []
    block_offsets = []  # from a position's block to its place in `blocks`
    for piece, n in zip(chunks, lens, strict=True):
        first, last = piece.start // block_size, (piece.start + n - 1) // block_size
        block_offsets.append(len(blocks) - first)
        blocks += piece.block_table[first : last + 1]
    num_tokens = token_ids.shape[0]
    token_ids[:] = np.fromiter(
        itertools.chain.from_iterable(piece.token_ids for piece in chunks), np.int64, num_tokens
    )
    counts = np.array(lens)
    begins = np.array([piece.start for piece in chunks]) - (np.cumsum(counts) - counts)
    positions[:] = np.arange(num_tokens) + np.repeat(begins, counts)
    places = positions // block_size + np.repeat(block_offsets, counts)
    slots[:] = np.array(blocks)[places] * block_size + positions % block_size


def metadata_of(
    batch: StepBatch,
    slots: Tensor,
    *,
    is_graph: bool = False,
    graph_decodes: int | None = None,
) -> AttentionMetadata:
    """What attention plans a step by; `slots` [tokens] lie on the device."""
    return AttentionMetadata(
        query_lens=batch.query_lens,
        seq_lens=batch.seq_lens,
        block_tables=[*batch.decodes.block_tables, *(piece.block_table for piece in batch.others)],
        slot_mapping=slots,
        num_decodes=batch.num_decodes,
        is_graph=is_graph,
        graph_decodes=graph_decodes,
    )


def plan_adapters(adapters: RankAdapters | None, batch: StepBatch, num_rows: int) -> bool:
    """Let the next step of so many rows compute with its slices' adapters; whether it has any."""
    if adapters is None:
        return False
    slots = batch.adapter_slots
    if all(slot is None for slot in slots):
        adapters.rest()
        return False
    adapters.plan(batch.query_lens, slots, num_rows)
    return True
