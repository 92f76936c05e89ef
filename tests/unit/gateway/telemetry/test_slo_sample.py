"""The sample of calls that a row keeps for SLOs: each call is equally likely to be in it, however
the calls were added and merged.
"""

from __future__ import annotations

import pytest

from baton.gateway.telemetry.calls.slo import MAX_JUDGED, Judged, SloTargets

TARGETS = SloTargets(ttft_slo_s=1.0, tbt_slo_s=1.0)
GOOD, BAD = (True, 0.5, 0.5), (False, 0.5, 0.5)
NUM_PARTS = 3000


def joined(parts: list[Judged]) -> Judged:
    whole = Judged()
    for part in parts:
        whole = whole.joined(part, MAX_JUDGED)
        assert len(whole.calls) <= MAX_JUDGED
    return whole


@pytest.mark.parametrize("part", [1, 2, 10, 150, 500])
@pytest.mark.parametrize("is_good_first", [True, False])
def test_early_and_late_calls_are_in_the_sample_alike(part: int, is_good_first: bool) -> None:
    parts = [
        Judged(part, [GOOD if (index < NUM_PARTS // 3) is is_good_first else BAD] * part)
        for index in range(NUM_PARTS)
    ]
    whole = joined(parts)
    assert whole.number == NUM_PARTS * part
    assert len(whole.calls) > MAX_JUDGED * 0.9
    truly = 1 / 3 if is_good_first else 2 / 3
    assert whole.num_good(TARGETS) / whole.number == pytest.approx(truly, abs=0.12)  # 3.5 sigma


def test_a_gateway_with_few_calls_is_in_the_sample_of_one_with_many() -> None:
    """Calls of an idle gateway are in the sample beside a busy one's: 100 rows, each with one
    second's calls of both."""
    good = sum(
        joined([Judged(400 + row, [BAD] * 200), Judged(40, [GOOD] * 40)]).num_good(TARGETS)
        for row in range(100)
    )
    assert good == pytest.approx(4000, rel=0.05)


def test_a_sample_of_few_joins_are_all_calls() -> None:
    parts = [Judged(1, [(True, float(index), 0.0)]) for index in range(MAX_JUDGED)]
    assert joined(parts).calls == [part.calls[0] for part in parts]
