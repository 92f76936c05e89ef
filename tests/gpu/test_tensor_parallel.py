"""Engines over several GPUs: all-reduces over peer memory, the tokens of one GPU, a lost rank."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from engines.integrity import check_integrity
from node_driver import NodeProcess, Received, launch, members, session

from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.membership import Role
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.local import LocalEngine
from baton.engine.parallel import peer_reduce
from baton.engine.scheduling.outputs import StepOutput
from baton.kernels.layers.ops_triton import send_product

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]
SIZES = [size for size in (2, 4, 8) if size <= NUM_GPUS]
PROMPT_LENS = (1, 15, 16, 33, 100, 255, 300)


@pytest.mark.parametrize("size", SIZES)
def test_sums_over_peer_memory_are_right(size: int) -> None:
    command = [sys.executable, "-m", "baton.bench.allreduce", "--check", "--ranks", str(size)]
    assert subprocess.run(command, timeout=200).returncode == 0


def config_of(folder: Path, size: int, **changes: object) -> EngineConfig:
    settings: dict[str, object] = {
        "device": "cuda",
        "dtype": "float32",
        "num_kv_blocks": 400,
        "max_num_seqs": 24,
        "max_num_batched_tokens": 128,
        "tensor_parallel_size": size,
    }
    return EngineConfig(model=str(folder), **(settings | changes))  # type: ignore[arg-type]


def requests_of(vocab_size: int, **sampling: float) -> list[Request]:
    rng = random.Random(5)
    made = []
    for index, length in enumerate(PROMPT_LENS):
        params = SamplingParams(max_tokens=24, seed=index, **{"temperature": 0.0} | sampling)
        prompt = tuple(rng.randrange(3, vocab_size) for _ in range(length))
        made.append(Request(f"{index:032x}", 0, prompt, params))
    return made


def generate(engine: LocalEngine, requests: list[Request]) -> list[list[int]]:
    outputs = outputs_of(engine, requests)
    check_integrity(engine.engine)
    return [outputs[request.key] for request in requests]


WAYS: list[dict[str, float]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logprobs": 3},
]


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_one_gpu(tmp_path: Path, size: int) -> None:
    write_checkpoint(tmp_path, num_attention_heads=8, head_dim=64, has_varied_vectors=True)
    found = []
    for each in (1, size):
        engine = LocalEngine.load(config_of(tmp_path, each), print)
        found.append([generate(engine, requests_of(320, **way)) for way in WAYS])
        # Filters sum in varying order on a GPU: all ranks must have continued with the same token.
        found[-1] += [generate(engine, requests_of(320, **way)) for way in WAYS]
        engine.close()
    assert found[0] == found[1]
    assert found[1][: len(WAYS)] == found[1][len(WAYS) :]


EXPERTS = {
    "architecture": "Qwen3MoeForCausalLM",
    "num_attention_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_whole", [False, True])
def test_experts_divided_or_whole_give_the_tokens_of_one_gpu(
    tmp_path: Path, size: int, is_whole: bool
) -> None:
    write_checkpoint(tmp_path, has_varied_vectors=True, **EXPERTS)
    found, counted = [], []
    for each in (1, size):
        config = config_of(tmp_path, each, enable_expert_parallel=is_whole)
        engine = LocalEngine.load(config, print)
        found.append(generate(engine, requests_of(320)))
        assert engine.runner.model.loads is not None
        counted.append(int(engine.runner.model.loads.tokens.sum()))
        engine.close()
    assert found[0] == found[1]
    assert counted[0] > 0 and counted[0] % 8 == 0  # experts per token in two layers


WIDE = {"hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("hidden_size", [128, WIDE["hidden_size"]])
def test_bf16_goes_on_from_what_all_ranks_know(tmp_path: Path, size: int, hidden_size: int) -> None:
    """Equal steps give equal tokens, with cached prompts and after preemption: each rank's pool
    holds the right KV. Steps of other sizes round differently."""
    write_checkpoint(tmp_path, **WIDE | {"hidden_size": hidden_size})
    outputs = []
    for changes in ({}, {"num_kv_blocks": 44, "max_model_len": 512}):
        engine = LocalEngine.load(config_of(tmp_path, size, dtype="bfloat16", **changes), print)
        found = [generate(engine, requests_of(320, temperature=0.8)) for _ in range(3)]
        engine.close()
        assert found[1] == found[2]
        outputs.append(found[0])
    roomy, small = outputs
    assert sum(a == b for a, b in zip(roomy, small, strict=True)) >= len(PROMPT_LENS) - 2


@pytest.mark.parametrize("size", SIZES)
def test_products_that_send_themselves_round_as_on_one_gpu(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16, ranks deviate no more from one GPU than that does from float32, for steps of 33 to
    64 tokens of a wide model, whose GEMMs send their outputs to all ranks, and for others."""
    sent = []

    def counted(*args: Any, **ways: Any) -> bool:
        sent.append(send_product(*args, **ways))
        return sent[-1]

    monkeypatch.setattr(peer_reduce, "send_product", counted)
    write_checkpoint(tmp_path, **WIDE)
    exact, one, several = (
        prompt_logprobs(config_of(tmp_path, each, dtype=dtype))
        for each, dtype in ((1, "float32"), (1, "bfloat16"), (size, "bfloat16"))
    )
    assert any(sent)
    for length in exact:
        rounding = (one[length] - exact[length]).square().mean().sqrt()
        assert (several[length] - one[length]).square().mean().sqrt() < rounding, length


