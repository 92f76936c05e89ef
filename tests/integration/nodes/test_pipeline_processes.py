"""Stages in separate processes give the tokens of one process, and their engine ends with any of
them.

All request features, with stages as threads: tests/unit/engine/parallel.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from engines.generation import outputs_of

from baton.core.engine_config import EngineConfig
from baton.core.errors import EngineFailed
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine


def test_two_stages_equal_one_and_end_together(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_hidden_layers=3, head_dim=16)
    config = EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=60)
    requests = [
        Request(f"{index:032x}", 0, tuple(range(3, 20 + index)), SamplingParams(max_tokens=12))
        for index in range(4)
    ]
    expected = outputs_of(LocalEngine(config, ModelRunner(config)), requests)
    engine = LocalEngine.load(dataclasses.replace(config, pipeline_parallel_size=2), print)
    assert engine.ranks is not None
    (process,) = engine.ranks.processes
    os.kill(process.pid, signal.SIGTERM)  # all get it; the leader decides when they end
    assert outputs_of(engine, requests) == expected
    endless = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    engine.engine.add(Request("d" * 32, 0, (3, 4, 5), endless))
    for _ in range(5):
        engine.engine.step()
    began_s = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        while True:
            engine.engine.step()
    assert time.monotonic() - began_s < 1.5
    engine.close()
