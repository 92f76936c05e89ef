"""Decode slices as DecodeColumns, with arbitrary values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import DecodeColumns, SequenceSlice
from baton.kernels.sampling.sample_spec import SampleSpec, needs_more_than_noise

PARAMS = [
    *(SamplingParams(temperature=0.0), SamplingParams(temperature=0.5)),
    *(SamplingParams(top_p=0.5), SamplingParams(logprobs=3)),
]


@st.composite
def decode_columns(draw: st.DrawFn, block_size: int) -> DecodeColumns:
    n = draw(st.integers(1, 4))

    def numbers(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=n, max_size=n))

    params = draw(st.lists(st.sampled_from(PARAMS), min_size=n, max_size=n))
    keys = numbers(0, 2**64 - 1)
    adding = draw(st.sets(st.integers(0, n - 1)))
    starts, tables = numbers(0, 20), [draw(st.permutations(range(10))) for _ in range(n)]
    blocks = [table[start // block_size] for table, start in zip(tables, starts, strict=True)]
    return DecodeColumns(
        *(np.array(numbers(0, 99)), np.array(starts), np.array(blocks)),
        np.array(numbers(-1, 9)),
        np.array(keys, np.uint64),
        np.array([one.temperature for one in params]),
        params,
        tables,
        numbers(0, 3),
        special=[row for row, one in enumerate(params) if one.top_p < 1 and row not in adding],
        alternatives=[row for row, one in enumerate(params) if one.logprobs],
        specs={row: SampleSpec(params[row], keys[row], (4,)) for row in adding},
    )


def columns_of(slices: Sequence[SequenceSlice], block_size: int) -> DecodeColumns:
    """The same decodes as columns."""
    specs = [one.sample for one in slices if one.sample is not None]
    assert len(specs) == len(slices)
    params, places = [spec.params for spec in specs], [one.start // block_size for one in slices]
    tables = [one.block_table for one in slices]
    return DecodeColumns(
        np.array([one.token_ids[0] for one in slices]),
        np.array([one.start for one in slices]),
        np.array([table[place] for table, place in zip(tables, places, strict=True)]),
        np.array([-1 if one.follows is None else one.follows for one in slices]),
        np.array([spec.key for spec in specs], np.uint64),
        np.array([one.temperature for one in params]),
        params,
        tables,
        [one.adapter_slot for one in slices],
        special=[row for row, one in enumerate(params) if needs_more_than_noise(one)],
        alternatives=[row for row, one in enumerate(params) if one.logprobs],
    )
