"""What tables of results say of a figure; tests/unit/test_docs.py checks that pages are fresh."""

from __future__ import annotations

from typing import Any

import pytest

from baton.bench.result_tables import results
from baton.bench.result_tables.results import RESULTS


def figure(unit: str, median: float, target: float | None) -> dict[str, Any]:
    return {
        "name": "step",
        "unit": unit,
        "median": median,
        "min": 1.0,
        "max": 2.0,
        "repeats": 3,
        "floor": None,
        "bound_is": "nothing",
        "target": target,
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.00536, "0.00536"), (3.5616, "3.56"), (99.9, "99.9"), (1277.67, "1,278")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert results.number(value) == text


def test_a_missed_target_is_named() -> None:
    assert results.target(figure("ms", 2.0, 1.5)) == "1.5, missed"
    assert results.target(figure("ms", 1.0, 1.5)) == "1.5"
    assert results.target(figure("tokens/s", 1.0, 1.5)) == "1.5, missed"
    assert results.target(figure("ms", 1.0, None)) == ""


def test_a_bound_that_is_not_there_is_not_explained() -> None:
    row = results.figure_table([figure("ms", 2.0, None)]).splitlines()[-1]
    assert row == "| step | 2 ms | 1 - 2 |  |  |  |"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_says_which_commit_was_measured(path: Any) -> None:
    if path.stem not in (
        "serve",
        "copied_by_hand",
        "goodput",
    ):  # of several runs, each with its own
        assert results.load(path.stem)["commit"] in results.source(path.stem)
