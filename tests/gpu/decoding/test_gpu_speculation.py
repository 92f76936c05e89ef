"""Speculation on a GPU: tokens equal those without it, or differ first at a near-tie."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.generation import outputs_of
from engines.integrity import check_integrity
from fakes.speculation.head_engines import HeadEngine, Recorder, eagle3, mtp, requests
from tokenizers import Tokenizer

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.gpu.gpu_step import GpuStep
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine
from baton.engine.scheduling.outputs import TokenOutput
from baton.engine.speculation.proposer import Context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEAR_TIE = 1e-3  # of log-probabilities: sums in another order differ by about 1e-4 in float32
CODE = "def area(self):\n    return self.width * self.height\n\ndef side(self):\n    return self."
METHODS = {
    "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "draft_model": {"model": "demo-draft"},
}


def speculation(method: str) -> str:
    return json.dumps({"method": method, "num_speculative_tokens": 4} | METHODS[method])


def outputs(config: EngineConfig, num_requests: int) -> tuple[list[list[TokenOutput]], int]:
    """The outputs of each request, and the number of accepted drafts."""
    local = LocalEngine.load(config, lambda line: None)
    tokenizer = Tokenizer.from_file(str(local.model_dir / "tokenizer.json"))
    found: dict[str, list[TokenOutput]] = {}
    for index in range(num_requests):
        sampling = SamplingParams(
            max_tokens=100,
            temperature=(0.0, 0.3, 0.8)[index % 3],
            top_p=(1.0, 0.9)[index % 2],
            seed=index,
            frequency_penalty=(0.0, 0.0, 0.0, 0.4)[index % 4],
            logprobs=4,
            ignore_eos=True,
        )
        prompt = tuple(tokenizer.encode(f"# {index}\n{CODE}").ids)
        request = Request(f"{index:032x}", 0, prompt, sampling)
        found[request.key] = []
        local.engine.add(request)
    while local.engine.has_work:
        step = local.engine.step()
        assert not step.failed
        for token in step.tokens:
            found[token.key].append(token)
    check_integrity(local.engine)
    accepted = sum(local.engine.stats.totals().speculation.accepted)
    local.close()
    return list(found.values()), accepted


def check_equal(drafted: list[list[TokenOutput]], plain: list[list[TokenOutput]]) -> None:
    num_different = 0
    for one, other in zip(drafted, plain, strict=True):
        pairs = zip(one, other, strict=True)
        first = next(((a, b) for a, b in pairs if a.token_id != b.token_id), None)
        if first is None:
            continue
        # Filters and noise hide which two tokens nearly tied; the distributions must be equal.
        num_different += 1
        tops = [dict(each.top) for each in first]
        shared = tops[0].keys() & tops[1].keys()
        assert len(shared) >= 3
        assert all(abs(tops[0][token] - tops[1][token]) < NEAR_TIE for token in shared)
    assert num_different <= 1 + len(plain) // 20


@pytest.mark.parametrize("num_requests", [1, 20, 90])
@pytest.mark.parametrize("attention", ["triton", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_without_speculation(
    num_requests: int, attention: str, method: str
) -> None:
    config = EngineConfig(
        device="cuda",
        dtype="float32",
        num_kv_blocks=1600,
        max_num_seqs=100,
        attention_backend=attention,
    )
    plain, _ = outputs(config, num_requests)
    drafting = EngineConfig(
        device="cuda",
        dtype="float32",
        num_kv_blocks=1600,
        max_num_seqs=100,
        attention_backend=attention,
        speculative_config=speculation(method),
    )
    drafted, num_accepted = outputs(drafting, num_requests)
    assert num_accepted > 5 * num_requests
    check_equal(drafted, plain)


@pytest.mark.parametrize("num_requests", [1, 40])
def test_a_draft_model_drafts_what_it_says_alone(num_requests: int) -> None:
    """A draft model's KV is that of the accepted tokens, whether from prompts, hand-offs or drafts:
    it drafts as if it ran alone."""
    made = {"device": "cuda", "dtype": "float32", "num_kv_blocks": 1600, "max_num_seqs": 100}
    config = EngineConfig(**made, speculative_config=speculation("draft_model"))
    local = LocalEngine.load(config, lambda line: None)
    proposer = local.engine._speculator._proposer  # type: ignore[union-attr]
    drawn, found = proposer.propose, []

    def propose(contexts: Sequence[Context]) -> list[Sequence[int]]:
        proposed = drawn(contexts)
        for context, drafts in zip(contexts, proposed, strict=True):
            found.append((tuple(context.token_ids), list(drafts)))
        return proposed

    proposer.propose = propose  # type: ignore[method-assign]
    tokenizer = Tokenizer.from_file(str(local.model_dir / "tokenizer.json"))
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for index in range(num_requests):
        prompt = tuple(tokenizer.encode(f"# {index}\n{CODE}").ids)
        local.engine.add(Request(f"{index:032x}", 0, prompt, sampling))
    while local.engine.has_work:
        assert not local.engine.step().failed
    check_integrity(local.engine)
    local.close()
    alone = LocalEngine.load(EngineConfig(**made, model="demo-draft"), lambda line: None)
    requested = found[:: max(1, len(found) // 100)]
    requests = [
        Request(
            f"{index:032x}",
            0,
            tokens,
            SamplingParams(max_tokens=len(drafts), temperature=0.0, ignore_eos=True),
        )
        for index, (tokens, drafts) in enumerate(requested)
    ]
    outputs = outputs_of(alone, requests)
    pairs = zip(requests, requested, strict=True)
    same = sum(outputs[request.key] == drafts for request, (_, drafts) in pairs)
    alone.close()
    assert same >= 0.97 * len(requested), "but for near-ties"


HEAD_BLOCKS, MOST = 1200, 4


@pytest.mark.parametrize("num_requests", [1, 20, 90])
@pytest.mark.parametrize("attention", ["triton", "auto"])
@pytest.mark.parametrize("write", [eagle3, mtp])
def test_a_head_drafts_what_it_does_on_a_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path], dict[str, Any]],
    attention: str,
    num_requests: int,
) -> None:
    """A head drafts the same as on a CPU, with ample memory, then with preemptions; the tokens
    equal those without a head."""
    monkeypatch.setattr(GpuStep, "device_s", None)  # without measured times all drafts pay
    drafting = json.dumps(write(tmp_path) | {"num_speculative_tokens": MOST})

    def runner(device: str, speculative_config: str | None = drafting) -> ModelRunner:
        return ModelRunner(
            EngineConfig(
                model=str(tmp_path),
                device=device,
                dtype="float32",
                num_kv_blocks=HEAD_BLOCKS,
                max_num_seqs=100,
                attention_backend=attention if device == "cuda" else "auto",
                speculative_config=speculative_config,
            )
        )

    requested = requests(num_requests, 60)
    on_cpu, without, on_gpu = runner("cpu"), runner("cuda", None), runner("cuda")
    wanted, found = Recorder(on_cpu, MOST), Recorder(on_gpu, MOST)
    limits = {"max_num_seqs": 100, "max_num_batched_tokens": 600}
    reference = HeadEngine(on_cpu, wanted, HEAD_BLOCKS, **limits)
    reference.run(requested)
    plain = HeadEngine(without, None, HEAD_BLOCKS, **limits).run(requested)
    # A request has at most 100 tokens, hence 7 blocks.
    for num_blocks in (HEAD_BLOCKS, 2 + max(8, 3 * num_requests)):
        drafts = HeadEngine(on_gpu, found, num_blocks, **limits)
        drafted = drafts.run(requested)
        check_equal([drafted[one.key] for one in requested], [plain[one.key] for one in requested])
        is_scarce = num_blocks < HEAD_BLOCKS and num_requests > 1
        assert bool(drafts.engine.stats.totals().num_preemptions) == is_scarce
        assert found.share_of(wanted) >= 0.97, "but for near-ties"
        if not is_scarce:
            assert drafts.acceptance == pytest.approx(reference.acceptance, rel=0.05)
    for each in (on_cpu, without, on_gpu):
        each.close()
