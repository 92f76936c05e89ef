"""A disk below host memory below the KV pool: tokens equal those of a pool without evictions."""

from __future__ import annotations

import random
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import running
from engines.generation import outputs_of
from engines.integrity import check_integrity

from baton.client import Client
from baton.core.config import UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv.host_copies import CopyCost
from baton.engine.local import LocalEngine

GENERATOR = random.Random(11)
CHATS = [tuple(GENERATOR.choices(range(3, 4096), k=n)) for n in (250, 100, 400, 330, 120, 280)]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(autouse=True)
def copying_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying always pays: in a model this small, computing the blocks takes no longer."""
    monkeypatch.setattr(CopyCost, "pays", lambda self, num_bytes, *others: num_bytes > 0)


def config_of(num_kv_blocks: int, kind: str = "auto", **tiers: object) -> EngineConfig:
    return EngineConfig(
        device="cpu",
        kv_cache_dtype=kind,
        block_size=16,
        max_model_len=512,
        num_kv_blocks=num_kv_blocks,
        max_num_batched_tokens=64,
        **tiers,  # type: ignore[arg-type]
    )


def engine_of(config: EngineConfig) -> LocalEngine:
    return LocalEngine(config, ModelRunner(config))


def generate(engine: LocalEngine, prompt: tuple[int, ...]) -> list[int]:
    request = Request("0" * 32, 0, prompt, SAMPLING)
    tokens = outputs_of(engine, [request])[request.key]
    check_integrity(engine.engine)
    return tokens


def settle(engine: LocalEngine) -> None:
    """Wait until all pending writes are done."""
    host = engine.engine._host
    assert host is not None and host.disk is not None
    while host.num_writing or host.disk._writing:
        engine.engine.poll_host()
        threading.Event().wait(0.001)


@pytest.fixture(scope="module")
def cold() -> Iterator[LocalEngine]:
    """An engine whose pool is large enough to evict nothing."""
    engine = engine_of(config_of(400))
    yield engine
    assert not engine.engine.stats.totals().num_preemptions
    engine.close()


def test_tokens_are_the_same_from_disk(cold: LocalEngine, tmp_path: Path) -> None:
    check_disk(cold, "auto", tmp_path)


@pytest.mark.slow
def test_tokens_in_int8_are_the_same_from_disk(tmp_path: Path) -> None:
    cold = engine_of(config_of(400, "int8"))
    check_disk(cold, "int8", tmp_path)
    cold.close()


def check_disk(cold: LocalEngine, kind: str, tmp_path: Path) -> None:
    block_bytes = cold.runner.kv.block_bytes
    tiers = {"swap_space": 40 * block_bytes / 2**30, "kv_disk_path": str(tmp_path)}
    tight = engine_of(config_of(36, kind, **tiers, kv_disk_space=0.1))
    expected = [generate(cold, chat) for chat in CHATS]
    for _ in range(2):
        for chat, tokens in zip(CHATS, expected, strict=True):
            assert generate(tight, chat) == tokens
            settle(tight)
    counts = tight.engine.stats.totals().disk
    assert counts.num_hit_blocks > 20 and counts.bytes_in == counts.num_hit_blocks * block_bytes
    assert not counts.num_failures
    assert not [*tmp_path.iterdir()]
    tight.close()


@pytest.mark.parametrize(
    ("swap_space", "name", "why"),
    [(0.01, "absent", "absent: No such file"), (None, "", "needs host memory for KV blocks")],
)
def test_an_engine_does_not_start_without_directory_or_host_memory(
    swap_space: float | None, name: str, why: str, tmp_path: Path
) -> None:
    config = config_of(36, swap_space=swap_space, kv_disk_path=str(tmp_path / name))
    runner = ModelRunner(config)
    with pytest.raises(StartupFailed, match=why):
        LocalEngine(config, runner)
    runner.close()


def test_a_deployments_prompt_is_found_on_disk(cold: LocalEngine, tmp_path: Path) -> None:
    """A prompt is read from the prefill node's disk; gateways do not know which engine has it
    there."""
    block_bytes = cold.runner.kv.block_bytes
    expected = [generate(cold, chat) for chat in CHATS]
    tiers = {"swap_space": 40 * block_bytes / 2**30, "kv_disk_path": str(tmp_path)}
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    with (
        running(
            config_of(36, **tiers, kv_disk_space=0.1), up=UpConfig(num_decode_nodes=1)
        ) as system,
        Client(system.address) as client,
    ):
        (ready,) = (line for line in system.lines if line.startswith("gateway | ready:"))
        url = f"{ready.split()[-2]}/metrics"
        for _ in range(20):
            results = [client.generate(prompt_token_ids=chat, **params).result for chat in CHATS]
            assert [list(one.token_ids) for one in results] == expected
            with urllib.request.urlopen(url, timeout=5) as answer:
                if re.search(r"disk_hits_total{[^}]*} [1-9]", answer.read().decode()):
                    break
        else:
            raise AssertionError("nothing was read from disk")
    assert not [*tmp_path.iterdir()]
