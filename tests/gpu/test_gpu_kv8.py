"""KV in 8 bits on a GPU: graphs, FlashInfer, preemption, hand-offs; how fast decodes read it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_byte_tokenizer, write_checkpoint
from deployments import running

from baton.client import Client
from baton.core.config import EngineConfig, NodeConfig, UpConfig
from baton.core.request.request import Request, SamplingParams
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine
from baton.kernels.attention.attention import AttentionMetadata
from baton.kernels.kv.kv_blocks import rope_angles
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


def tokens_of(config: EngineConfig) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    requests = [Request(f"{n:032x}", 0, prompt, sampling) for n, prompt in enumerate(prompts())]
    engine = LocalEngine(config, ModelRunner(config))
    outputs = engine.generate(requests)
    engine.close()
    return [outputs[request.key] for request in requests]


def scores_of(config: EngineConfig) -> list[float]:
    """Log-probabilities of a prompt, of its end behind a cached beginning, and of a decode."""
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
        (sampled,) = runner.execute([piece])
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
    assert on_gpu == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_decodes_beside_prompts_by_a_graph_are_as_kernel_by_kernel(folder: Path, kind: str) -> None:
    config = config_of(folder, kind, dtype="float32")
    runner = ModelRunner(config)
    tables = [[2 + 40 * n + i for i in range(40)] for n in range(9)]
    generator = random.Random(7)

    def piece(index: int, start: int, num_tokens: int) -> SequenceSlice:
        ids = generator.choices(range(3, VOCAB_SIZE), k=num_tokens)
        return SequenceSlice(ids, start, tables[index], GREEDY)

    runner.execute([piece(n, 0, 30 + n) for n in range(9)])
    mixed = [piece(n, 30 + n, 1) for n in range(7)] + [piece(7, 37, 70), piece(8, 38, 3)]
    steps: Any = runner._steps
    assert steps._find_prefill_graph(mixed) is not None
    by_graph = runner.execute(mixed)
    steps.prefill_graphs.clear()
    by_kernel = runner.execute(mixed)
    for one, other in zip(by_graph, by_kernel, strict=True):
        assert one is not None
        assert other is not None
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=2e-3)
    runner.close()


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_changes_no_token(folder: Path, kind: str) -> None:
    roomy = config_of(folder, kind, dtype="float32")
    tight = config_of(folder, kind, dtype="float32", num_kv_blocks=66)
    assert tokens_of(tight) == tokens_of(roomy)


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["cuda_ipc", "cuda_staged", "tcp"])
def test_a_hand_off_carries_the_scales(folder: Path, kind: str, transport: str) -> None:
    config = config_of(folder, kind, dtype="float32", enable_prefix_caching=False)
    expected = tokens_of(config)
    params = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with (
        running(
            config,
            up=UpConfig(prefill_gpus="0", decode_gpus="1"),
            node=NodeConfig(kv_transport=transport),
        ) as system,
        Client(system.address) as client,
    ):
        results = [client.generate(prompt_token_ids=p, **params).result for p in prompts()]
    for result, tokens in zip(results, expected, strict=True):
        assert list(result.token_ids) == tokens
        assert result.transport == transport


@pytest.mark.parametrize("kind", ["bf16", *KINDS])
@pytest.mark.parametrize(("batch", "context"), [(64, 4096), (256, 1024), (1, 1024), (16, 32_768)])
def test_how_fast_decodes_read(kind: str, batch: int, context: int) -> None:
    """Prints; of the 8B shape 8 bits shall be read at near the rate of bfloat16."""
    from baton.kernels.attention.attention_gpu import make_gpu_attention  # needs Triton

    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
    kv_dtype, layers, device = dtypes[kind], 4, torch.device("cuda")
    blocks_each = context // 16
    row = 128 if kind == "bf16" else 132
    shape = (batch * blocks_each + 1, layers, 2, 8, 16, row)
    pool = torch.zeros(shape, dtype=kv_dtype, device=device)
    pool.view(torch.uint8).random_(0, 56)  # no NaN, and scales that are small
    attention = make_gpu_attention(pool, 32, batch, context, torch.bfloat16, prefill="triton")
    ids = (torch.randperm(batch * blocks_each) + 1).view(batch, -1).tolist()
    slots = torch.tensor([table[-1] * 16 + 15 for table in ids], device=device)
    attention.plan(AttentionMetadata([1] * batch, [context] * batch, ids, slots, is_graph=True))
    qkv = torch.randn(batch, 48, 128, dtype=torch.bfloat16, device=device)
    rope = rope_angles(torch.full((batch,), context - 1, device=device), torch.rand(64).cuda())
    q, out = qkv[:, :32], torch.empty(batch, 32, 128, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for layer in range(layers):
            attention._decode.run(q, pool[:, layer], out, None)

    attention.run(0, qkv, rope)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(10):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / layers)
    best_ms = min(times)
    num_bytes = batch * context * 8 * 2 * row * kv_dtype.itemsize
    rate = num_bytes / best_ms / 1e9
    print(f"\n{kind} {batch} x {context}: {best_ms * 1e3:.1f} us a layer, {rate:.2f} TB/s")
