"""The prompt throughput of an engine from its measured step costs, compared with the steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.core.step_cost import StepCost
from baton.core.step_shape import StepShape
from baton.engine.scheduling.step_promise import promised_tokens
from baton.gateway.engines.reported_load import is_sane, prompt_speed

GPU = StepCost(0.0045, (*(0.0,) * 6, 7e-6, *(21e-6,) * 3), 9e-10, 3.1e-8, max_rows=8192)


def test_the_speed_of_prompts() -> None:
    beside = StepShape(num_decodes=64, keys=64 * 2048)
    alone = prompt_speed(GPU, 2048, StepShape(), None)
    assert alone.token_s == pytest.approx(21e-6, rel=0.1)
    promised = prompt_speed(GPU, 2048, beside, 0.015)
    tokens = promised_tokens(GPU, 0.015, beside, 0, 2048)
    assert 200 < tokens < 600
    assert promised.token_s == pytest.approx(0.015 / tokens, rel=0.05), "slower beside decodes"
    assert prompt_speed(GPU, 2048, StepShape(), 0.015) == alone, "nobody to keep a promise to"
    seconds = alone.prompt_seconds(8192, 0)
    assert seconds == pytest.approx(
        sum(GPU.seconds(StepShape().with_prompt(2048, c)) for c in range(0, 8192, 2048)), rel=0.1
    )


@pytest.mark.parametrize("promise_s", [0.015, 0.024, 0.05, 1.0])
@pytest.mark.parametrize("num_decodes", [8, 64, 128, 256])
@pytest.mark.parametrize("mixed_s", [0.0, 0.001])
def test_a_long_prompt_beside_decodes_takes_as_long_as_its_chunks(
    promise_s: float, num_decodes: int, mixed_s: float
) -> None:
    """Chunks shrink as their context grows, and each step includes the decodes' time."""
    cost = replace(GPU, mixed_s=mixed_s)
    beside = StepShape(num_decodes=num_decodes, keys=num_decodes * 1500)
    speed = prompt_speed(cost, 2048, beside, promise_s)
    for num_tokens in (32_000, 120_000):
        whole_s, context = 0.0, 0
        while context < num_tokens:
            most = min(2048, num_tokens - context)
            chunk = promised_tokens(cost, promise_s, beside, context, most)
            whole_s += cost.seconds(beside.with_prompt(chunk, context))
            context += chunk
        assert speed.prompt_seconds(num_tokens, 0) == pytest.approx(whole_s, rel=0.25)


@pytest.mark.parametrize("chunk", [256, 512, 2048])
def test_what_waits_takes_as_long_as_its_chunks(chunk: int) -> None:
    """Each chunk includes the fixed time of a step."""
    speed = prompt_speed(GPU, chunk, StepShape(), None)
    whole_s = 16 * GPU.seconds(StepShape(num_prompt_tokens=chunk))
    assert speed.prompt_seconds(0, 0, 16 * chunk) == pytest.approx(whole_s, rel=0.06)


@pytest.mark.parametrize("part", [-1.0, math.nan, math.inf, 1e300])
def test_what_cannot_be_is_not_believed(part: float) -> None:
    assert is_sane(GPU)
    assert not is_sane(replace(GPU, base_s=part))
    assert not is_sane(replace(GPU, row_s=(part, *GPU.row_s[1:])))
    assert not is_sane(replace(GPU, row_s=GPU.row_s[1:]))
    assert not is_sane(replace(GPU, mixed_s=part))
    assert not is_sane(replace(GPU, mixed_pair_s=part))
    assert not is_sane(replace(GPU, base_s=0.0, row_s=(0.0,) * 10, pair_s=0.0, key_s=0.0))
