"""The simulation's parts: the arrivals, the search for a split, and a small run."""

from __future__ import annotations

import pytest

from baton.bench import simulated_goodput
from baton.bench.simulated_goodput import POINTS, Point, best_split, measure, measure_point


@pytest.mark.parametrize("peak", [1, 3, 8, 13, 15])
def test_the_best_split_is_found_in_few_runs(peak: int) -> None:
    tried = []

    def share_of(num_prefill: int) -> float:
        tried.append(num_prefill)
        return 0.9 - abs(num_prefill - peak) / 100

    assert best_split(16, share_of) == peak
    assert len(tried) == len(set(tried)) <= 10


def test_a_split_that_serves_all_is_not_improved() -> None:
    assert best_split(256, lambda num_prefill: 1.0) == 128
    assert best_split(2, lambda num_prefill: 0.5) == 1


def test_a_mix_that_shifts_has_each_kind_in_its_phases() -> None:
    kinds = (((8, 1), 50.0), ((4, 2), 100.0))
    arrivals = list(Point("shift", kinds, 25, seconds=8.0, num_cards=4).arrivals())
    in_phase = [
        [lengths for due_s, lengths in arrivals if 2 * phase + 0.1 < due_s < 2 * phase + 2]
        for phase in range(4)
    ]
    assert [set(phase) for phase in in_phase] == [{(8, 1)}, {(4, 2)}] * 2
    assert len(in_phase[0]) == pytest.approx(2 * 50 * 1.9, rel=0.25)
    assert len(in_phase[1]) == pytest.approx(2 * 100 * 1.9, rel=0.25)


def test_every_pair_of_cards_has_a_copy_of_the_trace() -> None:
    one = Point("trace", (), 50, seconds=60.0, trace_speed=2.0)
    two = Point("trace", (), 50, seconds=60.0, num_cards=4, trace_speed=2.0)
    assert len(list(two.arrivals())) == 2 * len(list(one.arrivals())) > 600
    lengths = sorted(lengths for _, lengths in one.arrivals())
    assert sorted(lengths for _, lengths in two.arrivals()) == sorted(2 * lengths)
    slow = next(point for point in POINTS if not point.kinds)
    assert all(0 <= due_s < slow.seconds for due_s, _ in slow.arrivals())


def test_a_point_has_auto_and_what_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_goodput, "measure", lambda *how: _row(*how))
    rows = measure_point(Point("8/2", (((8, 2), 1.0),), 25, num_cards=4))
    assert [(row["mode"], row["prefill_cards"]) for row in rows] == [
        ("auto", 2),
        ("aggregated", 2),
        ("disaggregated", 3),
    ]


def _row(point: Point, mode: str, num_prefill: int) -> dict[str, object]:
    return {"mode": mode, "prefill_cards": num_prefill, "good_share": num_prefill / 10}


@pytest.mark.parametrize("mode", ["auto", "aggregated", "disaggregated"])
def test_gateways_that_know_little_of_each_other_serve_all(mode: str) -> None:
    point = Point("600/8", (((600, 8), 12.0),), 25, seconds=3.0, num_cards=4, num_gateways=2)
    row = measure(point, mode, 2)
    assert row["good_share"] == 1.0 and row["num_requests"] > 20
