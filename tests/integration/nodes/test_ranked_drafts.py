"""Two ranks with a draft model or a head: the tokens of one process, and accepted drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.generation import outputs_of
from fakes.speculation.eagle3_heads import write_target
from fakes.speculation.head_engines import eagle3, mtp

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.scheduling.outputs import SpeculationCounts


def with_draft_model(folder: Path) -> dict[str, Any]:
    write_target(folder)
    return {"method": "draft_model", "model": str(folder)}  # all drafts will be accepted


@pytest.mark.parametrize("write", [with_draft_model, eagle3, mtp])
def test_two_ranks_draft_and_give_the_tokens_of_one(
    tmp_path: Path, write: Callable[[Path], dict[str, Any]]
) -> None:
    drafting = write(tmp_path) | {"num_speculative_tokens": 3}

    def run(size: int, speculation: str | None) -> tuple[dict[str, list[int]], SpeculationCounts]:
        config = EngineConfig(
            model=str(tmp_path),
            device="cpu",
            num_kv_blocks=60,
            num_threads=1,
            tensor_parallel_size=size,
            speculative_config=speculation,
        )
        engine = LocalEngine.load(config, print)
        try:
            tokens = outputs_of(
                engine,
                [
                    Request(
                        f"r{index}",
                        0,
                        tuple(range(3, 15 + index)),
                        SamplingParams(
                            max_tokens=30,
                            temperature=0.7 * (index % 2),
                            seed=index,
                            ignore_eos=True,
                        ),
                    )
                    for index in range(4)
                ],
            )
            return dict(tokens), engine.engine.stats.totals().speculation
        finally:
            engine.close()

    expected, _ = run(1, None)
    tokens, counts = run(2, json.dumps(drafting))
    assert tokens == expected
    assert sum(counts.accepted) > 15
