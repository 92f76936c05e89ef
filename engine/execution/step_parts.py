"""What steps on either device share: the batch as arrays, and where it samples."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.attention.attention import AttentionMetadata
from ...kernels.sampling.sample_spec import SampleSpec
from ..kv.block_pool import PADDING_BLOCK
from ..lora.rank_adapters import RankAdapters
from .batch import SampledToken, SequenceSlice

Int64s = NDArray[np.int64]

# BLAS multiplies a single row by another routine, whose sums round differently: with this second
# row a decode alone gives bit for bit what it gives in a batch.
PADDING_SLICE = SequenceSlice((0,), 0, block_table=array("i", [PADDING_BLOCK]), sample=None)


def padded(batch: Sequence[SequenceSlice]) -> Sequence[SequenceSlice]:
    """With a slice behind it that is nobody's, if it is a single row."""
    is_alone = len(batch) == 1 and batch[0].num_scheduled_tokens == 1
    return (*batch, PADDING_SLICE) if is_alone else batch


def flatten(batch: Sequence[SequenceSlice], block_size: int) -> Int64s:
    """[3, tokens] int64: token ids, positions, slots (block_id * block_size + offset)."""
    lens = [len(piece.token_ids) for piece in batch]
    arrays = np.empty((3, sum(lens)), np.int64)
    token_ids, positions, slots = arrays
    first = len(batch)
    if sum(lens) > first:
        first = next(index for index, n in enumerate(lens) if n > 1)
    if first:  # the decodes before the first chunk, all at once
        singles, mine = batch[:first], slice(first)
        token_ids[mine] = [piece.token_ids[0] for piece in singles]
        positions[mine] = [piece.start for piece in singles]
        places, offsets = np.divmod(positions[mine], block_size)
        at = zip(singles, places.tolist(), strict=True)
        slots[mine] = [piece.block_table[place] for piece, place in at]
        slots[mine] *= block_size
        slots[mine] += offsets
    if first < len(batch):
        _flatten_chunks(batch[first:], lens[first:], arrays[:, first:], block_size)
    return arrays


def _flatten_chunks(
    chunks: Sequence[SequenceSlice], lens: Sequence[int], arrays: Int64s, block_size: int
) -> None:
    """The same of several tokens each, all at once too: decodes with drafts are many."""
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
    """Where a step samples, as parallel lists: a slice with drafts has several rows, one by one."""

    slices: list[int]
    tokens: list[int]  # of the step
    specs: list[SampleSpec]
    is_decode: bool = False  # decodes alone, all of which sample

    @classmethod
    def of(cls, batch: Sequence[SequenceSlice]) -> SampledRows:
        specs = [piece.sample for piece in batch if piece.sample is not None]
        num_tokens = sum([len(piece.token_ids) for piece in batch])
        if len(specs) == num_tokens:  # nearly always
            return cls([*range(num_tokens)], [*range(num_tokens)], specs, is_decode=True)
        is_decode = len(specs) == len(batch) and num_decodes(batch) == len(batch)
        found, end = cls([], [], [], is_decode), 0
        for index, piece in enumerate(batch):
            end += len(piece.token_ids)
            if piece.sample is None:
                continue
            drafts = piece.draft_samples
            if drafts:
                found.slices.extend([index] * len(drafts))
                found.tokens.extend(range(end - 1 - len(drafts), end - 1))
                found.specs.extend(drafts)
            found.slices.append(index)
            found.tokens.append(end - 1)
            found.specs.append(piece.sample)
        return found

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


def has_extras(batch: Sequence[SequenceSlice], rows: SampledRows) -> bool:
    """Whether anybody asks for more than a token a row: see extras.py."""
    if [piece for piece in batch if piece.prompt_targets]:
        return True
    some = [one for one in rows.specs if one.fork_keys or one.params.logprobs or one.num_candidates]
    return bool(some)


