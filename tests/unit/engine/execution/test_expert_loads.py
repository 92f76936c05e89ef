"""Counts of experts' tokens come to the host seldom, summed over the layers."""

from __future__ import annotations

import torch
from fakes.clock import FakeClock

from baton.engine.execution.expert_loads import EVERY_S, ExpertLoadReader
from baton.kernels.experts.experts import ExpertLoads


def test_counts_are_read_once_a_second() -> None:
    clock = FakeClock()
    loads = ExpertLoads(2, 3, 32, torch.device("cpu"))
    reader = ExpertLoadReader(loads, clock.monotonic_s)
    assert reader.read() == (0, 0, 0)
    loads.tokens += torch.tensor([[1, 2, 3], [10, 20, 30]])
    assert reader.read() == (0, 0, 0)
    clock.advance(EVERY_S)
    assert reader.read() == (11, 22, 33)
