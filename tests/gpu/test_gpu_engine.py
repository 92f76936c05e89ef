"""The engine on a GPU: tokens equal those of transformers, runs are reproducible, failures are
handled.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from engines.integrity import check_integrity
from engines.steps import execute
from transformers import AutoModelForCausalLM

from baton.core.engine_config import EngineConfig
from baton.core.errors import EngineFailed, StartupFailed
from baton.core.model_dir import resolve_model_dir
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SequenceSlice, StepBatch
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.cuda_memory import CudaAllocation
from baton.engine.kv.generations import GenerationsReader, SharedGenerations
from baton.engine.local import LocalEngine
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEAR_TIE = 1e-3  # of the top two logits: float32 logits differ by about 1e-4 between devices
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "demo": {},
    "gqa 4:2": {},
    "gqa 4:1, tied, dim 80": {
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "head_dim": 80,
    },
    "biases, sharded": {"attention_bias": True, "mlp_bias": True, "max_shard_size": "200KB"},
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return resolve_model_dir("demo")
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, seed=3, **CHECKPOINTS[request.param])
    return folder


def config_of(folder: Path, **changes: Any) -> EngineConfig:
    settings = {"device": "cuda", "dtype": "float32", "num_kv_blocks": 400, "max_num_seqs": 24}
    return EngineConfig(model=str(folder), **(settings | changes))


@pytest.fixture
def engine(folder: Path) -> Iterator[LocalEngine]:
    config = config_of(folder, max_num_batched_tokens=128)
    runner = ModelRunner(config)
    yield LocalEngine(config, runner)
    runner.close()


def test_a_step_takes_what_it_was_on_the_device() -> None:
    """`device_s` excludes the work queued before the step; for two joined steps it counts from the
    first one's start."""
    runner = ModelRunner(config_of(resolve_model_dir("demo")))
    spec = SampleSpec(SamplingParams(temperature=0.0), key=1)
    for num_tokens in (1, 9, 700):  # a graph, a prefill's graph, no graph
        batch = [SequenceSlice([5] * num_tokens, 0, list(range(2, 50)), spec)]
        runner.launch(batch).collect()  # compile first
        torch.cuda._sleep(400_000_000)  # cycles: 0.2 s
        first = runner.launch(batch)
        torch.cuda._sleep(400_000_000)
        second = runner.launch(batch)
        both = second.behind(first)  # type: ignore[attr-defined]
        second.collect()
        for step in (first, second):
            assert step.device_s is not None and 0 < step.device_s < 0.1
        assert 0.1 < both.device_s < 1


def test_others_see_when_a_step_has_written_its_kv() -> None:
    runner = ModelRunner(config_of(resolve_model_dir("demo")))
    page = SharedGenerations(runner.kv.num_blocks, "ab" * 16)
    runner.count_steps(page)
    reader = GenerationsReader(page.fd, runner.kv.num_blocks, "ab" * 16)
    spec = SampleSpec(SamplingParams(temperature=0.0), key=1)
    for num_tokens in (1, 9, 700):  # a graph, a prefill's graph, no graph
        batch = [SequenceSlice([5] * num_tokens, 0, list(range(2, 50)), spec)]
        runner.launch(batch).collect()  # compile first
        before = reader.num_steps()
        torch.cuda._sleep(400_000_000)  # cycles: the step waits for 0.2 s
        step = runner.launch(batch)
        assert step.number == before + 1
        assert reader.num_steps() == before, "counted before it ran"
        step.collect()
        assert reader.num_steps() == step.number
    reader.close()
    runner.close()
    page.close()


@pytest.mark.parametrize("num_decodes", [17, 22])
@pytest.mark.parametrize("prompts", [(70,), (3, 200), (512,), (900,)], ids=str)
def test_decodes_beside_prompts_by_a_graph_are_as_kernel_by_kernel(
    num_decodes: int, prompts: tuple[int, ...]
) -> None:
    runner = ModelRunner(
        config_of(resolve_model_dir("demo"), num_kv_blocks=3000, mixed_graph_tokens=1024)
    )
    steps: Any = runner._steps
    rng, spec = random.Random(1), SampleSpec(SamplingParams(temperature=0.0), key=1)

    def piece(index: int, start: int, num_tokens: int) -> SequenceSlice:
        tokens = [rng.randrange(3, 500) for _ in range(num_tokens)]
        return SequenceSlice(tokens, start, range(2 + 90 * index, 92 + 90 * index), spec)

    contexts = [rng.randrange(1, 400) for _ in range(num_decodes + len(prompts))]
    for index, context in enumerate(contexts):
        runner.launch([piece(index, 0, context)]).collect()
    lens = [*[1] * num_decodes, *prompts]
    batch = [piece(index, contexts[index], n) for index, n in enumerate(lens)]
    assert steps._find_prefill_graph(StepBatch.of(batch)) is not None
    with_graph = runner.launch(batch).collect()
    steps.prefill_graphs.clear()
    without = runner.launch(batch).collect()
    for one, other in zip(with_graph, without, strict=True):
        assert one is not None and other is not None
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    runner.close()


def test_no_step_pins_memory() -> None:
    """A step pins no memory: pinning would wait for all of the device's queued work."""
    config = config_of(resolve_model_dir("demo"), num_kv_blocks=3000, max_num_seqs=200)
    runner = ModelRunner(config)
    spec = SampleSpec(SamplingParams(temperature=0.0), key=1)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    for num_decodes in (1, 33, 65, 129, 199):
        for num_tokens in (0, 40, 700):
            batch = [SequenceSlice([5], 15 * 16, range(2, 18), spec) for _ in range(num_decodes)]
            if num_tokens:
                batch.append(SequenceSlice([5] * num_tokens, 0, range(2, 50), spec))
            steps = [runner.launch(batch) for _ in range(2)]
            for step in steps:
                step.collect()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    runner.close()


