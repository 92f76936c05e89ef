"""Beams on a GPU equal those of the CPU, with concurrent requests and with graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from engines.integrity import check_integrity

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def outputs_on(device: str, folder: Path) -> dict[str, list[int]]:
    config = EngineConfig(
        model=str(folder), device=device, dtype="float32", block_size=16, num_kv_blocks=400
    )
    requests = [
        Request(
            f"b{width}",
            0,
            tuple(range(3, 3 + 20 * width)),
            SamplingParams(
                use_beam_search=True,
                best_of=width,
                temperature=0.0,
                max_tokens=20,
                ignore_eos=True,
                length_penalty=0.5,
                repetition_penalty=1.2 if width == 4 else 1.0,
            ),
            fork_ids=(f"b{width}-1",),
        )
        for width in (2, 4, 8)
    ]
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    requests += [Request(f"p{i}", 0, tuple(range(i, 40 + i)), plain) for i in range(5)]
    local = LocalEngine.load(config, print)
    try:
        found = outputs_of(local, requests)
        check_integrity(local.engine)
        assert local.engine.pool.counts.held == 0
        return found
    finally:
        local.close()


def test_beams_are_those_of_the_cpu(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=3, has_varied_vectors=True)
    assert outputs_on("cuda", tmp_path) == outputs_on("cpu", tmp_path)
