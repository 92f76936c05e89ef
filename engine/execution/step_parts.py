"""What steps on either device share: the batch as arrays, and where it samples."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from torch import Tensor

from ...kernels.attention.attention import AttentionMetadata
from ...kernels.sampling.sample_spec import SampleSpec
from ..kv.block_pool import PADDING_BLOCK
from ..lora.rank_adapters import RankAdapters
from .batch import (
    NO_DECODES,
    DecodeColumns,
    Int64s,
    SampledToken,
    SequenceSlice,
    StepBatch,
)

# BLAS multiplies a single row by another routine, whose sums round differently: with this second
# row a decode alone gives bit for bit what it gives in a batch.
PADDING_SLICE = SequenceSlice((0,), 0, block_table=array("i", [PADDING_BLOCK]), sample=None)


def padded(batch: StepBatch) -> StepBatch:
    """With a slice behind it that is nobody's, if it is a single row."""
    return batch.followed_by([PADDING_SLICE]) if batch.query_lens == [1] else batch


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


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Where a step samples, as parallel lists: a slice with drafts has several rows, one by one.
    The first rows are those of `decodes`, the others have `specs`."""

    slices: list[int]
    tokens: list[int]  # of the step
    decodes: DecodeColumns = NO_DECODES
    specs: list[SampleSpec] = field(default_factory=list)
    is_decode: bool = False  # decodes alone, all of which sample

    @classmethod
    def of(cls, batch: StepBatch) -> SampledRows:
        n = len(batch.decodes)
        is_decode = num_decodes(batch) == len(batch)
        is_decode = is_decode and all(piece.sample is not None for piece in batch.others)
        found, end = cls([*range(n)], [*range(n)], batch.decodes, [], is_decode), n
        for index, piece in enumerate(batch.others, n):
            end += len(piece.token_ids)
            if piece.sample is None:
                continue
            num_rows = 1 + len(piece.draft_samples)
            found.slices.extend([index] * num_rows)
            found.tokens.extend(range(end - num_rows, end))
            found.specs.extend((*piece.draft_samples, piece.sample))
        return found

    def __len__(self) -> int:
        return len(self.tokens)

    def spec(self, row: int) -> SampleSpec:
        """How the row is sampled."""
        n = len(self.decodes)
        return self.decodes.spec(row) if row < n else self.specs[row - n]

    @property
    def special(self) -> list[int]:
        """Rows for which temperature and noise are not all there is to their tokens."""
        specs = chain(self.decodes.specs.items(), enumerate(self.specs, len(self.decodes)))
        return [*self.decodes.special, *(row for row, one in specs if one.needs_more_than_noise)]

    @property
    def asking(self) -> list[int]:
        """Rows that ask for more than a token."""
        n, asking = len(self.decodes), list(self.decodes.asking)
        for row, spec in enumerate(self.specs, n):
            if spec.fork_keys or spec.params.logprobs or spec.num_candidates:
                asking.append(row)
        return asking

    def results(self, num_slices: int, tokens: Sequence[SampledToken]) -> list[SampledToken | None]:
        """`tokens` of the rows, by slice."""
        is_one_each = self.is_decode and len(tokens) == num_slices
        if is_one_each or self.slices == [*range(num_slices)]:
            return [*tokens]
        results: list[SampledToken | None] = [None] * num_slices
        end = 0
        for index, rows in itertools.groupby(self.slices):
            begin, end = end, end + sum(1 for _ in rows)
            token = tokens[end - 1]
            if end - begin > 1:
                token = token._replace(at_drafts=tuple(tokens[begin : end - 1]))
            results[index] = token
        return results


def has_extras(batch: StepBatch, rows: SampledRows) -> bool:
    """Whether anybody asks for more than a token a row: see extras.py."""
    return bool(rows.asking) or any(piece.prompt_targets for piece in batch.others)


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
        num_decodes=num_decodes(batch),
        is_graph=is_graph,
        graph_decodes=graph_decodes,
    )


def num_decodes(batch: StepBatch) -> int:
    """Slices at the beginning that are decodes: one token, and drafts behind it."""
    for index, piece in enumerate(batch.others, len(batch.decodes)):
        if len(piece.token_ids) != 1 + len(piece.draft_samples):
            return index
    return len(batch)


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
