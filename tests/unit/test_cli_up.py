"""What `baton up` minds before it starts anything."""

from __future__ import annotations

import pytest

from baton.cli.up import about_shared_gpus
from baton.core.config import EngineConfig, UpConfig


@pytest.mark.parametrize(
    ("prefill", "decode"), [(None, None), ("0", None), (None, "0"), ("0,1", "2,3"), ("1", "11")]
)
def test_roles_with_gpus_of_their_own_are_no_worry(prefill: str | None, decode: str | None) -> None:
    up = UpConfig(prefill_gpus=prefill, decode_gpus=decode)
    assert about_shared_gpus(up, EngineConfig()) == ""


def test_a_gpu_that_both_roles_have_is_named_with_what_to_do() -> None:
    up = UpConfig(prefill_gpus="0, 1", decode_gpus="1,2")
    said = about_shared_gpus(up, EngineConfig())
    assert "share GPU 1," in said
    assert "--gpu-memory-utilization 0.45" in said


def test_a_gpu_that_holds_both_is_named_alone() -> None:
    up = UpConfig(prefill_gpus="0", decode_gpus="0")
    said = about_shared_gpus(up, EngineConfig(gpu_memory_utilization=0.4))
    assert said == "prefill and decode share GPU 0"
