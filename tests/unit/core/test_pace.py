"""So many at once, and then so many a second: who knocks without end costs a bounded share."""

from __future__ import annotations

import pytest

from baton.core.channels.accept_thread import Pace


def num_begun(pace: Pace, num_wanted: int) -> int:
    """How many of so many that would begin now do."""
    begun = 0
    for _ in range(num_wanted):
        if pace.wait_s() == 0.0:
            pace.take()
            begun += 1
    return begun


def test_a_burst_and_then_a_rate() -> None:
    now_s = [0.0]
    pace = Pace(100, 8, lambda: now_s[0])
    assert num_begun(pace, 9) == 8
    assert pace.wait_s() == pytest.approx(0.01)
    total = 0
    for _ in range(1000):  # somebody knocks every millisecond
        now_s[0] += 0.001
        total += num_begun(pace, 1)
    assert total in (99, 100)


def test_rest_brings_no_more_than_a_burst() -> None:
    now_s = [0.0]
    pace = Pace(100, 8, lambda: now_s[0])
    now_s[0] = 1e6
    assert num_begun(pace, 100) == 8
