"""Sampling parameters on a GPU: results equal those of the CPU engine, tested elsewhere."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from engines.integrity import check_integrity
from engines.steps import execute

from baton.core.engine_config import EngineConfig
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.runner import ModelRunner
from baton.engine.local import LocalEngine
from baton.engine.scheduling.outputs import TokenOutput
from baton.kernels.sampling.sample_spec import SampleSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 24
PLAIN = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
WARM = replace(PLAIN, temperature=0.8, seed=7)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    },
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5},
    "bias": {"logit_bias": ((7, 4.0), (9, -100.0), (300, 2.0))},
    "min_tokens": {"min_tokens": 10, "ignore_eos": False, "stop_token_ids": (5, 6, 7, 8)},
    "logprobs": {"logprobs": 5},
    "prompt logprobs": {"prompt_logprobs": 3, "logprobs": 0},
}
EVERYTHING = {name: value for one in SAMPLINGS.values() for name, value in one.items()}


TESTS = Path(__file__).parents[1]


def config_of(folder: Path, device: str) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        num_kv_blocks=300,
        max_num_seqs=24,
        max_num_batched_tokens=96,
    )


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """(GPU, CPU) engines for one checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, seed=6)
    runners = [ModelRunner(config_of(folder, device)) for device in ("cuda", "cpu")]
    on_gpu, on_cpu = (
        LocalEngine(config_of(folder, device), runner)
        for device, runner in zip(("cuda", "cpu"), runners, strict=True)
    )
    yield on_gpu, on_cpu
    for runner in runners:
        runner.close()


def requests_of(*samplings: SamplingParams, num_samples: int = 1) -> list[Request]:
    rng = random.Random(2)
    requests = []
    for index, sampling in enumerate(samplings):
        prompt = tuple(rng.choices(range(3, 320), k=(1, 16, 33, 70, 130)[index % 5]))
        name, *forks = (f"{index:016x}{n:016x}" for n in range(num_samples))
        requests.append(Request(name, 0, prompt, sampling, fork_ids=tuple(forks)))
    return requests


def run(local: LocalEngine, requests: list[Request]) -> dict[str, list[TokenOutput]]:
    """Outputs by request key, token by token; log-probabilities of a prompt have the key with a
    prime."""
    outputs: dict[str, list[Any]] = {}
    for request in requests:
        local.engine.add(request)
    while local.engine.has_work:
        step = local.engine.step()
        assert not step.failed
        for token in step.tokens:
            outputs.setdefault(token.key, []).append(token)
        for reported in step.prompt_logprobs:
            outputs.setdefault(f"{reported.key}'", []).extend(reported.logprobs)
    check_integrity(local.engine)
    return outputs


def check_same(engines: tuple[LocalEngine, LocalEngine], requests: list[Request]) -> None:
    """Assert the same tokens and, up to rounding, the same log-probabilities."""
    on_gpu, on_cpu = (run(engine, requests) for engine in engines)
    assert on_gpu.keys() == on_cpu.keys()
    for key, expected in on_cpu.items():
        actual = on_gpu[key]
        assert [one.logprob for one in actual] == pytest.approx(
            [one.logprob for one in expected], abs=1e-3
        )
        assert [len(one.top) for one in actual] == [len(one.top) for one in expected]
        for one, other in zip(actual, expected, strict=True):
            assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-3)
        if not key.endswith("'"):
            assert [one.token_id for one in actual] == [one.token_id for one in expected]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_one_wish(engines: tuple[LocalEngine, LocalEngine], name: str) -> None:
    sampling = replace(WARM, **SAMPLINGS[name])
    check_same(engines, requests_of(*[replace(sampling, seed=n) for n in range(5)]))


def test_all_wishes_of_one_request_and_others_in_one_batch(
    engines: tuple[LocalEngine, LocalEngine],
) -> None:
    everything = replace(WARM, **(EVERYTHING | {"temperature": 0.9}))
    mixture = [replace(WARM, **wish) for wish in SAMPLINGS.values()]
    check_same(engines, requests_of(everything, *mixture, PLAIN, everything))


