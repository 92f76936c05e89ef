"""Hand-offs on four GPUs between sides without a common GPU, as `nccl` requires: with unequal ranks
and stages, and with whole experts on each rank.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import write_checkpoint
from engines.generation import outputs_of
from fakes.ranks.linked_nodes import Nodes, connected, request_of, wait_for_no_process
from node_driver import NodeProcess, launch

from baton.cluster.redis_server import RedisServer
from baton.core.engine_config import EngineConfig
from baton.core.membership import Role
from baton.engine.local import LocalEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices"),
    pytest.mark.timeout(300),
]
COMMON = ("--dtype", "float32", "--num-kv-blocks", "400", "--max-num-seqs", "24")
EXPERTS = {
    "architecture": "Qwen3MoeForCausalLM",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
ONE = (1, 1)
Shape = tuple[int, int]  # stages, ranks of each stage


@dataclass(frozen=True)
class Case:
    """Both sides; the decode side's GPUs follow those of the prefill side."""

    prefill: Shape
    decode: Shape
    transport: str = "nccl"
    has_experts: bool = False

    def __str__(self) -> str:
        kind = " experts" if self.has_experts else ""
        return f"{self.prefill} to {self.decode} over {self.transport}{kind}"


CASES = [
    Case(ONE, (1, 2)),
    Case((1, 2), ONE),
    Case((2, 1), (1, 2)),
    Case(ONE, (3, 1)),
    Case((1, 2), (1, 2), has_experts=True),
    Case((1, 2), (1, 2), transport="cuda_ipc", has_experts=True),
]


def side(case: Case, role: Role) -> tuple[str, ...]:
    stages, size = case.prefill if role is Role.PREFILL else case.decode
    first = 0 if role is Role.PREFILL else case.prefill[0] * case.prefill[1]
    gpus = ",".join(str(first + rank) for rank in range(stages * size))
    flags = ("--gpus", gpus, "--pp", str(stages), "--tp", str(size))
    return (*flags, "--enable-expert-parallel") if case.has_experts else flags


@contextmanager
def nodes_of(case: Case, model_dir: Path) -> Iterator[Nodes]:
    flags = ("--model", str(model_dir), *COMMON, "--kv-transport", case.transport)
    started: list[NodeProcess] = []
    with RedisServer.start() as redis:
        try:
            for role in (Role.PREFILL, Role.DECODE):
                started.append(launch(role, redis.url, *flags, *side(case, role)))
            for node in started:
                assert node.address
            yield Nodes(*started, redis.url)
            assert [node.end(signal.SIGTERM) for node in started] == [0, 0]
            wait_for_no_process()
        finally:
            for node in started:
                if node.process.poll() is None:
                    node.end(signal.SIGKILL)


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_tokens_are_those_of_one_gpu(case: Case, tmp_path: Path) -> None:
    more = EXPERTS if case.has_experts else {"num_hidden_layers": 5}
    write_checkpoint(tmp_path, has_varied_vectors=True, **more)
    config = EngineConfig(
        model=str(tmp_path), device="cuda", dtype="float32", num_kv_blocks=400, max_num_seqs=24
    )
    requests = [
        request_of(1),
        request_of(33, max_tokens=20),
        request_of(300, max_tokens=20),
        request_of(50, max_tokens=20, temperature=0.8, top_k=20, seed=6),
    ]
    engine = LocalEngine.load(config, print)
    expected = [outputs_of(engine, [request])[request.key] for request in requests]
    block_bytes = engine.runner.kv.block_bytes
    engine.close()
    with nodes_of(case, tmp_path) as nodes:
        async with connected(nodes) as pair:
            for request in requests:
                await pair.hand_off(request)
            assert [await pair.finish(request) for request in requests] == expected
            outputs = pair.decode.received[requests[2].key].outputs
            (transfer,) = [one.transfer for one in outputs if one.HasField("transfer")]
            assert transfer.transport == case.transport
            assert transfer.bytes == 19 * block_bytes  # ceil(300 / 16) of all layers and heads
