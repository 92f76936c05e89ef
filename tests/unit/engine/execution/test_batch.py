"""A batch as arrays, against a walk over its tokens one by one."""

from __future__ import annotations

import numpy as np
import torch
from fakes.combinations.decode_columns import decode_columns
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import (
    DecodeColumns,
    SampledToken,
    SequenceSlice,
    StepBatch,
)
from baton.engine.execution.gpu.step_arrays import (
    awaited_places,
    decode_arrays,
    places_of_samples,
    special_rows,
)
from baton.kernels.sampling.sample_spec import SampleSpec

BLOCK_SIZE = 4
SPEC = SampleSpec(SamplingParams(temperature=0.0), key=1)


@st.composite
def slices(draw: st.DrawFn) -> SequenceSlice:
    """A decode with a known or an awaited token, a decode with drafts, or a chunk of a prompt."""
    start, follows = draw(st.integers(0, 20)), draw(st.none() | st.integers(0, 50))
    num_drafts = draw(st.integers(0, 3))
    num_tokens = 1 + num_drafts
    if follows is None and not num_drafts:
        num_tokens = draw(st.integers(1, 9))
    return SequenceSlice(
        draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens)),
        start,
        draw(st.permutations(range(10))),
        SPEC if num_drafts or follows is not None else draw(st.sampled_from([SPEC, None])),
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
    assert [*map(tuple, StepBatch.of(batch).flatten(BLOCK_SIZE).T.tolist())] == tokens
    found = awaited_places(StepBatch.of(batch))
    assert found.dtype == np.int64
    assert found.tolist() == places


@given(st.lists(slices(), min_size=1, max_size=6))
def test_each_slice_has_what_its_rows_sample(slices: list[SequenceSlice]) -> None:
    batch, end = StepBatch.of(slices), 0
    found = SampledToken.many(batch.logits_indices, [0.0] * len(batch.logits_indices))
    for piece, result in zip(slices, batch.results(found), strict=True):
        begin, end = end, end + len(piece.token_ids)
        if piece.sample is None or not found:
            assert result is None
        else:
            assert result is not None
            rows = [*(one.token_id for one in result.at_drafts), result.token_id]
            assert rows == [*range(begin, end)][-1 - len(piece.draft_samples) :]


@given(decode_columns(BLOCK_SIZE), st.lists(slices(), max_size=3))
def test_columns_are_the_slices_that_they_stand_for(
    decodes: DecodeColumns, others: list[SequenceSlice]
) -> None:
    batch = StepBatch(decodes, others)
    same, slots = StepBatch.of([*batch]), torch.empty(0)
    assert len(batch) == len(same) == len(decodes) + len(others)
    n = sum(batch.query_lens) + 2  # 2 rows of padding
    arrays, metadata = decode_arrays(batch, BLOCK_SIZE, n), batch.metadata(slots)
    assert arrays.tolist() == decode_arrays(same, BLOCK_SIZE, n).tolist()
    assert metadata == same.metadata(metadata.slot_mapping)
    assert batch.logits_indices == same.logits_indices
    assert [*places_of_samples(batch)] == [*places_of_samples(same)]
    assert (sorted(special_rows(batch)), batch.alternatives) == (
        special_rows(same),
        same.alternatives,
    )
    assert batch.num_decodes == same.num_decodes
    num_rows = len(batch.logits_indices)
    assert [*map(batch.spec, range(num_rows))] == same.specs
    tokens = SampledToken.many([*range(num_rows)], [0.0] * num_rows)
    assert batch.results(tokens) == same.results(tokens)
    assert batch.adapter_slots == same.adapter_slots
