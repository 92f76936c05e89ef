"""Host memory for blocks: pinned in the background, fewer blocks if pinning is refused; copies."""

from __future__ import annotations

import logging
import mmap
import threading

import numpy as np
import pytest
import torch

from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.engine.kv import host_memory
from baton.engine.kv.cuda_memory import find_runs
from baton.engine.kv.host_copies import CpuCopier, Direction, make_host_copier
from baton.engine.kv.host_memory import HostMemory, free_host_bytes
from baton.engine.kv.kv_memory import CpuKvMemory, KvLayout

BLOCK = 2 * mmap.PAGESIZE
PLENTY = 1 << 50


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_SLICE_BYTES", 4 * BLOCK)
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: PLENTY)


class Pins:
    """Records what is pinned; a pin can be delayed or refused."""

    def __init__(self, num_fine: int = 1000) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._num_fine = num_fine

    def pin(self, address: int, num_bytes: int) -> str | None:
        assert self.may_go_on.wait(5)
        if len(self.pinned) == self._num_fine:
            return "out of memory (CUDA error 2)"
        self.pinned.append((address, num_bytes))
        return None

    def unpin(self, address: int) -> None:
        self.pinned = [each for each in self.pinned if each[0] != address]


def test_nobody_waits_for_pinning() -> None:
    pins = Pins()
    pins.may_go_on.clear()
    memory = HostMemory(BLOCK, 10 * BLOCK, pins.pin, pins.unpin)
    memory.begin()
    assert memory.num_blocks == 0 and memory.num_wanted == 10
    pins.may_go_on.set()
    memory.wait()
    assert memory.num_blocks == 10
    first = memory.address
    assert pins.pinned == [
        (first, 4 * BLOCK),
        (first + 4 * BLOCK, 4 * BLOCK),
        (first + 8 * BLOCK, 2 * BLOCK),
    ]
    memory.close()
    assert not pins.pinned


def test_an_end_during_pinning_waits_for_no_more_than_a_slice() -> None:
    pins = Pins()
    pins.may_go_on.clear()
    memory = HostMemory(BLOCK, 10 * BLOCK, pins.pin, pins.unpin)
    memory.begin()
    threading.Timer(0.05, pins.may_go_on.set).start()
    memory.close()
    assert memory.num_blocks <= 4 and not pins.pinned


@pytest.mark.parametrize(
    ("num_fine", "available", "num_blocks", "why"),
    [
        (1, PLENTY, 4, "out of memory"),
        (0, PLENTY, 0, "out of memory"),
        (9, 0, 0, "no more memory to spare"),
    ],
)
def test_what_is_refused_degrades_with_one_message(
    num_fine: int,
    available: int,
    num_blocks: int,
    why: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pins = Pins(num_fine)
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: available)
    memory = HostMemory(BLOCK, 10 * BLOCK, pins.pin, pins.unpin)
    memory.begin()
    memory.wait()
    assert memory.num_blocks == num_blocks
    [record] = caplog.records
    assert record.levelno == logging.WARNING and why in record.getMessage()
    memory.close()


def test_address_space_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(BLOCK, 1 << 62)
    memory.begin()
    assert memory.num_blocks == 0 and len(caplog.records) == 1
    memory.close()


def test_without_pinning_what_is_promised_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpinned pages are allocated when first written, so free memory as reported by the system
    still includes blocks that were promised: they are subtracted."""
    spare = host_memory._SPARE_BYTES
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: spare + 9 * BLOCK)
    memory = HostMemory(BLOCK, 100 * BLOCK)
    memory.begin()
    assert memory.num_blocks == 8
    memory.close()


def test_slices_of_odd_blocks_begin_at_pages() -> None:
    memory = HostMemory(mmap.PAGESIZE // 4 * 3, 100 * BLOCK)
    assert memory.blocks_per_slice * memory.block_bytes % mmap.PAGESIZE == 0
    memory.close()


def test_the_hosts_free_memory_is_known() -> None:
    assert 0 < free_host_bytes() < PLENTY


LAYOUT = KvLayout(2, 2, 4, 8, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_copies_go_where_they_belong(dtype: torch.dtype) -> None:
    layout = KvLayout(2, 2, 4, 8, dtype)
    kv = CpuKvMemory(layout, 12)
    kv.tensor.view(12, -1).view(torch.uint8).random_(0, 255)
    before = kv.tensor.clone()
    copier = make_host_copier(
        EngineConfig(swap_space=8 * layout.block_bytes / 2**30), kv, torch.device("cpu")
    )
    assert isinstance(copier, CpuCopier) and copier.num_blocks == 0
    copier.begin()
    assert copier.num_blocks == copier.most_blocks == 8
    copier.start(Direction.OUT, [2, 3, 7, 9], [4, 5, 6, 0])
    kv.tensor[2:] = 0
    assert copier.start(Direction.IN, [11, 2, 3, 5], [0, 4, 5, 6]).seconds() >= 0
    for target, source in {11: 9, 2: 2, 3: 3, 5: 7}.items():
        assert torch.equal(kv.tensor[target].view(torch.uint8), before[source].view(torch.uint8))
    copier.close()
    kv.close()


@pytest.mark.parametrize("blocks_per_slice", [0, 3])
def test_runs_lie_side_by_side_on_both_sides(blocks_per_slice: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 30))
        pairs = [
            (np.arange(40) if rng.random() < 0.7 else rng.permutation(40))[:n] for _ in range(2)
        ]
        blocks, hosts, lengths = find_runs(np.array(pairs), blocks_per_slice)
        found = []
        for block, host, length in zip(blocks, hosts, lengths, strict=True):
            found += [(block + i, host + i) for i in range(length)]
            if blocks_per_slice:
                assert host // blocks_per_slice == (host + length - 1) // blocks_per_slice
        assert found == [*zip(*pairs, strict=True)]


@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ({}, 4),
        ({"swap_space": 0}, 0),
        ({"swap_space": 1.5}, 1.5),
        ({"enable_prefix_caching": False}, 0),
    ],
)
def test_default_size(changes: dict[str, object], gib: float) -> None:
    config = EngineConfig(**changes)
    assert config.swap_bytes("cuda") == gib * 2**30
    assert config.swap_bytes("cpu") == (gib * 2**30 if "swap_space" in changes else 0)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(StartupFailed, match="swap-space"):
        EngineConfig(swap_space=-1)
