"""The input arrays of a step on a GPU: `StepBatch.flatten`, sampling, and awaited tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from ..batch import Int64s, StepBatch


def sampling_arrays(batch: StepBatch) -> Int64s:
    """[2, rows]: keys, and temperatures as the bits of float64."""
    decodes, specs, n = batch.decodes, batch.specs, len(batch.decodes)
    arrays = np.empty((2, n + len(specs)), np.int64)
    arrays[:, :n] = decodes.keys.view(np.int64), decodes.temperatures.view(np.int64)
    arrays[0, n:] = np.array([spec.key for spec in specs], np.uint64).view(np.int64)
    arrays[1, n:] = np.array([spec.params.temperature for spec in specs]).view(np.int64)
    return arrays


def special_rows(batch: StepBatch) -> list[int]:
    """Rows that are sampled by more than temperature and noise."""
    specs = chain(batch.decodes.specs.items(), enumerate(batch.specs, len(batch.decodes)))
    return [*batch.decodes.special, *(row for row, one in specs if one.needs_more_than_noise)]


def token_arrays(batch: StepBatch, block_size: int, num_tokens: int) -> Int64s:
    """[4, num_tokens]: the results of `flatten` and `awaited_places`, then padding."""
    flat = batch.flatten(block_size)
    arrays, n = np.zeros((4, num_tokens), np.int64), flat.shape[1]
    arrays[:3, :n] = flat
    arrays[3, :n], arrays[3, n:] = awaited_places(batch), -1
    return arrays


def decode_arrays(batch: StepBatch, block_size: int, num_tokens: int) -> Int64s:
    """[6, num_tokens]: the results of `token_arrays` and `sampling_arrays`. Padding is greedy."""
    arrays = np.zeros((6, num_tokens), np.int64)
    arrays[:4] = token_arrays(batch, block_size, num_tokens)
    arrays[4:, : len(batch.logits_indices)] = sampling_arrays(batch)
    return arrays


def awaited_places(batch: StepBatch) -> Int64s:
    """[tokens]: for each token that the host does not know yet, its place among the samples of the
    previous step; -1 for known tokens."""
    at, places, end = list[int](), list[int](), len(batch.decodes)
    found = np.full(sum(batch.query_lens), -1, np.int64)
    found[:end] = batch.decodes.follows
    for piece in batch.others:
        end += len(piece.token_ids)
        if piece.follows is not None:
            num_awaited = 1 + len(piece.draft_samples)
            at += range(end - num_awaited, end)
            places += range(piece.follows, piece.follows + num_awaited)
    found[at] = places
    return found


def places_of_samples(batch: StepBatch) -> Sequence[int]:
    """The places of the rows' sampled tokens. The next step finds them by slice; after a step with
    drafts no step is launched before these are collected, so they are in row order."""
    if any(piece.draft_samples for piece in batch.others):
        return range(len(batch.logits_indices))
    n = len(batch.decodes)
    others = (i for i, piece in enumerate(batch.others, n) if piece.sample is not None)
    return [*range(n), *others]
