"""The formula of a step's time, and plans based on it, against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.step_cost import KNOTS, StepCost
from baton.core.step_shape import StepShape, pairs_of

GPU = StepCost(0.0045, (*(0.0,) * 6, 7e-6, *(21e-6,) * 3), 9e-10, 3.1e-8, max_rows=8192)
slopes = st.floats(0, 1e-4, allow_subnormal=False)
costs = st.builds(
    StepCost,
    base_s=slopes,
    row_s=st.tuples(*[slopes] * len(KNOTS)),
    pair_s=st.floats(0, 1e-8, allow_subnormal=False),
    key_s=slopes,
    max_rows=st.integers(0, 9000),
)
shapes = st.builds(StepShape, num_decodes=st.integers(0, 300), keys=st.integers(0, 100_000))


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 40))
def test_pairs_are_those_of_a_causal_chunk(num_tokens: int, context: int, more: int) -> None:
    assert pairs_of(num_tokens, context) == sum(context + i + 1 for i in range(num_tokens))
    whole = pairs_of(num_tokens + more, context)
    assert whole == pairs_of(num_tokens, context) + pairs_of(more, context + num_tokens)


def test_weights_are_read_once_whatever_the_rows() -> None:
    few, many = StepShape(num_decodes=1), StepShape(num_decodes=128)
    assert GPU.seconds(few) == GPU.seconds(many) == pytest.approx(0.0045)
    assert GPU.seconds(StepShape(512)) == pytest.approx(0.0045 + 384 * 7e-6 + 256 * 14e-6)


@given(costs, shapes, st.floats(0, 0.2), st.integers(0, 9000), st.integers(0, 600))
def test_as_many_tokens_fit_as_keep_the_time(
    cost: StepCost, beside: StepShape, seconds: float, context: int, most: int
) -> None:
    found = cost.prompt_tokens_within(seconds, beside, context, most)
    assert 0 <= found <= most
    assert found == 0 or cost.seconds(beside.with_prompt(found, context)) <= seconds
    assert found == most or cost.seconds(beside.with_prompt(found + 1, context)) > seconds
