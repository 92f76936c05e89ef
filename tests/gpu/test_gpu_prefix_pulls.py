"""A chat's next turn over two GPUs: the last output's KV is fetched from its decode engine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from deployments import running
from gpu.test_gpu_handoff import LLAMA

from baton.client import Client
from baton.core.config import NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
NUM_ANSWER_TOKENS = 2000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_an_answer_comes_back(transport: str, tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(LLAMA.model_dir(tmp_path)), device="cuda", max_num_seqs=8, **LLAMA.engine
    )
    up = UpConfig(mode="disaggregated", prefill_gpus="0", decode_gpus="1")
    node = NodeConfig(kv_transport=transport)
    cached = []
    with running(config, up=up, node=node) as system, Client(system.address) as client:
        greedy = {"temperature": 0.0, "ignore_eos": True}
        for seed in range(4):
            prompt = [3 + (seed * 977 + 31 * i) % 100_000 for i in range(64)]
            first = client.generate(
                prompt_token_ids=prompt, max_tokens=NUM_ANSWER_TOKENS, **greedy
            ).result
            time.sleep(0.3)  # until the gateway's index has the cached blocks
            turn = [*prompt, *first.token_ids, *range(1000, 1100)]
            second = client.generate(prompt_token_ids=turn, max_tokens=16, **greedy).result
            cached.append(second.cached_tokens)
            print(f"cached {second.cached_tokens}, TTFT {(second.times.ttft_s or 0) * 1e3:.1f} ms")
    print("\n".join(line for line in system.lines if "GB/s" in line))
    # The first pull may fail while the source's pool is being opened.
    assert all(each >= NUM_ANSWER_TOKENS for each in cached[1:]), cached
