"""So many at once, and then so many a second: who knocks without end costs a bounded share."""

from __future__ import annotations

import pytest

from baton.core.pace import Pace


def test_a_burst_and_then_a_rate() -> None:
    now_s = [0.0]
    pace = Pace(100, 8, lambda: now_s[0])
    assert [pace.take() for _ in range(8)] == [0.0] * 8
    assert pace.take() == pytest.approx(0.01)
    num_taken = 0
    for _ in range(1000):  # somebody knocks every millisecond
        now_s[0] += 0.001
        num_taken += pace.take() == 0.0
    assert num_taken in (99, 100)


def test_rest_brings_no_more_than_a_burst() -> None:
    now_s = [0.0]
    pace = Pace(100, 8, lambda: now_s[0])
    now_s[0] = 1e6
    assert sum(pace.take() == 0.0 for _ in range(100)) == 8