def prompt_logprobs(config: EngineConfig) -> dict[int, torch.Tensor]:
    """By length, the log-probabilities of a prompt that is computed in one step."""
    engine = LocalEngine.load(config, print)
    found = {}
    for length in (12, 33, 40, 64, 100):
        rng = random.Random(length)
        prompt = tuple(rng.randrange(3, 320) for _ in range(length))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.engine.add(Request(f"{length:032x}", 0, prompt, sampling))
        reported = [token for step in steps_of(engine) for token in step.prompt_logprobs]
        found[length] = torch.tensor([one.logprob for part in reported for one in part.logprobs])
        assert len(found[length]) == length - 1
    engine.close()
    return found


def steps_of(engine: LocalEngine) -> Iterator[StepOutput]:
    while engine.engine.has_work:
        yield engine.engine.step()


def request_of(num_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return Request(os.urandom(16).hex(), 0, (5, 6, 7), sampling)


async def lose_a_rank(node: NodeProcess, incarnation: str, number: signal.Signals) -> float:
    """Signal rank 1 during a request; returns the time until the engine's streams have ended."""
    async with session(incarnation) as stream:
        request = request_of(400)
        await stream.dispatch(request, None)
        await stream.until(lambda: request.key in stream.received)
        (engine,) = node.engine_pids()
        with open(f"/proc/{engine}/task/{engine}/children") as children:  # noqa: ASYNC230
            os.kill(int(children.read()), number)
        begin_s = time.monotonic()
        await stream.until(lambda: stream.ended is not None)
        return time.monotonic() - begin_s


async def serve_one(node: NodeProcess, incarnation: str) -> None:
    async with session(incarnation) as stream:
        request = request_of(20)
        await stream.dispatch(request, None)
        await stream.until(lambda: len(stream.received.get(request.key, Received()).tokens) == 20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_takes_the_engine_down_and_it_comes_back(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The engine ends although rank 0's thread waits for an all-reduce that never completes."""
    write_checkpoint(tmp_path, num_attention_heads=8, head_dim=64)
    with RedisServer.start() as redis:
        flags = ("--model", str(tmp_path), "--gpus", "0,1", "--tp", "2", "--num-kv-blocks", "600")
        node = launch(Role.DECODE, redis.url, *flags, "--rank-timeout-s", "3")
        try:
            assert node.address
            (member,) = await members(redis.url, lambda seen: len(seen) == 1)
            took_s = await lose_a_rank(node, member.incarnation, number)
            begin_s = time.monotonic()
            old = {member.incarnation}
            found = await members(redis.url, lambda seen: bool({m.incarnation for m in seen} - old))
            print(
                f"{number.name}: lost in {took_s:.2f} s, back in {time.monotonic() - begin_s:.1f} s"
            )
            (again,) = {m.incarnation for m in found} - old
            await serve_one(node, again)
        finally:
            assert node.end(signal.SIGTERM) == 0
