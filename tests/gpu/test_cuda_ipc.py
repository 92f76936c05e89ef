"""`cuda_ipc` between real processes: the first GPU is the source's, the last the puller's.

On a host with one GPU both processes share it: everything but the link is the same.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import random
import secrets
import time
from collections.abc import Iterator
from functools import partial

import gpu_source
import pytest
import torch
from fakes.access import ENGINE_KEY, access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.host_pool import HostPool, export_host_pool
from gpu_source import LAYOUT, NUM_BLOCKS, PULLER_GPU, SOURCE_GPU, Source, holds, pull

from baton.core.errors import HandoffFailed
from baton.engine.kv.block_pool import CANARY_BLOCK, NUM_RESERVED_BLOCKS
from baton.engine.kv.generations import SharedGenerations
from baton.engine.kv.kv_memory import CudaKvMemory
from baton.kv_transfer.export.pool_address import CudaMemory, PoolDescription, PoolExporter
from baton.kv_transfer.window.transport import PullOutcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

METHODS = ["kernel", "copy-engine", "staged"]
source_process = partial(gpu_source.source_process, "cuda_ipc_peer.py")


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    with source_process() as source:
        yield source


@pytest.fixture(scope="module")
def kv() -> Iterator[CudaKvMemory]:
    kv = CudaKvMemory(LAYOUT, NUM_BLOCKS, torch.device(PULLER_GPU))
    yield kv
    kv.close()


@contextlib.contextmanager
def window_onto(incarnation: str, kv: CudaKvMemory, method: str | None = None) -> Iterator:
    from baton.kv_transfer.cuda_ipc.cuda_ipc import CudaIpcTransport, CudaStagedTransport

    staged = method == "staged"
    transport = CudaStagedTransport(kv) if staged else CudaIpcTransport(kv, method)
    window = transport.connect(access(incarnation))
    try:
        yield window
    finally:
        window.close()
        window.join()


@pytest.mark.parametrize("method", METHODS)
def test_copies_blocks_to_where_they_belong(source: Source, kv: CudaKvMemory, method: str) -> None:
    kv.tensor.zero_()
    torch.cuda.synchronize(PULLER_GPU)
    ids = list(range(NUM_RESERVED_BLOCKS, NUM_BLOCKS - 1))
    shuffled = random.Random(1).sample(ids, len(ids))
    pairs = [source.pair(*one) for one in zip(ids[:40] + shuffled[40:], shuffled, strict=True)]
    with window_onto(source.incarnation, kv, method) as window:
        assert window.transport == ("cuda_staged" if method == "staged" else "cuda_ipc")
        assert window.method == method
        print(f"\n{method}: {window.gbytes_per_s:.0f} GB/s")
        assert window.gbytes_per_s > 5
        assert pull(window, *pairs) is PullOutcome.OK
    assert all(holds(kv, pair) for pair in pairs)
    assert not kv.tensor[NUM_BLOCKS - 1].any(), "a block that nobody asked for was written"


def test_the_method_is_chosen_by_measurement(source: Source, kv: CudaKvMemory) -> None:
    with window_onto(source.incarnation, kv) as window:
        print(f"\nchosen: {window.method}, {window.gbytes_per_s:.0f} GB/s")
        assert window.method in METHODS


def test_a_reallocated_block_is_stale(source: Source, kv: CudaKvMemory) -> None:
    announced = source.pair(7, 3)
    source.tell("rewrite 7")
    assert source.receive() == "rewritten"
    with window_onto(source.incarnation, kv) as window:
        assert pull(window, source.pair(8, 2), announced) is PullOutcome.STALE
        assert pull(window, source.pair(7, 3)) is PullOutcome.OK
    assert holds(kv, source.pair(7, 3))


@pytest.mark.parametrize("method", METHODS)
def test_a_prepared_pull_is_judged_when_it_starts(
    source: Source, kv: CudaKvMemory, method: str
) -> None:
    pairs, stale = [source.pair(9, 4), source.pair(10, 2)], source.pair(11, 3)
    outcomes: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    with window_onto(source.incarnation, kv, method) as window:
        starters = [
            window.prepare(block_pairs.join(*pairs)),
            window.prepare(block_pairs.join(stale)),
            window.prepare(block_pairs.join(*pairs)),
        ]
        source.tell("rewrite 11")
        assert source.receive() == "rewritten"
        for start in starters[:2]:  # the third pull is not started
            start(outcomes.put)
        assert [outcomes.get(timeout=10) for _ in range(2)] == [PullOutcome.OK, PullOutcome.STALE]
    assert all(holds(kv, pair) for pair in pairs)


def test_a_block_outside_the_pool_cannot_be_prepared(source: Source, kv: CudaKvMemory) -> None:
    with window_onto(source.incarnation, kv) as window, pytest.raises(HandoffFailed):
        window.prepare(block_pairs.join(BlockPair(BlockRef(NUM_BLOCKS, 0), 3)))


def test_a_block_outside_the_pool_fails(source: Source, kv: CudaKvMemory) -> None:
    with window_onto(source.incarnation, kv) as window:
        beyond = BlockPair(BlockRef(NUM_BLOCKS, 0), 3)
        assert pull(window, beyond) is PullOutcome.FAILED


@pytest.mark.parametrize("method", METHODS)
def test_every_pull_reports_once_even_when_cancelled_or_closed(
    source: Source, kv: CudaKvMemory, method: str
) -> None:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    pairs = [source.pair(block_id, block_id) for block_id in range(2, NUM_BLOCKS)]
    with window_onto(source.incarnation, kv, method) as window:
        handles = [window.start_pull(block_pairs.join(*pairs), done.put) for _ in range(12)]
        for handle in handles[6:]:
            handle.cancel()
    outcomes = collections.Counter(done.get(timeout=20) for _ in handles)
    assert done.empty()
    assert set(outcomes) <= {PullOutcome.OK, PullOutcome.CANCELLED}
    assert outcomes[PullOutcome.OK] >= 6


@pytest.mark.parametrize("method", METHODS)
def test_no_torn_copy_is_ever_ok(kv: CudaKvMemory, method: str) -> None:
    counts: collections.Counter[str] = collections.Counter()
    rng = random.Random(2)
    ids = range(NUM_RESERVED_BLOCKS, NUM_BLOCKS)
    with source_process() as source, window_onto(source.incarnation, kv, method) as window:
        source.tell("churn")
        until_s = time.monotonic() + 3
        while time.monotonic() < until_s:
            pairs = [source.pair(block_id, block_id) for block_id in rng.sample(ids, 24)]
            outcome = pull(window, *pairs)
            counts[outcome.value] += 1
            if outcome is PullOutcome.OK:
                counts["wrong"] += not all(holds(kv, pair) for pair in pairs)
    print(f"\n{method}: {dict(counts)}")
    assert counts["wrong"] == 0
    assert counts["ok"] > 50
    assert counts["stale"] > 5


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_written_once_a_cancelled_pull_is_reported(
    source: Source, kv: CudaKvMemory, method: str
) -> None:
    pairs = [source.pair(block_id, block_id) for block_id in range(2, NUM_BLOCKS)]
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    with window_onto(source.incarnation, kv, method) as window:
        for _ in range(20):
            handles = [window.start_pull(block_pairs.join(*pairs), done.put) for _ in range(3)]
            for handle in handles:
                handle.cancel()
            ended = {done.get(timeout=20) for _ in handles}
            assert ended <= {PullOutcome.CANCELLED, PullOutcome.OK}  # some end before the cancel
            kv.tensor.view(torch.int64).fill_(-1)  # the blocks may belong to another request
            time.sleep(0.002)
            assert bool((kv.tensor.view(torch.int64) == -1).all())


@pytest.mark.parametrize("method", METHODS)
def test_the_source_dies_during_copies(kv: CudaKvMemory, method: str) -> None:
    """Each pull reports once, pulls that report OK have the announced bytes, and the process
    survives."""
    outcomes: collections.Counter[str] = collections.Counter()
    for delay_s in (0.0, 0.001, 0.003, 0.01):
        done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
        with source_process() as source:
            with window_onto(source.incarnation, kv, method) as window:
                pairs = [source.pair(block_id, block_id) for block_id in range(2, NUM_BLOCKS)]
                for _ in range(40):
                    window.start_pull(block_pairs.join(*pairs), done.put)
                time.sleep(delay_s)
                source.process.kill()
                source.process.wait()
                later = pull(window, *pairs)  # through a dead process's mapping
            assert done.qsize() == 40
            outcomes.update(done.get().value for _ in range(40))
            outcomes[f"later {later.value}"] += 1
            if later is PullOutcome.OK:
                assert all(holds(kv, pair) for pair in pairs)
    print(f"\n{method}: {dict(outcomes)}")
    kv.tensor.zero_()
    torch.cuda.synchronize(PULLER_GPU)


@pytest.mark.parametrize("method", METHODS)
def test_memory_that_is_smaller_than_announced_is_refused(kv: CudaKvMemory, method: str) -> None:
    with (
        source_process("20") as source,
        pytest.raises(HandoffFailed, match="bytes, not the"),
        window_onto(source.incarnation, kv, method),
    ):
        pass


def free_bytes(gpu: str) -> int:
    return torch.cuda.mem_get_info(torch.device(gpu))[0]


def test_kill_9_of_the_source_gives_its_memory_back(kv: CudaKvMemory) -> None:
    torch.zeros(1, device=SOURCE_GPU)  # exclude this process's own context from the count
    before = free_bytes(SOURCE_GPU)
    pool_bytes = NUM_BLOCKS * LAYOUT.block_bytes
    with source_process() as source:
        with window_onto(source.incarnation, kv) as window:
            assert before - free_bytes(SOURCE_GPU) > pool_bytes
            source.process.kill()
            source.process.wait()
            print(f"\nheld while mapped: {(before - free_bytes(SOURCE_GPU)) / 1e6:.0f} MB")
            with pytest.raises(HandoffFailed, match="no exporter"):
                window_onto(source.incarnation, kv).__enter__()
            assert window.transport == "cuda_ipc"
        until_s = time.monotonic() + 10
        while before - free_bytes(SOURCE_GPU) > pool_bytes // 2:
            assert time.monotonic() < until_s, "the dead source's memory is still taken"
            time.sleep(0.05)
    kv.tensor.zero_()
    torch.cuda.synchronize(PULLER_GPU)  # the puller's GPU still works
    with source_process() as successor, window_onto(successor.incarnation, kv) as window:
        assert pull(window, successor.pair(5, 5)) is PullOutcome.OK


def test_a_wrong_canary_is_refused(kv: CudaKvMemory) -> None:
    with source_process() as source:
        source.tell(f"rewrite {CANARY_BLOCK}")
        assert source.receive() == "rewritten"
        with (
            pytest.raises(HandoffFailed, match="canary"),
            window_onto(source.incarnation, kv),
        ):
            pass


def test_memory_that_cannot_be_read_is_named(kv: CudaKvMemory) -> None:
    from baton.kv_transfer.cuda_ipc.cuda_ipc_memory import gpu_uuid

    incarnation = secrets.token_hex(16)
    generations = SharedGenerations(NUM_BLOCKS, incarnation)
    here = gpu_uuid(torch.device(PULLER_GPU))
    for memory, words in (
        (CudaMemory(bytes(16), bytes(64)), "not visible"),
        (CudaMemory(here, bytes(64)), "cannot open"),
    ):
        description = PoolDescription(incarnation, kv.block_bytes, NUM_BLOCKS, memory)
        exporter = PoolExporter(description, [generations.fd], ENGINE_KEY)
        with pytest.raises(HandoffFailed, match=words), window_onto(incarnation, kv):
            pass
        exporter.close()
    generations.close()
    host = HostPool(incarnation, 8, kv.block_bytes)
    exporter = export_host_pool(incarnation, host, host.generations.fd)
    with pytest.raises(HandoffFailed, match="host memory"), window_onto(incarnation, kv):
        pass
    exporter.close()
    host.close()
    torch.zeros(1, device=PULLER_GPU)  # and CUDA still works


def test_without_peer_access_blocks_are_staged_and_it_is_told(
    source: Source,
    kv: CudaKvMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from baton.kv_transfer.cuda_ipc.cuda_ipc import CudaIpcTransport, CudaStagedTransport
    from baton.kv_transfer.window.transport import open_window

    if SOURCE_GPU == PULLER_GPU:
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    with caplog.at_level("INFO"):
        window = open_window(
            [CudaIpcTransport(kv), CudaStagedTransport(kv)], access(source.incarnation)
        )
    pair = source.pair(9, 4)
    assert window.transport == "cuda_staged"
    assert pull(window, pair) is PullOutcome.OK and holds(kv, pair)
    window.close()
    window.join()
    assert "no cuda_ipc: no peer access from cuda:1 to cuda:0" in caplog.text
    assert "cuda_staged by staged" in caplog.text and "GB/s" in caplog.text
