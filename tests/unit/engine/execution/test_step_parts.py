"""A batch as arrays, beside what a walk over its tokens, one by one, gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.request import SamplingParams
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.step_parts import awaited_places, flatten
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
    assert [*map(tuple, flatten(batch, BLOCK_SIZE).T.tolist())] == tokens
    found = awaited_places(batch)
    assert found.dtype == np.int64
    assert found.tolist() == places
