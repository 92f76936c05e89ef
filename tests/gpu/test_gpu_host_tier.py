"""Pinned host memory behind a GPU's pool: copies reach the right blocks, tokens are unchanged."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.generation import outputs_of
from engines.integrity import check_integrity

from baton.core.engine_config import EngineConfig
from baton.core.model_dir import resolve_model_dir
from baton.core.request.request import Request
from baton.core.request.sampling_params import SamplingParams
from baton.engine.execution.runner import ModelRunner
from baton.engine.kv import host_copies
from baton.engine.kv.host_copies import CopyCost, CudaCopier, Direction, make_host_copier
from baton.engine.kv.host_memory import HostMemory, cuda_pin, cuda_unpin
from baton.engine.kv.kv_memory import CudaKvMemory, KvLayout
from baton.engine.local import LocalEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda:0")
LAYOUT = KvLayout(4, 8, 16, 128, torch.bfloat16)  # 256 KiB


def end(copy: host_copies.HostCopy) -> float:
    deadline_s = time.monotonic() + 20
    while (seconds := copy.seconds()) is None:
        assert time.monotonic() < deadline_s
    return seconds


@pytest.mark.parametrize("has_batches", [True, False])
def test_copies_go_where_they_belong(has_batches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_batches:
        monkeypatch.setattr(host_copies.cuda_memory, "has_batches", lambda: False)
    kv = CudaKvMemory(LAYOUT, 4000, DEVICE)
    kv.tensor.view(torch.int16).random_(-(2**15), 2**15)
    before = kv.tensor.view(torch.int16).clone()
    num_host = 3000  # three slices, the last one not full
    config = EngineConfig(swap_space=num_host * LAYOUT.block_bytes / 2**30)
    copier = make_host_copier(config, kv, DEVICE)
    assert isinstance(copier, CudaCopier)
    copier.begin()
    copier.wait()
    assert copier.num_blocks == num_host
    rng = random.Random(0)
    out, host = rng.sample(range(4000), 1500), rng.sample(range(num_host), 1500)
    out[:700] = range(100, 800)
    host[:700] = [h for h in range(num_host) if h not in set(host[700:])][:700]
    assert end(copier.start(Direction.OUT, out, host)) > 0
    kv.tensor.zero_()
    torch.cuda.synchronize()
    into = rng.sample(range(4000), 1500)
    end(copier.start(Direction.IN, into, host))
    assert torch.equal(kv.tensor.view(torch.int16)[into], before[out])
    copier.close()
    kv.close()


def test_memory_that_cannot_be_pinned_degrades(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pin = cuda_pin(DEVICE)
    assert pin(1 << 40, 4096) is not None, "nobody's memory"
    torch.ones(3, device=DEVICE).sum().item()  # the next call does not return the error
    memory = HostMemory(4096, 1 << 20, lambda address, num_bytes: pin(1 << 40, 4096), cuda_unpin)
    memory.begin()
    memory.wait()
    assert memory.num_blocks == 0 and "cannot be pinned" in caplog.text
    memory.close()


def config_of(**changes: Any) -> EngineConfig:
    settings = {
        "model": str(resolve_model_dir("demo")),
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
    }
    return EngineConfig(**(settings | changes))


def generate(engine: LocalEngine, prompt: tuple[int, ...]) -> list[int]:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    request = Request("a" * 32, 0, prompt, sampling)
    tokens = outputs_of(engine, [request])[request.key]
    check_integrity(engine.engine)
    return tokens


def test_tokens_are_the_same_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyCost, "pays", lambda self, num_bytes, *others: num_bytes > 0)
    rng = random.Random(7)
    chats = [tuple(rng.choices(range(3, 4096), k=n)) for n in (250, 17, 100, 400, 330)]
    longer = [(*chat, 5, 6, 7, *chat[:9]) for chat in chats]
    configs = (config_of(num_kv_blocks=400, swap_space=0), config_of(num_kv_blocks=36))
    cold, tight = (LocalEngine(config, ModelRunner(config)) for config in configs)
    assert tight.runner.host_copier is not None
    tight.runner.host_copier.wait()
    for prompts in (chats, longer, chats):
        assert [generate(tight, each) for each in prompts] == [
            generate(cold, each) for each in prompts
        ]
    totals = tight.engine.stats.totals()
    assert totals.host_hit_tokens > sum(map(len, chats)), totals
    tight.close()
    cold.close()


def test_tokens_are_the_same_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tokens are the same if host memory holds only a chat or two and the rest is on disk."""
    monkeypatch.setattr(CopyCost, "pays", lambda self, num_bytes, *others: num_bytes > 0)
    rng = random.Random(11)
    chats = [tuple(rng.choices(range(3, 4096), k=n)) for n in (250, 100, 400, 330, 120, 280)]
    config = config_of(num_kv_blocks=400, swap_space=0)
    cold = LocalEngine(config, ModelRunner(config))
    expected = [generate(cold, chat) for chat in chats]
    swap_space = 40 * cold.runner.kv.block_bytes / 2**30
    cold.close()
    config = config_of(num_kv_blocks=36, swap_space=swap_space, kv_disk_path=str(tmp_path))
    tight = LocalEngine(config, ModelRunner(config))
    assert tight.runner.host_copier is not None
    tight.runner.host_copier.wait()
    for _ in range(3):
        assert [generate(tight, chat) for chat in chats] == expected
        settle(tight)
    counts = tight.engine.stats.totals().disk
    assert counts.num_hit_blocks > 20 and not counts.num_failures
    tight.close()


def settle(engine: LocalEngine) -> None:
    """Wait until all pending writes are done."""
    host, deadline_s = engine.engine._host, time.monotonic() + 20
    assert host is not None and host.disk is not None
    while host.num_writing or host.disk._writing:
        engine.engine.poll_host()
        time.sleep(0.001)
        assert time.monotonic() < deadline_s


def test_an_engine_starts_while_another_pins() -> None:
    """An engine starts while another one pins memory, as where one process creates two `LLM`s."""
    memory = torch.zeros(4 << 20, dtype=torch.uint8)
    refusals: list[str | None] = []
    is_up = threading.Event()

    def pin_again_and_again() -> None:
        pin = cuda_pin(DEVICE)
        while not is_up.is_set():
            refusals.append(pin(memory.data_ptr(), memory.nbytes))
            cuda_unpin(memory.data_ptr())
            time.sleep(0.005)  # as during a start: all calls wait while memory is pinned

    thread = threading.Thread(target=pin_again_and_again)
    thread.start()
    try:
        ModelRunner(EngineConfig(model="demo", device="cuda", num_kv_blocks=200)).close()
    finally:
        is_up.set()
        thread.join()
    assert refusals
    assert set(refusals) == {None}
