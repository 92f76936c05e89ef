"""The schemes run the same requests to the same ends, and differ only as intended."""

from __future__ import annotations

import statistics

import pytest

from baton.bench.baselines.play import Outcome, Player
from baton.bench.baselines.schemes import ADMISSIONS, SCHEMES, Scheme
from baton.bench.baselines.workload import Job, WorkShape, make_jobs, poisson
from baton.bench.serve.clients.workloads import sharegpt_lengths
from baton.core.engine_config import EngineConfig
from baton.engine.execution.runner import ModelRunner

SHAPE = WorkShape(
    num_requests=8,
    prompt_scale=60,
    output_scale=60,
    max_len=96,
    max_tokens=32,
    system_tokens=16,
    vocab_size=4000,
)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    return make_jobs(SHAPE)


@pytest.fixture(scope="module")
def outcomes(jobs: list[Job]) -> dict[str, Outcome]:
    runner = ModelRunner(EngineConfig(block_size=8, max_model_len=128, cpu_kv_bytes=8 << 20))
    player = Player(runner, 26, 8, SHAPE.max_len, 32)
    arrivals_s = poisson(len(jobs), 200.0, seed=0)
    schemes = [*SCHEMES, *ADMISSIONS]
    found = {one.name: player.play(one, jobs, arrivals_s) for one in schemes}
    runner.close()
    return found


def test_the_lengths_are_sharegpts() -> None:
    pairs = sharegpt_lengths(1 << 20)
    assert len(pairs) == 1000
    prompts, outputs = zip(*pairs, strict=True)
    # The means of all 30,731 lines are 2340 and 439.
    assert statistics.mean(prompts) == pytest.approx(2340, rel=0.05)
    assert statistics.mean(outputs) == pytest.approx(439, rel=0.05)


def test_jobs_fit(jobs: list[Job]) -> None:
    assert all(job.num_prompt + 32 <= 96 and 2 <= job.num_outputs <= 32 for job in jobs)
    beginnings = {tuple(job.request.prompt_token_ids[:16]) for job in jobs}
    assert len(beginnings) <= 4
    assert jobs == make_jobs(SHAPE)


@pytest.mark.parametrize("scheme", [*SCHEMES, *ADMISSIONS], ids=lambda scheme: scheme.name)
def test_every_scheme_ends_every_request(
    outcomes: dict[str, Outcome], jobs: list[Job], scheme: Scheme
) -> None:
    outcome = outcomes[scheme.name]
    assert [len(one.token_s) for one in outcome.times] == [job.num_outputs for job in jobs]
    assert all(one.ttft_s is not None and one.ttft_s > 0 for one in outcome.times)
    assert 0 < outcome.waste < 1
    reserved = [scheme.reserved_tokens(job, SHAPE.max_len) for job in jobs]
    if scheme.reserves == "longest":
        assert set(reserved) == {96} and max(outcome.num_running) == 24 * 8 // 96
    if scheme.reserves is None:
        assert not any(reserved)


def test_what_is_taken_as_needed_is_hardly_wasted(outcomes: dict[str, Outcome]) -> None:
    wastes = [outcomes[scheme.name].waste for scheme in SCHEMES[:4]]
    assert wastes[1] > wastes[2] > wastes[3]
    assert outcomes["worst case"].num_preemptions == 0
