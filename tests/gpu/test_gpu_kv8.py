"""KV in 8 bits on a GPU: graphs, FlashInfer, preemption and hand-offs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_byte_tokenizer, write_checkpoint
from deployments import running
from engines.generation import outputs_of
from engines.steps import execute

from baton.client import Client
from baton.core.config import NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SequenceSlice, StepBatch
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = ("fp8", "int8")
VOCAB_SIZE = 320
GREEDY = SampleSpec(SamplingParams(temperature=0.0), 0)


def config_of(folder: Path, kind: str, **changes: Any) -> EngineConfig:
    fields = {"device": "cuda", "num_kv_blocks": 400, "max_num_seqs": 32, "max_model_len": 1024}
    return EngineConfig(model=str(folder), kv_cache_dtype=kind, **(fields | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    write_checkpoint(tmp_path, seed=3, head_dim=64, max_position_embeddings=1024)
    return tmp_path


def prompts() -> list[tuple[int, ...]]:
    generator = random.Random(5)
    return [tuple(generator.choices(range(3, VOCAB_SIZE), k=n)) for n in (1, 17, 100, 256, 600)]


def tokens_of(config: EngineConfig, *, together: bool) -> list[list[int]]:
    """The tokens of all prompts, in one batch or one after the other."""
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    requests = [Request(f"{n:032x}", 0, prompt, sampling) for n, prompt in enumerate(prompts())]
    engine = LocalEngine(config, ModelRunner(config))
    outputs: dict[str, list[int]] = {}
    for batch in [requests] if together else [[request] for request in requests]:
        outputs |= outputs_of(engine, batch)
    engine.close()
    return [outputs[request.key] for request in requests]


def share_agreeing(some: list[list[int]], others: list[list[int]]) -> float:
    """The share of tokens before the first that differs: the last bit of a float32 may decide how a
    value is rounded to 8 bits."""
    num_equal = 0
    for one, other in zip(some, others, strict=True):
        pairs = zip(one, other, strict=True)
        num_equal += next((n for n, (a, b) in enumerate(pairs) if a != b), len(one))
    return num_equal / sum(map(len, some))


def scores_of(config: EngineConfig) -> list[float]:
    """Log-probabilities after a prompt's first chunk, after the rest of it, and after a decode."""
    runner = ModelRunner(config)
    table = [5, 9, 7, 3, 11, 2]
    ids = [3 + n % 300 for n in range(70)]
    steps = [
        SequenceSlice(ids[:33], 0, table, GREEDY),
        SequenceSlice(ids[33:], 33, table, GREEDY),
        SequenceSlice([7], 70, table, GREEDY),
    ]
    found = []
    for piece in steps:
        (sampled,) = execute(runner, [piece])
        assert sampled is not None
        found.append(sampled.logprob)
    runner.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_scores_are_about_those_of_the_cpu(folder: Path, kind: str, backend: str) -> None:
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    on_gpu = scores_of(config_of(folder, kind, dtype="bfloat16", attention_backend=backend))
    expected = scores_of(config_of(folder, kind, device="cpu"))
    assert on_gpu == pytest.approx(expected, abs=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_beside_prompts_by_a_graph_are_as_kernel_by_kernel(folder: Path, kind: str) -> None:
    config = config_of(folder, kind, dtype="float32")
    runner = ModelRunner(config)
    tables = [[2 + 40 * n + i for i in range(40)] for n in range(9)]
    generator = random.Random(7)

    def piece(index: int, start: int, num_tokens: int) -> SequenceSlice:
        ids = generator.choices(range(3, VOCAB_SIZE), k=num_tokens)
        return SequenceSlice(ids, start, tables[index], GREEDY)

    execute(runner, [piece(n, 0, 30 + n) for n in range(9)])
    mixed = [piece(n, 30 + n, 1) for n in range(7)] + [piece(7, 37, 70), piece(8, 38, 3)]
    steps: Any = runner._steps
    assert steps._find_prefill_graph(StepBatch.of(mixed)) is not None
    by_graph = execute(runner, mixed)
    steps.prefill_graphs.clear()
    by_kernel = execute(runner, mixed)
    for one, other in zip(by_graph, by_kernel, strict=True):
        assert one is not None
        assert other is not None
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=2e-2)
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_changes_hardly_a_token(folder: Path, kind: str) -> None:
    roomy = config_of(folder, kind, dtype="float32")
    tight = config_of(folder, kind, dtype="float32", num_kv_blocks=66)
    outputs = [tokens_of(config, together=True) for config in (tight, roomy)]
    assert share_agreeing(*outputs) > 0.7


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_staged", "tcp"])
def test_a_hand_off_carries_the_scales(folder: Path, kind: str, transport: str) -> None:
    config = config_of(folder, kind, dtype="float32", enable_prefix_caching=False)
    expected = tokens_of(config, together=False)
    params = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with (
        running(
            config,
            up=UpConfig(mode="disaggregated", prefill_gpus="0", decode_gpus="1"),
            node=NodeConfig(kv_transport=transport),
        ) as system,
        Client(system.address) as client,
    ):
        results = [client.generate(prompt_token_ids=p, **params).result for p in prompts()]
    for result, tokens in zip(results, expected, strict=True):
        assert list(result.token_ids) == tokens
        assert result.transport == transport
