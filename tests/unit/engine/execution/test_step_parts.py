"""A batch as arrays, beside what a walk over its tokens, one by one, gives."""

from __future__ import annotations

import numpy as np
import torch
from fakes.combinations.decode_columns import decode_columns
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.request import SamplingParams
from baton.engine.execution.batch import DecodeColumns, SequenceSlice, StepBatch
from baton.engine.execution.gpu.step_arrays import awaited_places, decode_arrays
from baton.engine.execution.step_parts import SampledRows, flatten, metadata_of
from baton.kernels.sampling.sample_spec import SampleSpec

BLOCK_SIZE = 4
SPEC = SampleSpec(SamplingParams(temperature=0.0), key=1)


@st.composite
def slices(draw: st.DrawFn) -> SequenceSlice:
    """A decode whose token is known or awaited, one with drafts, or a chunk of a prompt."""
    start, follows = draw(st.integers(0, 20)), draw(st.none() | st.integers(0, 50))
    num_drafts = draw(st.integers(0, 3))
    num_tokens = 1 + num_drafts
    if follows is None and not num_drafts:
        num_tokens = draw(st.integers(1, 9))
    return SequenceSlice(
        draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens)),
        start,
        draw(st.permutations(range(10))),
        SPEC,
        follows,
        draft_samples=[SPEC] * num_drafts,
    )


@given(st.lists(slices(), min_size=1, max_size=6))
def test_each_token_has_its_place(batch: list[SequenceSlice]) -> None:
    tokens, places = [], []
    for piece in batch:
        for index, token_id in enumerate(piece.token_ids):
            position = piece.start + index
            block = piece.block_table[position // BLOCK_SIZE]
            tokens.append((token_id, position, block * BLOCK_SIZE + position % BLOCK_SIZE))
            places.append(-1 if piece.follows is None else piece.follows + index)
    assert [*map(tuple, flatten(StepBatch.of(batch), BLOCK_SIZE).T.tolist())] == tokens
    found = awaited_places(StepBatch.of(batch))
    assert found.dtype == np.int64
    assert found.tolist() == places


@given(decode_columns(BLOCK_SIZE), st.lists(slices(), max_size=3))
def test_columns_are_the_slices_that_they_stand_for(
    decodes: DecodeColumns, others: list[SequenceSlice]
) -> None:
    batch = StepBatch(decodes, others)
    same, slots = StepBatch.of([*batch]), torch.empty(0)
    assert len(batch) == len(same) == len(decodes) + len(others)
    rows, as_slices = SampledRows.of(batch), SampledRows.of(same)
    n = sum(batch.query_lens) + 2  # of padding
    arrays, metadata = decode_arrays(batch, BLOCK_SIZE, rows, n), metadata_of(batch, slots)
    assert arrays.tolist() == decode_arrays(same, BLOCK_SIZE, as_slices, n).tolist()
    assert metadata == metadata_of(same, metadata.slot_mapping)
    assert (rows.slices, rows.tokens) == (as_slices.slices, as_slices.tokens)
    assert (sorted(rows.special), rows.asking) == (as_slices.special, as_slices.asking)
    assert rows.is_decode == as_slices.is_decode
    assert [*map(rows.spec, range(len(rows)))] == as_slices.specs
    assert batch.adapter_slots == same.adapter_slots
