"""A burst, and then a rate: a caller that requests continuously gets a bounded share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.channels.token_bucket import TokenBucket


def num_begun(bucket: TokenBucket, num_wanted: int, now_s: float) -> int:
    """The number of requests, out of `num_wanted`, that may begin now."""
    begun = 0
    for _ in range(num_wanted):
        if bucket.wait_s(1, now_s) == 0.0:
            bucket.spend(1, now_s)
            begun += 1
    return begun


def test_a_burst_and_then_a_rate() -> None:
    bucket = TokenBucket(8, 0.08, 0.0)
    assert num_begun(bucket, 9, 0.0) == 8
    assert bucket.wait_s(1, 0.0) == pytest.approx(0.01)
    total = sum(num_begun(bucket, 1, step / 1000) for step in range(1, 1001))
    assert total in (99, 100)


def test_rest_brings_no_more_than_a_burst() -> None:
    assert num_begun(TokenBucket(8, 0.08, 0.0), 100, 1e6) == 8


@given(st.integers(1, 50), st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60)), max_size=40))
def test_no_minute_has_more_than_twice_the_limit_and_waiting_always_helps(
    per_minute: int, asks: Sequence[tuple[float, int]]
) -> None:
    """A full bucket and its refill bound any minute, and waiting for the reported time
    is enough."""
    bucket, now_s = TokenBucket(per_minute, 60, 0.0), 0.0
    spent: list[tuple[float, int]] = []
    for gap_s, cost in asks:
        now_s += gap_s
        wait_s = bucket.wait_s(cost, now_s)
        if wait_s:
            assert bucket.wait_s(cost, now_s + wait_s + 1e-6) == 0.0
            continue
        bucket.spend(cost, now_s)
        spent.append((now_s, min(cost, per_minute)))
    for start_s, _ in spent:
        in_window = sum(cost for at_s, cost in spent if start_s <= at_s < start_s + 60)
        assert in_window <= 2 * per_minute + 1e-6


def test_more_than_a_minute_holds_is_due_when_the_bucket_is_full_and_leaves_debt() -> None:
    bucket = TokenBucket(60, 60, 0.0)
    assert bucket.wait_s(600, 0.0) == 0
    bucket.spend(600, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(541.0)
    bucket.spend(-540, 0.0)  # 60 were used
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
