"""What is launched of the sequences of a step."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from baton.core.request.request import Request, SamplingParams, token_key
from baton.core.request.token_ids import BlockHash
from baton.engine.scheduling.schedule import ScheduledSequence
from baton.engine.scheduling.sequence import Sequence
from baton.engine.step_slices import launch_slices

seeds = st.none() | st.integers(0, 2**64 - 1)  # None: greedy


@given(st.lists(st.tuples(seeds, st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=9))
def test_each_token_is_drawn_by_its_key(asked: list[tuple[int | None, int, int]]) -> None:
    sequences = []
    for number, (seed, sample_index, length) in enumerate(asked):
        params = SamplingParams(temperature=float(seed is not None), seed=seed or 0)
        prompt = tuple(range(length))
        request = Request(f"{number:032x}", 0, prompt, params, sample_index=sample_index)
        sequences.append(Sequence(request, number, False, BlockHash(b"")))
        sequences[-1].block_ids = array("i", [2])
        sequences[-1].num_prefill_tokens = length
    planned = [ScheduledSequence(one, one.num_tokens) for one in sequences]
    slices = launch_slices(planned, {}, {}, frozenset())
    for piece, (seed, sample_index, length) in zip(slices, asked, strict=True):
        assert piece.sample is not None
        key = 0 if seed is None else token_key(seed, sample_index, length)
        assert piece.sample.key == key and type(piece.sample.key) is int
