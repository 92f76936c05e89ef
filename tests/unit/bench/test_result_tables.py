"""The cells of result tables for a figure; tests/unit/test_docs.py checks that pages are up to
date.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.bench.result_tables import baselines, goodput, offline, results
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
    if path.stem.startswith(("sharegpt_", "goodput")):
        assert all(call["commit"] for call in results.load(path.stem)["calls"])
    elif path.stem == "offline":
        assert all(row["commit"] for row in results.load(path.stem)["rows"])
    elif path.stem not in ("serve", "copied_by_hand"):  # results of several runs
        assert results.load(path.stem)["commit"] in results.source(path.stem)


def test_tables_that_are_measured_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table without its results file says so; with the file, it has the measured rows."""
    for module in (results, baselines, goodput, offline):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert offline.offline() == goodput.sharegpt() == "Not measured yet.\n"
    assert "--gpu" in baselines.on_gpu()
    shutil.copy(RESULTS / "baselines.json", tmp_path / "baselines_gpu.json")
    assert "+ auto" in baselines.on_gpu() and "baselines_gpu.json" in baselines.on_gpu()
    rows = [
        {"model": "m", "engine": engine, "num_seqs": 256, "prompt_tokens": 1000,
         "output_tokens": 2000, "tokens_per_s": 12_345.6, "commit": "c", "date": "d",
         "command": "run it", **more}
        for engine, more in (("vllm", {}), ("baton", {"host_ms": 2.5, "step_ms": 6.25}))
    ]  # fmt: skip
    (tmp_path / "offline.json").write_text(json.dumps({"rows": rows}))
    lines = offline.offline().splitlines()
    assert lines[2] == "| m | baton | 256 | 1,000 | 2,000 | 12,346 | 2.5 ms | 6.25 ms | c, d |"
    assert lines[3] == "| m | vllm | 256 | 1,000 | 2,000 | 12,346 |  |  | c, d |"
    spread = {"p50": 10.0, "p90": 20.0}
    row = {
        "mode": "auto", "num_cards": 1, "rate_per_s": 4.0, "call": 0,
        "normalised_latency_ms": 31.0, "attained": {"25": 0.5},
        "window_s": [5.0, 25.0], "num_counted": 72,
        "groups": {"probe": {"ttft_ms": spread, "tpot_ms": spread}},
    }  # fmt: skip
    call = {"commit": "c", "date": "d", "command": "run it", "machine": {"cards": "GPU"}}
    (tmp_path / "sharegpt_x.json").write_text(json.dumps({"calls": [call], "rows": [row]}))
    assert (
        "| x | 1 x GPU | auto | 4 (3.6) | 31 | 10 / 20 | 10 / 20 | 25 ms: 0.50 |"
        in goodput.sharegpt()
    )


def test_goodput_in_brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each cell the highest rate that some mode keeps; modes with another number of requests
    are compared at their own rate."""

    def row(
        mode: str, rate: float, share: float, num: int, y_ms: float | None
    ) -> dict[str, object]:
        return {
            "mode": mode, "cell": "8/4", "num_cards": 2, "rate_per_s": rate, "call": 0,
            "attained": {"25": share}, "num_counted": num, "y_ms": y_ms, "groups": {"probe": {}},
        }  # fmt: skip

    rows = [
        row("auto, 2 gateways", 4.0, 0.95, 100, 25.0),
        row("auto, 2 gateways", 4.0, 0.99, 100, 50.0),  # another promise
        row("auto, 2 gateways, margin 0.08", 4.0, 0.99, 100, 25.0),
        row("1+1, 2 gateways", 4.0, 0.5, 98, None),
        row("auto, 2 gateways", 5.0, 0.92, 100, 25.0),
        row("vllm-512, 2 gateways", 5.0, 0.9, 130, None),  # with other arrivals
        row("auto, 2 gateways", 6.0, 0.8, 100, 25.0),  # not kept
    ]
    calls = [{"machine": {"cards": "H200"}}]
    (tmp_path / "goodput.json").write_text(json.dumps({"calls": calls, "rows": rows}))
    for module in (results, goodput):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    head, _, *lines = goodput.summary().splitlines()
    assert head.startswith("| cards | in/out | requests/s | gateways | auto |")
    assert lines == ["| 2 x H200 | 8/4 | 4 | 2 | 95 % |  | 50 % | 90 % at 5 |"]
