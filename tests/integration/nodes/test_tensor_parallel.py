"""An engine of several processes gives the tokens of one, and ends with any of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from engines.integrity import check_integrity
from fakes.adapters import merge, write_adapter
from int4_checkpoints import write_int4_checkpoint

from baton.core.engine_config import EngineConfig
from baton.core.errors import AdapterRefused, EngineFailed, StartupFailed
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.parallel import rank_processes
from baton.engine.parallel.rank_channel import RankChannel
from baton.engine.parallel.rank_group import RankGroup
from baton.engine.scheduling.outputs import StepOutput


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Eight heads for up to eight ranks; chunks shorter than the prompts."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, num_attention_heads=8, head_dim=16, num_hidden_layers=1)
    return EngineConfig(
        model=str(folder), device="cpu", num_kv_blocks=60, max_num_batched_tokens=48
    )


def load(config: EngineConfig, size: int, **changes: float | str) -> LocalEngine:
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    fields |= {"tensor_parallel_size": size, **changes}
    return LocalEngine.load(EngineConfig(**fields), print)


def requests() -> list[Request]:
    """Greedy, drawn, filtered, penalised, scored; three samples of one prompt; a shared prefix."""
    prefix = tuple(range(3, 53))
    ways = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=50, min_p=0.01),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2, logit_bias=((7, 2.0),)),
    ]
    made = []
    for index, way in enumerate(ways):
        fields = {name: getattr(way, name) for name in way.__dataclass_fields__}
        sampling = SamplingParams(**(fields | {"max_tokens": 10, "seed": index}))
        made.append(Request(f"{index:032x}", 0, (*prefix, 60 + index, 9), sampling))
    forks = ("a" * 32, "b" * 32)
    drawn = SamplingParams(max_tokens=10, temperature=1.0, seed=5)
    return [*made, Request("c" * 32, 0, (*prefix[:30], 4), drawn, fork_ids=forks)]


def run(engine: LocalEngine) -> tuple[dict[str, list[int]], list[StepOutput]]:
    """All tokens by request, for two runs, the second with cached prompts; and all step outputs."""
    tokens: dict[str, list[int]] = {}
    steps = []
    for attempt in (0, 1):
        for request in requests():
            fields = {name: getattr(request, name) for name in request.__dataclass_fields__}
            engine.engine.add(Request(**(fields | {"attempt": attempt})))
        while engine.engine.has_work:
            output = engine.engine.step()
            steps.append(output)
            for token in output.tokens:
                tokens.setdefault(token.key, []).append(token.token_id)
    check_integrity(engine.engine)
    return tokens, steps


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> Iterator[tuple[dict[str, list[int]], list[StepOutput]]]:
    engine = load(config, 1)
    yield run(engine)
    engine.close()


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8)), 2])
def test_tokens_are_those_of_one_process(
    config: EngineConfig, expected: tuple[dict[str, list[int]], list[StepOutput]], size: int
) -> None:
    engine = load(config, size)
    assert engine.ranks is not None
    processes = engine.ranks.processes
    try:
        assert len(processes) == size - 1
        tokens, steps = run(engine)
    finally:
        engine.close()
    assert tokens == expected[0]
    assert [process.poll() for process in processes] == [0] * (size - 1)
    for ours, theirs in zip(steps, expected[1], strict=True):
        for one, other in zip(ours.tokens, theirs.tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [i for i, _ in one.top] == [i for i, _ in other.top]
        for mine, known in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            assert [each.logprob for each in mine.logprobs] == pytest.approx(
                [each.logprob for each in known.logprobs], abs=1e-4
            )


@pytest.mark.slow
def test_each_rank_has_the_scales_of_its_heads(config: EngineConfig) -> None:
    tokens = []
    for size in (1, 2):
        engine = load(config, size, kv_cache_dtype="fp8")
        try:
            tokens.append(run(engine)[0])
        finally:
            engine.close()
    assert tokens[0] == tokens[1]


def test_ranks_share_weights_in_int4(tmp_path: Path) -> None:
    """Ranks divide int4 weights by words of eight outputs, or by groups of inputs."""
    sizes = {"num_attention_heads": 8, "head_dim": 16, "intermediate_size": 192}
    write_int4_checkpoint(tmp_path, "awq, groups of 32", num_hidden_layers=1, **sizes)
    config = EngineConfig(model=str(tmp_path), device="cpu", num_kv_blocks=60)
    tokens = []
    for size in (1, 2):
        engine = load(config, size)
        try:
            tokens.append(run(engine)[0])
        finally:
            engine.close()
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP]
)
def test_a_rank_that_is_gone_or_hangs_ends_the_engine(
    config: EngineConfig, number: signal.Signals
) -> None:
    engine = load(config, 2, rank_timeout_s=1.0)
    assert engine.ranks is not None
    (process,) = engine.ranks.processes
    endless = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    engine.engine.add(Request("d" * 32, 0, (3, 4, 5), endless))
    for _ in range(5):
        engine.engine.step()
    begin_s = time.monotonic()
    os.kill(process.pid, number)
    reason = "rank 1 ended" if number == signal.SIGKILL else "rank 1 has not answered"
    with pytest.raises(EngineFailed, match=reason):
        while True:
            engine.engine.step()
    assert time.monotonic() - begin_s < 4.0
    engine.close()
    assert process.poll() is not None


@pytest.mark.parametrize("moment", ["loading", pytest.param("connecting", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_while_it_starts_ends_the_engine(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A rank stopped when it starts, or once it is loaded, is reported by name, and no process is
    left."""
    started: list[subprocess.Popen[bytes]] = []
    start, meet = rank_processes._start, RankGroup.meet

    def start_one(module: str) -> tuple[subprocess.Popen[bytes], RankChannel]:
        process, channel = start(module)
        started.append(process)
        if moment == "loading":
            process.send_signal(signal.SIGSTOP)
        return process, channel

    def meet_stopped(followers: RankGroup, word: bytes) -> list[bytes]:
        assert followers._loaded.wait(30)
        started[0].send_signal(signal.SIGSTOP)
        return meet(followers, word)

    monkeypatch.setattr(rank_processes, "_start", start_one)
    if moment == "connecting":
        monkeypatch.setattr(RankGroup, "meet", meet_stopped)
    # Long enough for the other ranks to load, on two shared cores.
    timeout_s = 1.0 if moment == "loading" else 10.0
    begin_s = time.monotonic()
    with pytest.raises(StartupFailed, match="rank 1 has made no progress in its start for"):
        load(config, 2, rank_start_timeout_s=timeout_s, rank_timeout_s=2.0)
    assert timeout_s < time.monotonic() - begin_s < timeout_s + 20
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_what_a_rank_cannot_start_with_is_told_in_its_words(config: EngineConfig) -> None:
    with pytest.raises(StartupFailed, match="--tensor-parallel-size 3 does not divide"):
        load(config, 3)


def test_ranks_have_their_parts_of_lora_adapters(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_checkpoint(base, num_attention_heads=4, head_dim=16, num_hidden_layers=1)
    adapter = write_adapter(tmp_path / "one", base, seed=1)
    merged = merge(tmp_path / "merged", base, adapter)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    plain = Request("a" * 32, 0, tuple(range(3, 23)), sampling)

    def tokens(engine: LocalEngine, *requests: Request) -> list[list[int]]:
        outputs = outputs_of(engine, requests)
        engine.close()
        return [outputs[request.key] for request in requests]

    fields: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 60}
    expected = [
        tokens(LocalEngine.load(EngineConfig(model=str(path), **fields), print), plain)[0]
        for path in (base, merged)
    ]
    assert expected[0] != expected[1]
    shared = EngineConfig(
        model=str(base), enable_lora=True, max_lora_rank=8, tensor_parallel_size=2, **fields
    )
    engine = LocalEngine.load(shared, print)
    with pytest.raises(AdapterRefused, match="no folder"):
        engine.load_adapter("bad", str(tmp_path / "nowhere"))
    one = engine.load_adapter("one", str(adapter))
    assert tokens(engine, plain, replace(plain, request_id="b" * 32, adapter=one)) == expected
