"""Two engines over one model: all outputs are complete, timed by their engines' clocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from baton.bench.baselines.pairs import PAIRS, MeasuredDevice, PairPlayer, PairShape
from baton.bench.baselines.workload import WorkShape, make_jobs, poisson
from baton.core.engine_config import EngineConfig
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.cpu_steps import CompletedStep
from baton.engine.execution.runner import ModelRunner

SHAPE = WorkShape(
    num_requests=6,
    prompt_scale=60,
    output_scale=60,
    max_len=96,
    max_tokens=32,
    system_tokens=16,
    vocab_size=4000,
)


@pytest.fixture(scope="module")
def player() -> Iterator[PairPlayer]:
    runner = ModelRunner(EngineConfig(block_size=8, max_model_len=128, cpu_kv_bytes=8 << 20))
    shape = PairShape(40, 8, 32, tbt_s=0.025, eos=runner.eos_token_ids[0])
    yield PairPlayer(runner, shape, time.process_time)
    runner.close()


@pytest.mark.parametrize("mode", PAIRS)
def test_every_way_brings_all_tokens(player: PairPlayer, mode: str) -> None:
    jobs = make_jobs(SHAPE)
    arrivals_s = poisson(len(jobs), 100.0, seed=0)
    times = player.play(mode, jobs, arrivals_s)
    assert [len(one.token_s) for one in times] == [job.num_outputs for job in jobs]
    for one, at_s in zip(times, arrivals_s, strict=True):
        assert one.sent_s == pytest.approx(at_s) and one.ttft_s is not None and one.ttft_s > 0
        assert all(gap >= 0 for gap in one.gaps_s)


class Nothing:
    """A runner whose steps take as long as the clock is advanced."""

    def launch(self, batch: Sequence[SequenceSlice]) -> CompletedStep:
        return CompletedStep([])


def test_a_devices_clock_stands_still_between_steps() -> None:
    ticks = itertools.count()
    runner: Any = Nothing()
    device = MeasuredDevice(runner, lambda: float(next(ticks)))
    assert device.monotonic_s() == 0.0
    device.now_s = 5.0
    device.launch([])
    assert device.monotonic_s() == 6.0, "one tick into the step"
    assert device.now_s == 7.0
    assert device.now_s == device.monotonic_s() == 7.0
