"""LLM on a GPU, whose engine runs ahead: tokens, stop strings, and no leaks afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engines.integrity import check_integrity

from baton import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ["def fib(n):", "import os\n", "class Reader:\n    def __init__(self"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cuda", dtype="float32", num_kv_blocks=400, max_num_seqs=24) as llm:
        yield llm


def test_a_batch_has_the_tokens_of_each_alone(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=40, seed=seed, top_k=20) for seed in range(3)]
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    for output, prompt, one in zip(together, PROMPTS, params, strict=True):
        (alone,) = llm.generate(prompt, one, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_stop_string_ends_a_request_whose_next_step_is_under_way(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=60, temperature=0.0)
    (whole,) = llm.generate(PROMPTS[0], greedy, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[20:24]
    cut = SamplingParams(max_tokens=60, temperature=0.0, stop=stop, n=3)
    (output,) = llm.generate(PROMPTS[0], cut, use_tqdm=False)
    assert {sample.text for sample in output.outputs} == {text[: text.index(stop)]}
    engine = llm._calls._local.engine
    while engine.has_work:
        engine.step()
    check_integrity(engine)
    assert engine.stats.load().num_running == 0