def test_forks(engines: tuple[LocalEngine, LocalEngine]) -> None:
    """Each further sample shares the prompt's full blocks, and copies a partial one."""
    wishes = [WARM, replace(WARM, logprobs=2), replace(WARM, top_k=9, presence_penalty=0.5)]
    check_same(engines, requests_of(*wishes, num_samples=4))


def test_the_same_seed_gives_the_same_tokens(engines: tuple[LocalEngine, LocalEngine]) -> None:
    requests = requests_of(*[replace(WARM, **wish) for wish in SAMPLINGS.values()])
    # In the second run prompts come from the prefix cache, in other chunks, with other rounding.
    once, again = (
        {key: [one.token_id for one in tokens] for key, tokens in outputs.items() if key[-1] != "'"}
        for outputs in (run(engines[0], requests), run(engines[0], requests))
    )
    assert once == again


def test_blocks_are_copied_behind_all_that_was_launched(
    engines: tuple[LocalEngine, LocalEngine],
) -> None:
    runner = engines[0].runner
    runner.kv.tensor.normal_()
    before = runner.kv.tensor.clone()
    runner.copy_blocks([(5, 9), (9, 5), (7, 8)])
    expected = before.clone()
    expected[[9, 5, 8]] = before[[5, 9, 7]]
    assert torch.equal(runner.kv.tensor, expected)
    runner.copy_blocks([])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_row_of_nan_fails_alone(tmp_path: Path, head_dim: int) -> None:
    """Next to a sequence with NaN, in a step of decodes or of prompts, others get the results of a
    run alone."""
    write_checkpoint(tmp_path, seed=6, head_dim=head_dim)
    config = replace(config_of(tmp_path, "cuda"), dtype="bfloat16")
    runner = ModelRunner(config)
    runner.model.embed.weight[9] = float("nan")
    spec = SampleSpec(SamplingParams(temperature=0.0), key=0)
    good, bad = list(range(20, 160)), [*range(20, 90), 9]

    def results(*slices: SequenceSlice) -> list[float]:
        sampled = execute(runner, slices)
        return [one.logprob for one in sampled if one is not None]

    tables = [list(range(2, 14)), list(range(14, 26))]
    first = SequenceSlice(good, 0, tables[0], spec)
    (alone,) = results(first)
    prompts = results(first, SequenceSlice(bad, 0, tables[1], spec))
    assert prompts[0] == pytest.approx(alone, abs=0.05) and prompts[1] != prompts[1]
    decodes = [SequenceSlice([7], 140, tables[0], spec), SequenceSlice([8], 71, tables[1], spec)]
    (alone,) = results(decodes[0])
    together = results(*decodes)
    assert together[0] == pytest.approx(alone, abs=0.05) and together[1] != together[1]
    runner.close()


_FAULT = """
import sys
sys.path.insert(0, sys.argv[2])
from engines.steps import execute
from baton.core.engine_config import EngineConfig
from baton.core.errors import EngineFailed
from baton.core.request.sampling_params import SamplingParams
from baton.kernels.sampling.sample_spec import SampleSpec
from baton.engine.execution.batch import SequenceSlice
from baton.engine.execution.runner import ModelRunner

runner = ModelRunner(EngineConfig(model=sys.argv[1], device="cuda", num_kv_blocks=40))
spec = SampleSpec(SamplingParams(temperature=0.0), key=0)
try:
    execute(runner, [SequenceSlice([10**6] * 3, 0, [2], spec)])
except EngineFailed as error:
    print("typed:", str(error).splitlines()[0])
"""


def test_a_fault_on_the_device_is_a_typed_error(tmp_path: Path) -> None:
    """A token id beyond the vocabulary is a typed error; it stops the device, hence a separate
    process."""
    write_checkpoint(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _FAULT, str(tmp_path), str(TESTS)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "typed: the step failed" in done.stdout, done.stderr[-2000:]