def sampling_arrays(specs: Sequence[SampleSpec]) -> Int64s:
    """[2, rows]: keys, and the bits of the temperatures in float64."""
    keys = np.array([spec.key for spec in specs], np.uint64)
    temperatures = np.array([spec.params.temperature for spec in specs], np.float64)
    return np.stack([keys.view(np.int64), temperatures.view(np.int64)])


def decode_arrays(
    batch: Sequence[SequenceSlice], block_size: int, specs: Sequence[SampleSpec]
) -> Int64s:
    """[6, rows]: what `flatten`, `awaited_places` and `sampling_arrays` give. Rows behind `specs`
    are padding, and greedy."""
    flat = flatten(batch, block_size)
    arrays = np.zeros((6, flat.shape[1]), np.int64)
    arrays[:3] = flat
    arrays[3] = awaited_places(batch)
    arrays[4:, : len(specs)] = sampling_arrays(specs)
    return arrays


def prefill_arrays(batch: Sequence[SequenceSlice], block_size: int, num_tokens: int) -> Int64s:
    """[4, num_tokens]: what `flatten` and `awaited_places` give. Tokens behind them are padding."""
    flat = flatten(batch, block_size)
    arrays, n = np.zeros((4, num_tokens), np.int64), flat.shape[1]
    arrays[:3, :n] = flat
    arrays[3, :n], arrays[3, n:] = awaited_places(batch), -1
    return arrays


def metadata_of(
    batch: Sequence[SequenceSlice],
    slots: Tensor,
    *,
    is_graph: bool = False,
    graph_decodes: int | None = None,
) -> AttentionMetadata:
    """What attention plans a step by; `slots` [tokens] lie on the device."""
    query_lens = [len(piece.token_ids) for piece in batch]
    is_single = sum(query_lens) == len(batch)  # decodes without drafts, nearly always
    return AttentionMetadata(
        query_lens=query_lens,
        seq_lens=[piece.start + n for piece, n in zip(batch, query_lens, strict=True)],
        block_tables=[piece.block_table for piece in batch],
        slot_mapping=slots,
        num_decodes=len(batch) if is_single else num_decodes(batch),
        is_graph=is_graph,
        graph_decodes=graph_decodes,
    )


def num_decodes(batch: Sequence[SequenceSlice]) -> int:
    """Slices at the beginning that are decodes: one token, and drafts behind it."""
    for index, piece in enumerate(batch):
        if len(piece.token_ids) != 1 + len(piece.draft_samples):
            return index
    return len(batch)


def has_drafts(batch: Sequence[SequenceSlice]) -> bool:
    return any(piece.draft_samples for piece in batch)


def awaited_places(batch: Sequence[SequenceSlice]) -> Int64s:
    """[tokens]: where among the samples of the step before a token that is not known yet will be;
    -1 for those that are known."""
    follows = [piece.follows for piece in batch]
    lens = [len(piece.token_ids) for piece in batch]
    num_tokens = sum(lens)
    if num_tokens == len(batch):  # decodes, nearly always
        return np.array([-1 if place is None else place for place in follows], np.int64)
    at, places, end = list[int](), list[int](), 0
    for piece, place, n in zip(batch, follows, lens, strict=True):
        end += n
        if place is not None:
            num_awaited = 1 + len(piece.draft_samples)
            at += range(end - num_awaited, end)
            places += range(place, place + num_awaited)
    found = np.full(num_tokens, -1, np.int64)
    found[at] = places
    return found


def plan_adapters(
    adapters: RankAdapters | None, batch: Sequence[SequenceSlice], num_rows: int
) -> bool:
    """Let the next step of so many rows compute with its slices' adapters; whether it has any."""
    if adapters is None:
        return False
    slots = [piece.adapter_slot for piece in batch]
    if all(slot is None for slot in slots):
        adapters.rest()
        return False
    adapters.plan((piece.num_scheduled_tokens for piece in batch), slots, num_rows)
    return True
