"""The sealed pages: what the owner may do, what a peer may not, and the canary in them."""

from __future__ import annotations

import gc
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.core.engine_config import EngineConfig
from baton.core.errors import HandoffFailed, StartupFailed
from baton.engine.kv import memfd
from baton.engine.kv.generations import (
    Generations,
    GenerationsReader,
    SharedGenerations,
    page_bytes,
)
from baton.engine.kv.kv_memory import CpuKvMemory, KvLayout, canary_bytes, choose_num_cpu_blocks

INCARNATION, OTHER = "ab" * 16, "cd" * 16
LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.float32)


def map_writable(fd: int) -> object:
    return mmap.mmap(fd, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.parametrize(
    "attack",
    [
        lambda fd: os.ftruncate(fd, 1),
        lambda fd: os.ftruncate(fd, 1 << 20),
        lambda fd: os.pwrite(fd, b"x", 0),
        map_writable,
    ],
    ids=["shrink", "grow", "write", "map writable"],
)
def test_a_peer_can_neither_resize_nor_write(attack: Callable[[int], object]) -> None:
    fd, memory = memfd.create("baton-test", 8192)
    with pytest.raises(OSError):
        attack(fd)
    memory[:2] = b"ok"
    assert memfd.map_read_only(fd, 8192)[:2] == b"ok"
    os.close(fd)


def test_an_unsealed_or_wrongly_sized_page_is_refused() -> None:
    unsealed = os.memfd_create("baton-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(HandoffFailed, match="not sealed"):
        memfd.map_read_only(unsealed, 4096)
    os.close(unsealed)
    fd, _ = memfd.create("baton-test", 4096)
    with pytest.raises(HandoffFailed, match="4096 bytes, not 8192"):
        memfd.map_read_only(fd, 8192)
    os.close(fd)
    with pytest.raises(HandoffFailed, match="cannot map"):
        memfd.map_read_only(fd, 4096)


def test_memory_that_the_system_has_not_got_is_a_startup_error() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupFailed, match="cannot share"):
        memfd.create("baton-test", 1 << 62)
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("make", [Generations, lambda n: SharedGenerations(n, INCARNATION)])
def test_bump_changes_the_named_blocks_only(make: Callable[[int], Generations]) -> None:
    generations = make(5)
    generations.bump([1, 4])
    first = generations.read(4)
    generations.bump([4])
    found = [generations.read(i) for i in range(5)]
    assert [bool(each) for each in found] == [False, True, False, False, True]
    assert found[4] != first


def test_generations_that_other_processes_read_cannot_be_guessed() -> None:
    generations = SharedGenerations(200, INCARNATION)
    generations.bump(range(200))
    drawn = [generations.read(i) for i in range(200)]
    assert len(set(drawn)) == 200
    assert sum(each.bit_count() for each in drawn) / 200 == pytest.approx(32, abs=3)
    generations.close()


def test_a_reader_sees_each_bump_and_outlives_the_writer() -> None:
    writer = SharedGenerations(3, INCARNATION)
    reader = GenerationsReader(writer.fd, 3, INCARNATION)
    ids, never = np.array([2]), np.array([0], np.uint64)
    assert reader.match(ids, never)
    writer.bump([2])
    drawn = np.array([writer.read(2)], np.uint64)
    assert reader.match(ids, drawn) and not reader.match(ids, never)
    writer.close()
    assert reader.match(ids, drawn)
    reader.close()


def test_a_reader_refuses_another_process_s_page() -> None:
    writer = SharedGenerations(3, INCARNATION)
    with pytest.raises(HandoffFailed, match="another version or process"):
        GenerationsReader(writer.fd, 3, OTHER)
    with pytest.raises(HandoffFailed, match="bytes, not"):
        GenerationsReader(writer.fd, 4, INCARNATION)
    fd, _ = memfd.create("baton-test", page_bytes(3))
    with pytest.raises(HandoffFailed, match="another version or process"):
        GenerationsReader(fd, 3, INCARNATION)
    os.close(fd)
    writer.close()


def test_the_pool_is_zeroed_block_major_and_readable_by_a_peer() -> None:
    pool = CpuKvMemory(LAYOUT, 10)
    assert pool.block_bytes == 3 * 2 * 2 * 4 * 8 * 4
    assert pool.tensor.shape == (10, 3, 2, 2, 4, 8)
    assert not pool.tensor.any()
    pool.tensor[7] = 1.5
    window = memfd.map_read_only(pool.fd, 10 * pool.block_bytes)
    block = window[7 * pool.block_bytes : 8 * pool.block_bytes]
    assert torch.frombuffer(bytearray(block), dtype=torch.float32).eq(1.5).all()
    assert not any(window[6 * pool.block_bytes : 7 * pool.block_bytes])
    pool.view[: pool.block_bytes] = block
    assert pool.tensor[0].eq(1.5).all()
    pool.close()


def mapped_pools() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:baton-kv")


def test_closing_gives_the_memory_back_once_the_last_tensor_is_gone() -> None:
    gc.collect()  # tensors of other tests
    before = mapped_pools()
    pool = CpuKvMemory(LAYOUT, 10)
    tensor = pool.tensor
    pool.close()
    assert mapped_pools() == before + 1
    tensor[3] = 2.0  # would crash if the pool were unmapped
    del tensor, pool
    gc.collect()
    assert mapped_pools() == before


def config(**changes: object) -> EngineConfig:
    return EngineConfig(block_size=4, **changes)  # type: ignore[arg-type]


def test_the_pool_is_sized_by_blocks_or_by_memory() -> None:
    assert choose_num_cpu_blocks(config(num_kv_blocks=27), LAYOUT, max_model_len=100) == 27
    by_memory = config(cpu_kv_bytes=40 * LAYOUT.block_bytes + 1)
    assert choose_num_cpu_blocks(by_memory, LAYOUT, max_model_len=100) == 40


def test_a_pool_too_small_for_the_context_says_what_would_fit() -> None:
    with pytest.raises(StartupFailed) as caught:
        choose_num_cpu_blocks(config(num_kv_blocks=26), LAYOUT, max_model_len=100)
    needed, there = 27 * LAYOUT.block_bytes, 26 * LAYOUT.block_bytes
    assert f"{needed} bytes" in caught.value.message
    assert f"{there} " in caught.value.message
    fitting = int(re.findall(r"--max-model-len (\d+)", caught.value.hint)[0])
    assert fitting == 96
    assert choose_num_cpu_blocks(config(num_kv_blocks=26), LAYOUT, max_model_len=fitting) == 26
    with pytest.raises(StartupFailed):
        choose_num_cpu_blocks(config(num_kv_blocks=26), LAYOUT, max_model_len=fitting + 1)
    with pytest.raises(StartupFailed) as caught:
        choose_num_cpu_blocks(config(num_kv_blocks=2), LAYOUT, max_model_len=8)
    assert "--max-model-len" not in caught.value.hint


def test_the_canary_differs_at_every_offset_and_for_every_process() -> None:
    pattern = canary_bytes(INCARNATION, 4096)
    assert len(pattern) == 4096
    assert canary_bytes(INCARNATION, 4096) == pattern
    assert canary_bytes(OTHER, 4096) != pattern
    pieces = {pattern[i : i + 16] for i in range(0, 4096, 16)}
    assert len(pieces) == 256
