"""`nccl`, and `tcp` between GPUs, between real processes; and parts of blocks over every transport.

Needs two GPUs for `nccl`: it does not connect a GPU to itself.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gpu_source
import numpy as np
import pytest
import torch
from fakes.access import ENGINE_KEY, access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.handoff.pieces import of_heads
from gpu_source import LAYOUT, NUM_BLOCKS, PULLER_GPU, Source, holds, pull

from baton.core.config import NodeConfig
from baton.core.errors import HandoffFailed
from baton.engine.kv.block_pool import CANARY_BLOCK
from baton.engine.kv.kv_memory import CudaKvMemory, canary_bytes
from baton.kv_transfer.window.block_pieces import BlockCut, BlockPiece
from baton.kv_transfer.window.transport import PullOutcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
NETWORKS = [pytest.param("nccl", marks=needs_two), "tcp"]

NUM_PULLS = 60  # more than end within 10 ms

source_process = partial(gpu_source.source_process, "network_peer.py", ENGINE_KEY.hex())


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
def window_onto(
    source: Source, kv: CudaKvMemory, name: str, piece: BlockPiece | None = None
) -> Iterator:
    from baton.kv_transfer.device_transports import transports

    transport_name, _, method = name.partition(" ")
    config = NodeConfig(kv_transport=transport_name, kv_copy=method or "auto")
    (transport,) = transports(kv, config, None)
    remote = access(source.incarnation, int(source.printed))
    window = transport.connect(remote, piece)
    try:
        yield window
    finally:
        window.close()
        window.join()


@pytest.mark.parametrize("name", NETWORKS)
def test_copies_blocks_to_where_they_belong(source: Source, kv: CudaKvMemory, name: str) -> None:
    kv.tensor.zero_()
    torch.cuda.synchronize(PULLER_GPU)
    ids = list(range(2, NUM_BLOCKS - 1))
    shuffled = random.Random(1).sample(ids, len(ids))
    pairs = [source.pair(*one) for one in zip(ids[:40] + shuffled[40:], shuffled, strict=True)]
    begin_s = time.monotonic()
    with window_onto(source, kv, name) as window:
        print(f"\n{name}: open after {time.monotonic() - begin_s:.1f} s, ", end="")
        print(f"{window.gbytes_per_s:.1f} GB/s at 8 MiB")
        assert window.transport == name
        assert pull(window, *pairs) is PullOutcome.OK
        times_s = []
        for _ in range(8):
            begin_s = time.perf_counter()
            assert pull(window, *pairs) is PullOutcome.OK
            times_s.append(time.perf_counter() - begin_s)
        num_bytes = len(pairs) * kv.block_bytes
        print(f"{num_bytes >> 20} MiB: {num_bytes / sorted(times_s)[4] / 1e9:.1f} GB/s")
    assert all(holds(kv, pair) for pair in pairs)
    assert not kv.tensor[NUM_BLOCKS - 1].any(), "a block that nobody asked for was written"


def heads(there: int, here: int, count: int) -> BlockPiece:
    return of_heads(there, here, count, 8, 8, num_layers=LAYOUT.num_layers)


WAYS = [*NETWORKS, "cuda_ipc kernel", "cuda_ipc copy-engine", "cuda_staged"]


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    "piece",
    [heads(4, 0, 4), heads(7, 2, 1), heads(1, 5, 3)],
)
def test_heads_go_to_where_they_belong(
    source: Source, kv: CudaKvMemory, name: str, piece: BlockPiece
) -> None:
    """Heads of the canary block, in which all positions differ, are copied to the right places."""
    kv.tensor.zero_()
    torch.cuda.synchronize(PULLER_GPU)
    with window_onto(source, kv, name, piece) as window:
        print(f"\n{name}: {window.gbytes_per_s:.1f} GB/s")
        pairs = [BlockPair(BlockRef(CANARY_BLOCK, 0), here) for here in (3, 9)]
        assert pull(window, *pairs) is PullOutcome.OK
    cut = BlockCut.of(piece, kv.block_bytes)
    expected = cut.there(canary_bytes(source.incarnation, kv.block_bytes)).tobytes()
    for here in (3, 9):
        rows = kv.tensor[here].view(torch.uint8).cpu().numpy().reshape(cut.num_rows, cut.pitch)
        found = rows[:, cut.offset : cut.offset + cut.width]
        assert found.tobytes() == expected
        assert np.count_nonzero(rows) == np.count_nonzero(found), "other heads were written"
    assert not kv.tensor[4].any()


@needs_two
def test_windows_that_open_at_once_do_not_disturb_each_other(
    source: Source, kv: CudaKvMemory
) -> None:
    """Windows open at once while each records graphs; the last ones have more streams than torch's
    pool."""
    num_windows = 12

    def check(index: int) -> list[BlockPair]:
        pairs = [source.pair(2 + (5 * index + i) % 100, 2 + 10 * index + i) for i in range(10)]
        with window_onto(source, kv, "nccl") as window:
            for _ in range(20):
                assert pull(window, *pairs) is PullOutcome.OK
        return pairs

    kv.tensor.zero_()
    torch.cuda.synchronize(PULLER_GPU)
    with ThreadPoolExecutor(3) as threads:
        for pairs in threads.map(check, range(num_windows)):
            assert all(holds(kv, pair) for pair in pairs)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_reallocated_block_is_stale(source: Source, kv: CudaKvMemory, name: str) -> None:
    announced = source.pair(7, 3)
    source.tell("rewrite 7")
    assert source.receive() == "rewritten"
    with window_onto(source, kv, name) as window:
        assert pull(window, source.pair(8, 2), announced) is PullOutcome.STALE
        assert pull(window, source.pair(7, 3)) is PullOutcome.OK
    assert holds(kv, source.pair(7, 3))


@pytest.mark.parametrize("name", NETWORKS)
def test_no_torn_copy_is_ever_ok(kv: CudaKvMemory, name: str) -> None:
    counts: collections.Counter[str] = collections.Counter()
    rng = random.Random(2)
    with source_process() as source, window_onto(source, kv, name) as window:
        source.tell("churn")
        until_s = time.monotonic() + 3
        while time.monotonic() < until_s:
            num_blocks = rng.choice([1, 8])
            pairs = [source.pair(b, b) for b in rng.sample(range(2, NUM_BLOCKS), num_blocks)]
            outcome = pull(window, *pairs)
            counts[outcome.value] += 1
            if outcome is PullOutcome.OK:
                counts["wrong"] += not all(holds(kv, pair) for pair in pairs)
    print(f"\n{name}: {dict(counts)}")
    assert counts["wrong"] == 0
    assert counts["ok"] > 20
    assert counts["stale"] > 5


@needs_two
def test_a_source_that_hangs_costs_its_pull_and_nothing_is_written_later(
    kv: CudaKvMemory,
) -> None:
    """After SIGSTOP NCCL waits, and only this pair is aborted; after SIGCONT the next pull opens a
    new one."""
    with (
        source_process() as source,
        source_process() as neighbour,
        window_onto(source, kv, "nccl") as window,
        window_onto(neighbour, kv, "nccl") as other,
    ):
        pairs = [source.pair(block_id, block_id) for block_id in range(2, NUM_BLOCKS)]
        assert pull(window, *pairs) is PullOutcome.OK
        source.process.send_signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
        window.start_pull(block_pairs.join(*pairs), done.put)
        assert pull(other, neighbour.pair(5, 5)) is PullOutcome.OK
        assert done.get(timeout=30) is PullOutcome.FAILED
        print(f"\ngiven up after {time.monotonic() - begin_s:.1f} s")
        kv.tensor.view(torch.int64).fill_(-1)
        source.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert bool((kv.tensor.view(torch.int64) == -1).all())
        assert pull(window, *pairs) is PullOutcome.OK
        assert pull(other, neighbour.pair(6, 129)) is PullOutcome.OK
    assert all(holds(kv, pair) for pair in pairs[:-1])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_source_dies_during_copies(kv: CudaKvMemory, name: str) -> None:
    for delay_s in (0.0, 0.002, 0.01):
        done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
        with source_process() as source, window_onto(source, kv, name) as window:
            pairs = [source.pair(block_id, block_id) for block_id in range(2, NUM_BLOCKS)]
            for _ in range(NUM_PULLS):
                window.start_pull(block_pairs.join(*pairs), done.put)
            time.sleep(delay_s)
            source.process.kill()
            outcomes = collections.Counter(done.get(timeout=60).value for _ in range(NUM_PULLS))
            print(f"\n{name}, {delay_s} s: {dict(outcomes)}")
            assert outcomes["failed"] > 0
            with pytest.raises(HandoffFailed):
                window_onto(source, kv, name).__enter__()
    kv.tensor.zero_()
    torch.cuda.synchronize(PULLER_GPU)  # this GPU still works
