"""A batch as flat arrays: what each of its tokens is, where it stands and where its KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from ...core.request.request import SAMPLING
from ...kernels.sampling.logit_adjustment import LogitAdjustment, Penalties
from ...kernels.sampling.sampling import RowSampling
from .batch import SampleSpec, SequenceSlice

Int64s = NDArray[np.int64]

# What the sampler takes as it is: parameters by their names, and the key. Its last field is made.
_TAKEN = [field.name for field in fields(RowSampling)][:-1]
_taken_from = attrgetter(*(f"params.{name}" if name in SAMPLING else name for name in _TAKEN))


def flatten(batch: Sequence[SequenceSlice], block_size: int) -> Int64s:
    """[3, tokens] int64: token ids, positions, slots (block_id * block_size + offset)."""
    num_tokens = sum(piece.num_scheduled_tokens for piece in batch)
    arrays = np.empty((3, num_tokens), np.int64)
    token_ids, positions, slots = arrays
    first = 0
    for piece in batch:
        n, start = piece.num_scheduled_tokens, piece.start
        if n == 1:  # a decode: numpy would take longer than all the rest
            table = piece.block_table
            token_ids[first] = piece.token_ids[0]
            positions[first] = start
            slots[first] = table[start // block_size] * block_size + start % block_size
        else:
            mine = slice(first, first + n)
            token_ids[mine] = piece.token_ids
            positions[mine] = np.arange(start, start + n)
            blocks = np.array(
                piece.block_table[start // block_size : -(-(start + n) // block_size)]
            )
            blocks_of_tokens = blocks[positions[mine] // block_size - start // block_size]
            slots[mine] = blocks_of_tokens * block_size + positions[mine] % block_size
        first += n
    return arrays


def row_sampling(spec: SampleSpec) -> RowSampling:
    """What the sampler needs of a request's wishes."""
    return RowSampling(*_taken_from(spec), _adjustment(spec))  # type: ignore[call-arg]


def _adjustment(spec: SampleSpec) -> LogitAdjustment | None:
    params, penalties = spec.params, None
    if spec.counts is not None:
        penalties = Penalties(
            spec.counts.token_ids,
            spec.counts.counts,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
    elif not (params.logit_bias or spec.forbidden_ids) and spec.allowed is None:
        return None
    return LogitAdjustment(params.logit_bias, penalties, spec.forbidden_ids, spec.allowed)
