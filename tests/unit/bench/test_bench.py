"""The benchmarks still run: their parts, and the fastest family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.bench import cpu
from baton.bench.cpu_families import scheduling
from baton.bench.floors import figures
from baton.bench.floors.figures import Figure
from baton.engine.execution.batch import SequenceSlice


def test_targets_are_upper_bounds_for_times_and_lower_ones_for_rates() -> None:
    assert Figure("t", "ms", (1.0, 2.0, 9.0), target=2.0).is_met
    assert not Figure("t", "ms", (1.0, 3.0, 9.0), target=2.0).is_met
    assert Figure("r", "tokens/s", (1.0, 3.0, 9.0), target=2.0).is_met
    assert Figure("r", "tokens/s", (1.0,)).is_met is None


def test_a_table_shows_median_noise_bound_and_a_missed_target() -> None:
    missed = Figure("step", "ms", (1.0, 3.0, 9.0), 0.5, "nothing", target=2.0)
    header, row = figures.table([missed]).splitlines()
    assert row.split() == ["step", "3", "ms", "1", "-", "9", "0.5", "2", "MISSED", "nothing"]
    assert "median" in header


def test_results_say_where_they_come_from(tmp_path: Path) -> None:
    rate = Figure("r", "GB/s", (1.0, 3.0), 7.0, "memcpy")
    figures.write(tmp_path / "results" / "x.json", {"shm": [rate]}, figures.machine())
    result = json.loads((tmp_path / "results" / "x.json").read_text())
    assert result["machine"]["cores"] >= 1
    assert result["commit"]
    assert result["figures"]["shm"][0]["median"] == 2.0
    assert result["figures"]["shm"][0]["ceiling"] == 7.0


async def test_the_scheduler_is_measured_at_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    class Watched(scheduling.HostRunner):
        def launch(self, batch: Sequence[SequenceSlice]) -> scheduling.HostStep:
            batches.append(len(batch))
            return super().launch(batch)

    monkeypatch.setattr(scheduling, "HostRunner", Watched)
    samples = await scheduling._measure_steps(8)
    assert samples and set(batches[-len(samples) :]) == {8}
    parts = {"plan", "arrays", "collect", "advance", "deliver"}
    assert all(set(one) == parts and min(one.values()) > 0 for one in samples)


def test_an_unknown_family_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu.main(["gateways"]) == 2
    assert "gateway" in capsys.readouterr().out