def requests_of(folder: Path, vocab_size: int, **sampling: Any) -> list[Request]:
    rng = random.Random(str(folder.name[:4]))
    params = SamplingParams(**({"max_tokens": 24, "temperature": 0.0} | sampling))
    prompts = [
        tuple(rng.randrange(3, vocab_size) for _ in range(length))
        for length in (1, 15, 16, 17, 33, 100, 255, 300)
    ]
    return [
        Request(f"{i:032x}", 0, prompt, dataclasses.replace(params, seed=i))
        for i, prompt in enumerate(prompts)
    ]


def generate(engine: LocalEngine, requests: list[Request]) -> list[list[int]]:
    outputs = outputs_of(engine, requests)
    check_integrity(engine.engine)
    assert engine.engine.pool.counts.held == 0
    return [outputs[request.key] for request in requests]


def test_greedy_tokens_are_those_of_transformers(engine: LocalEngine, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    requests = requests_of(folder, model.config.vocab_size)
    for request, tokens in zip(requests, generate(engine, requests), strict=True):
        prompt = request.prompt_token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        for index, (token, row) in enumerate(zip(tokens, logits, strict=True)):
            gap = float(row.max() - row[token])
            assert gap < NEAR_TIE, f"prompt of {len(prompt)}, token {index}: {gap:.1e} below"
            if gap > 0:
                print(f"near-tie: prompt of {len(prompt)}, token {index}: {gap:.1e}")


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}], ids=str
)
def test_the_same_seed_gives_the_same_tokens(
    engine: LocalEngine, folder: Path, sampling: dict[str, Any]
) -> None:
    requests = requests_of(folder, engine.runner.model_config.vocab_size, **sampling)
    first = generate(engine, requests)
    assert generate(engine, requests) == first
    if sampling:
        reseeded = [
            dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, seed=99 + i))
            for i, r in enumerate(requests)
        ]
        assert generate(engine, reseeded) != first


def test_preemption_and_running_ahead_change_no_token(folder: Path) -> None:
    roomy, tight = config_of(folder), config_of(folder, num_kv_blocks=36, max_model_len=512)
    outputs = []
    for config in (roomy, tight):
        runner = ModelRunner(config)
        engine = LocalEngine(config, runner)
        requests = requests_of(folder, runner.model_config.vocab_size, max_tokens=60)[:6]
        outputs.append(generate(engine, requests))
        runner.close()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("backend", ["auto", "flashinfer", "triton"])
def test_bf16_backends_agree_up_to_rounding(tmp_path: Path, backend: str) -> None:
    if backend == "flashinfer":
        pytest.importorskip("flashinfer")
    write_checkpoint(tmp_path, seed=4, head_dim=128)
    results = []
    for changes in ({"dtype": "float32"}, {"dtype": "bfloat16", "attention_backend": backend}):
        runner = ModelRunner(config_of(tmp_path, **changes))
        spec = SampleSpec(SamplingParams(temperature=0.0), 0)
        table = [5, 9, 7, 3]
        (sampled,) = execute(runner, [SequenceSlice(list(range(3, 53)), 0, table, spec)])
        (decoded,) = execute(runner, [SequenceSlice([7], 50, table, spec)])
        assert sampled is not None and decoded is not None
        results.append((sampled.logprob, decoded.logprob))
        runner.close()
    assert results[0] == pytest.approx(results[1], abs=0.3)


def test_what_does_not_fit_is_told_at_start(folder: Path) -> None:
    with pytest.raises(StartupFailed, match="GPU memory") as caught:
        ModelRunner(config_of(folder, num_kv_blocks=10**9))
    assert "--gpu-memory-utilization" in caught.value.hint


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_process_may_have_an_engine_on_each_gpu() -> None:
    folder = resolve_model_dir("demo")
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    found = []
    for device in ("cuda:0", "cuda:1"):
        config = config_of(folder, device=device)
        runner = ModelRunner(config)
        found.append(
            outputs_of(LocalEngine(config, runner), [Request("ab" * 16, 0, (5, 6), sampling)])
        )
        runner.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(("held_share", "share"), [(0.45, 0.45), (0.7, 0.9)])
def test_the_share_of_memory_is_the_engines_own(held_share: float, share: float) -> None:
    """The engine's share is kept, as far as there is room, while another engine holds memory."""
    _, total_bytes = torch.cuda.mem_get_info()
    held = CudaAllocation(int(held_share * total_bytes), torch.device("cuda"))
    try:
        config = config_of(
            resolve_model_dir("demo"), num_kv_blocks=None, gpu_memory_utilization=share
        )
        runner = ModelRunner(config)
        pool_bytes = runner.kv.num_blocks * runner.kv.block_bytes
        runner.close()
    finally:
        held.free()
    most = min(share, 1 - held_share) * total_bytes
    assert most - 5e9 < pool_bytes < most


def test_out_of_memory_in_a_step_is_a_typed_error(folder: Path) -> None:
    runner = ModelRunner(config_of(folder))
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + (1 << 20)) / total_bytes
    )
    try:
        table = list(range(2, 34))
        with pytest.raises(EngineFailed, match="out of memory"):
            for _ in range(64):  # results stay allocated: the last step runs out
                runner.launch([SequenceSlice([5] * 400, 0, table, None)] * 24)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    runner.close()
    assert free_bytes > 0
