"""The measured cost of prefills, against synthetic steps with noise and outliers."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.scheduling.prefill_cost import PrefillCost, PrefillCostEstimator

STEP_S, TOKEN_S = 0.008, 45e-6


def played(sizes: list[int], *, noise: float = 0.0, outliers: float = 0.0) -> PrefillCost | None:
    chance = random.Random(3)
    estimator = PrefillCostEstimator()
    estimator.observe(max(sizes), 9.0)  # the first step compiles
    for num_tokens in sizes:
        seconds = (STEP_S + num_tokens * TOKEN_S) * (1 + noise * chance.uniform(-1, 1))
        estimator.observe(num_tokens, seconds + (chance.random() < outliers) * 2.0)
    return estimator.estimate()


def test_it_finds_the_line() -> None:
    cost = played([16, 500, 2048] * 5)
    assert cost is not None and astuple(cost) == pytest.approx((STEP_S, TOKEN_S))


def test_noise_and_outliers_change_little() -> None:
    chance = random.Random(1)
    sizes = [int(2 ** chance.uniform(2, 13)) for _ in range(300)]
    cost = played(sizes, noise=0.1, outliers=0.1)
    assert cost is not None
    for num_tokens in (64, 512, 2048, 8192):
        assert cost.step_s + num_tokens * cost.token_s == pytest.approx(
            STEP_S + num_tokens * TOKEN_S, rel=0.15
        )


def test_it_is_absent_before_there_are_samples_of_two_sizes() -> None:
    assert PrefillCostEstimator().estimate() is None
    assert played([2048] * 100) is None
    assert played([2000, 2048, 2200] * 30) is None, "too close together to tell"
    assert played([2048] * 100 + [16]) is None, "one is no sample"
    assert played([2048] * 100 + [16] * 3) is not None


def test_bulk_prompts_of_one_size_do_not_displace_the_others() -> None:
    cost = played([16] * 5 + [2048] * 1000)
    assert cost is not None and astuple(cost) == pytest.approx((STEP_S, TOKEN_S))


def test_it_follows_a_device_that_becomes_slower() -> None:
    estimator = PrefillCostEstimator()
    for factor in (1, 2):
        for num_tokens in [16, 500, 2048] * 15:
            estimator.observe(num_tokens, factor * (STEP_S + num_tokens * TOKEN_S))
    cost = estimator.estimate()
    assert cost is not None and astuple(cost) == pytest.approx((2 * STEP_S, 2 * TOKEN_S))


@given(
    st.lists(
        st.tuples(st.integers(1, 10_000), st.floats(0, 10, allow_subnormal=False)), max_size=60
    )
)
def test_it_is_never_negative(samples: list[tuple[int, float]]) -> None:
    estimator = PrefillCostEstimator()
    for num_tokens, seconds in samples:
        estimator.observe(num_tokens, seconds)
    cost = estimator.estimate()
    assert cost is None or (cost.step_s >= 0 and cost.token_s >= 0)
