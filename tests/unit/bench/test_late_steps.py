"""Late steps are reported with the activity of the engine's thread."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

from baton.bench.serve import late_steps

LATE = """
import time
from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

engine = LocalEngine.load(EngineConfig(model="demo", device="cpu"), lambda line: None)
launch, launches = engine.engine._runner.launch, []

def linger(batch):
    launches.append(len(batch))
    if len(launches) == 60:
        time.sleep(0.4)
    return launch(batch)

engine.engine._runner.launch = linger
engine.engine._runner.launch = linger
requests = [Request("a", 0, (5, 6, 7), SamplingParams(max_tokens=80, ignore_eos=True))]
for _ in engine.generating(requests, {}): pass
engine.close()
"""


def test_the_innermost_functions_are_named() -> None:
    assert late_steps.where(sys._getframe()).startswith("test_late_steps.py:")
    assert late_steps.where(None) == ""


def test_places_that_follow_themselves_are_one_line() -> None:
    looks = [(1.000, "a"), (1.002, "a"), (1.004, "b"), (1.006, "a")]
    assert [line.split() for line in late_steps.runs(looks, 0.999)] == [
        ["1.0", "ms,", "2", "x", "a"],
        ["5.0", "ms,", "1", "x", "b"],
        ["7.0", "ms,", "1", "x", "a"],
    ]


def test_a_step_is_late_by_much() -> None:
    assert late_steps.is_late(0.030, 0.010)
    assert not late_steps.is_late(0.014, 0.010) and not late_steps.is_late(9.0, None)


@pytest.mark.slow
def test_a_late_step_of_a_command_is_told(tmp_path: Path) -> None:
    assert late_steps.main([str(tmp_path), sys.executable, "-c", LATE]) == 0
    (reported,) = tmp_path.glob("*.txt")
    titles = re.findall(r"^([\d.]+) ms, expected [\d.]+, StepShape", reported.read_text(), re.M)
    assert any(float(took_ms) >= 400 for took_ms in titles)
    assert re.search(r" x <string>:\d+:linger", reported.read_text())


@pytest.mark.slow
def test_every_step_of_a_command_is_a_line(tmp_path: Path) -> None:
    assert late_steps.main([str(tmp_path), "--every-step", sys.executable, "-c", LATE]) == 0
    (found,) = tmp_path.glob("*.csv")
    with found.open() as file:
        steps = [*csv.DictReader(file)]
    assert len(steps) == 80
    assert sum(int(step["prompt_tokens"]) for step in steps) == 3
    (late,) = [step for step in steps if float(step["launching_ms"]) >= 400]
    assert int(late["decodes"]) == 1 and int(late["keys"]) == 3 + 59


@pytest.mark.parametrize("argv", [["/nowhere"], ["/nowhere", "--every-step"]])
def test_without_a_command_it_says_how(argv: list[str]) -> None:
    assert late_steps.main(argv) == 2
