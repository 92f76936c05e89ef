"""The same requests on a deployment and on LLM: equal tokens, texts and scores."""

from __future__ import annotations

from collections.abc import Iterator

import aiohttp
import pytest
from deployments import Running
from e2e.test_http import http_address

from baton import LLM, SamplingParams
from baton.client import Client
from baton.engine.local import LocalEngine

PROMPT = "def read_file(path):\n    with open(path) as file:\n        return"
CASES = [
    {"max_tokens": 20, "temperature": 0.0},
    {"max_tokens": 20, "seed": 5, "temperature": 0.9, "top_p": 0.95, "top_k": 50},
    {"max_tokens": 16, "seed": 6, "n": 3, "logprobs": 2, "prompt_logprobs": 1},
    {"max_tokens": 40, "temperature": 0.0, "stop": ["\n", "file"], "min_tokens": 4},
    {"max_tokens": 12, "seed": 7, "repetition_penalty": 1.3, "logit_bias": {5: 4.0}},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(cpu_kv_bytes=16 << 20) as llm:
        yield llm


@pytest.mark.parametrize("case", CASES)
def test_tokens_texts_and_scores(
    demo_system: tuple[Running, LocalEngine], llm: LLM, case: dict[str, object]
) -> None:
    system, _ = demo_system
    with Client(system.address) as client:
        stream = client.generate(PROMPT, **case)  # type: ignore[arg-type]
        for _ in stream:
            pass
        served = stream.results
    (output,) = llm.generate(PROMPT, SamplingParams(**case), use_tqdm=False)  # type: ignore[arg-type]
    assert len(output.outputs) == len(served)
    for ours, theirs in zip(output.outputs, served, strict=True):
        assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
        assert ours.finish_reason == theirs.finish_reason.value
        assert ours.stop_reason == theirs.matched_stop
        if theirs.logprobs:
            scores = sum(score.logprob for score in theirs.logprobs)
            assert ours.cumulative_logprob == pytest.approx(scores, abs=1e-3)
    system.wait_idle()


async def test_a_chat(demo_system: tuple[Running, LocalEngine], llm: LLM) -> None:
    system, _ = demo_system
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    body = {"model": "demo", "messages": chat, "max_tokens": 12, "seed": 8}
    async with (
        aiohttp.ClientSession(http_address(system)) as session,
        session.post("/v1/chat/completions", json=body) as response,
    ):
        served = await response.json()
    (output,) = llm.chat(chat, SamplingParams(max_tokens=12, seed=8), use_tqdm=False)
    assert output.outputs[0].text == served["choices"][0]["message"]["content"]
    assert len(output.prompt_token_ids) == served["usage"]["prompt_tokens"]
