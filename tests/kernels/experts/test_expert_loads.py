"""Token counts of experts are copied to the host rarely, summed over the layers."""

from __future__ import annotations

import torch
from fakes.clock import FakeClock

from baton.kernels.experts.expert_loads import EVERY_S, ExpertLoadReader
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


def test_what_was_counted_before_the_first_request_is_forgotten() -> None:
    clock = FakeClock()
    loads = ExpertLoads(2, 3, 32, torch.device("cpu"))
    reader = ExpertLoadReader(loads, clock.monotonic_s)
    loads.tokens += 5
    assert reader.read() == (10, 10, 10)
    loads.tokens += 1
    reader.forget()
    assert reader.read() == (0, 0, 0)
    loads.tokens[0, 1] += 2
    clock.advance(EVERY_S)
    assert reader.read() == (0, 2, 0)
