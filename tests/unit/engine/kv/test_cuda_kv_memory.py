"""The number of blocks of a pool on a simulated GPU."""

from __future__ import annotations

import pytest
import torch

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.engine.kv.kv_memory import KvLayout, choose_num_gpu_blocks

GIB = 1 << 30
LAYOUT = KvLayout(32, 8, 16, 128, torch.bfloat16)  # 2 MiB a block


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU of 80 GiB, of which the engine's largest step has reserved 20 GiB."""
    memory = {"total": 80 * GIB, "others": 0, "reserved": 20 * GIB}

    def info(device: torch.device) -> tuple[int, int]:
        return memory["total"] - memory["others"] - memory["reserved"], memory["total"]

    for name, value in (
        ("mem_get_info", info),
        ("memory_reserved", lambda device: memory["reserved"]),
        ("synchronize", lambda device: None),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return memory


def choose(utilization: float, num_kv_blocks: int | None = None, max_len: int = 8192) -> int:
    config = EngineConfig(gpu_memory_utilization=utilization, num_kv_blocks=num_kv_blocks)
    device = torch.device("cuda", 0)
    num_blocks = choose_num_gpu_blocks(config, LAYOUT, 256, max_len, device, lambda: None)
    return num_blocks * LAYOUT.block_bytes


def test_a_pool_fills_the_share_that_the_engine_was_given(gpu: dict[str, int]) -> None:
    assert choose(0.9) == (72 - 20 - 1) * GIB
    assert choose(0.5) == (40 - 20 - 1) * GIB


def test_the_share_is_the_engines_own(gpu: dict[str, int]) -> None:
    """Memory of another engine counts in that engine's share only."""
    gpu["others"] = 36 * GIB
    assert choose(0.45) == (36 - 20 - 1) * GIB


def test_a_pool_is_no_larger_than_what_others_leave(gpu: dict[str, int]) -> None:
    gpu["others"] = 40 * GIB
    assert choose(0.9) == 20 * GIB - GIB // 2 - 256 * 4 * (1 << 20)


@pytest.mark.parametrize(
    ("others", "utilization", "way_out"),
    [(0, 0.25, "--gpu-memory-utilization"), (59 * GIB, 0.9, "nvidia-smi")],
)
def test_too_small_a_pool_says_where_more_memory_is(
    gpu: dict[str, int], others: int, utilization: float, way_out: str
) -> None:
    gpu["others"] = others
    with pytest.raises(StartupFailed) as caught:
        choose(utilization)
    assert way_out in caught.value.hint


def test_the_operator_may_say_how_many_blocks(gpu: dict[str, int]) -> None:
    gpu["others"] = 79 * GIB
    assert choose(0.9, num_kv_blocks=600) == 600 * LAYOUT.block_bytes
