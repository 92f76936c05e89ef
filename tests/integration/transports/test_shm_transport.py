"""`shm` between real processes: torn copies, deaths, hostile peers, and nothing left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import json
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from fakes.access import ENGINE_KEY, access
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.host_pool import HostPool, export_host_pool
from numpy.typing import NDArray
from patience import AT_ONCE_S

from baton.core.channels.addresses import socket_address
from baton.core.channels.handshake import CHALLENGE_BYTES, OPENING_BYTES, Listener
from baton.core.errors import HandoffFailed, StartupFailed
from baton.engine.kv.block_pool import CANARY_BLOCK, NUM_RESERVED_BLOCKS
from baton.kv_transfer.export.pool_address import (
    ADDRESS,
    PURPOSE,
    CudaMemory,
    PoolDescription,
    PoolExporter,
)
from baton.kv_transfer.shm.shm import ShmTransport
from baton.kv_transfer.shm.shm_window import ShmWindow
from baton.kv_transfer.window.network_address import RemotePool, pair_key
from baton.kv_transfer.window.transport import PullOutcome

PEER = Path(__file__).parent / "shm_peer.py"
SOURCE, PULLER = "5" * 32, "9" * 32


def _load_peer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shm_peer", PEER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer = _load_peer()
NUM_BLOCKS, BLOCK_BYTES = peer.NUM_BLOCKS, peer.BLOCK_BYTES


def footprint() -> tuple[int, int, set[str]]:
    """State that must be restored: descriptors, threads, and files in /dev/shm without hidden ones,
    which belong to browsers in concurrent tests."""
    num_fds = len(os.listdir("/proc/self/fd"))
    shared = {name for name in os.listdir("/dev/shm") if not name.startswith(".")}
    return num_fds, threading.active_count(), shared


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A silent peer keeps an exporter's thread and connection for up to a second. Leftovers of
    earlier tests, for the collector or from ending threads, may go meanwhile."""
    gc.collect()
    fds, threads, shared = footprint()
    yield
    deadline_s = time.monotonic() + 3
    while time.monotonic() < deadline_s:
        gc.collect()
        after = footprint()
        if after[0] <= fds and after[1] <= threads and after[2] <= shared:
            return
        time.sleep(0.01)
    assert after == (fds, threads, shared)


@pytest.fixture
def source() -> Iterator[HostPool]:
    pool = HostPool(SOURCE, NUM_BLOCKS, BLOCK_BYTES)
    for block_id in range(NUM_RESERVED_BLOCKS, NUM_BLOCKS):
        rewrite(pool, block_id)
    yield pool
    pool.close()


@pytest.fixture
def destination() -> Iterator[HostPool]:
    pool = HostPool(PULLER, NUM_BLOCKS, BLOCK_BYTES)
    yield pool
    pool.close()


@pytest.fixture
def exporter(source: HostPool) -> Iterator[PoolExporter]:
    exporter = export_host_pool(SOURCE, source, source.generations.fd)
    yield exporter
    exporter.close()


@contextlib.contextmanager
def window_onto(incarnation: str, destination: HostPool) -> Iterator[ShmWindow]:
    window = ShmTransport(destination).connect(access(incarnation))
    try:
        yield window
    finally:
        window.close()
        window.join()


@contextlib.contextmanager
def peer_process(
    *arguments: str, pass_fds: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PEER), *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, pass_fds=pass_fds, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def rewrite(pool: HostPool, block_id: int) -> int:
    """Write new content to the block as an engine does, generation first; returns the
    generation."""
    pool.generations.bump([block_id])
    generation = pool.generations.read(block_id)
    np.frombuffer(pool.block(block_id), dtype=np.uint64)[:] = peer.content(block_id, generation)
    return generation


def pair(pool: HostPool, block_id: int, destination: int) -> BlockPair:
    return BlockPair(BlockRef(block_id, pool.generations.read(block_id)), destination)


def pull(window: ShmWindow, *pairs: BlockPair) -> PullOutcome:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    window.start_pull(block_pairs.join(*pairs), done.put)
    return done.get(timeout=10)


@pytest.mark.usefixtures("exporter")
def test_copies_blocks_to_where_they_belong(source: HostPool, destination: HostPool) -> None:
    with window_onto(SOURCE, destination) as window:
        assert window.transport == "shm"
        assert window.gbytes_per_s > 0.1
        outcome = pull(window, pair(source, 7, 3), pair(source, NUM_BLOCKS - 1, 2))
        assert outcome is PullOutcome.OK
    assert destination.block(3) == source.block(7)
    assert destination.block(2) == source.block(NUM_BLOCKS - 1)


@pytest.mark.usefixtures("exporter")
def test_a_reallocated_block_is_stale(source: HostPool, destination: HostPool) -> None:
    announced = pair(source, 7, 3)
    rewrite(source, 7)
    with window_onto(SOURCE, destination) as window:
        assert pull(window, pair(source, 8, 2), announced) is PullOutcome.STALE


@pytest.mark.usefixtures("exporter")
def test_a_block_outside_the_pool_fails(destination: HostPool) -> None:
    beyond = BlockPair(BlockRef(NUM_BLOCKS, 0), 3)
    with window_onto(SOURCE, destination) as window:
        assert pull(window, beyond) is PullOutcome.FAILED


@pytest.mark.usefixtures("exporter")
def test_a_writer_that_forgets_the_generation_is_found_out(
    source: HostPool, destination: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = np.frombuffer(source.block(7), dtype=np.uint64)
    compare = np.array_equal

    def scribble_and_compare(copied: NDArray[np.uint8], original: NDArray[np.uint8]) -> bool:
        words[-1] += 1  # after the copy, before the generation is read again
        return compare(copied, original)

    with window_onto(SOURCE, destination) as window:
        assert pull(window, pair(source, 7, 3)) is PullOutcome.OK
        monkeypatch.setattr(np, "array_equal", scribble_and_compare)
        assert pull(window, pair(source, 7, 3)) is PullOutcome.FAILED
        monkeypatch.undo()
        assert pull(window, pair(source, 7, 3)) is PullOutcome.OK


@pytest.mark.usefixtures("exporter")
def test_every_pull_reports_once_even_when_cancelled_or_closed(
    source: HostPool, destination: HostPool
) -> None:
    done: queue.SimpleQueue[PullOutcome] = queue.SimpleQueue()
    pairs = [pair(source, block_id, block_id) for block_id in range(2, NUM_BLOCKS)] * 20
    with window_onto(SOURCE, destination) as window:
        handles = [window.start_pull(block_pairs.join(*pairs), done.put) for _ in range(6)]
        for handle in handles[1:]:
            handle.cancel()
    outcomes = [done.get(timeout=10) for _ in handles]
    assert outcomes == [PullOutcome.OK] + [PullOutcome.CANCELLED] * 5
    assert done.empty()


@pytest.mark.usefixtures("exporter")
def test_no_torn_copy_from_another_process_is_ever_ok(source: HostPool) -> None:
    fd = os.memfd_create("published")
    os.ftruncate(fd, 8 * NUM_BLOCKS)
    published = np.frombuffer(mmap.mmap(fd, 8 * NUM_BLOCKS), dtype=np.uint64)
    for block_id in range(NUM_BLOCKS):
        published[block_id] = source.generations.read(block_id)
    with peer_process("pull", SOURCE, "2", str(fd), pass_fds=(fd,)) as process:
        while process.poll() is None:
            for block_id in range(NUM_RESERVED_BLOCKS, NUM_BLOCKS):
                generation = rewrite(source, block_id)
                published[block_id] = generation  # complete: it may be announced
            time.sleep(0.0005)  # otherwise the puller would hardly find a block at rest
        counts = json.loads(read_line(process))
    os.close(fd)
    assert counts["wrong"] == 0
    assert counts["ok"] > 100
    assert counts["stale"] > 10
    assert "failed" not in counts  # every generation moved before its content


def test_kill_9_of_the_source_leaves_nothing(destination: HostPool) -> None:
    with peer_process("export", SOURCE) as process:
        assert read_line(process) == "ready"
        with window_onto(SOURCE, destination) as window:
            process.send_signal(signal.SIGKILL)
            process.wait()
            # The mapping outlives its owner: announced blocks can still be copied.
            canary = BlockPair(BlockRef(CANARY_BLOCK, 0), 3)
            assert pull(window, canary) is PullOutcome.OK
            start_s = time.monotonic()
            with pytest.raises(HandoffFailed, match="no exporter"):
                ShmTransport(destination).connect(access(SOURCE))
            assert time.monotonic() - start_s < AT_ONCE_S
    assert SOURCE not in Path("/proc/net/unix").read_text()


@pytest.mark.usefixtures("exporter")
def test_one_incarnation_is_exported_once(source: HostPool) -> None:
    with pytest.raises(StartupFailed):
        export_host_pool(SOURCE, source, source.generations.fd)


@pytest.mark.parametrize(
    "wrong",
    [
        access(SOURCE, engine_key=bytes(32)),
        dataclasses.replace(access(SOURCE), puller="ee" * 16),  # another puller's key
    ],
)
@pytest.mark.usefixtures("exporter")
def test_who_was_given_no_key_gets_no_memory(destination: HostPool, wrong: RemotePool) -> None:
    with pytest.raises(HandoffFailed):
        ShmTransport(destination).connect(wrong)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(OPENING_BYTES), b"\xff" * 4096])
@pytest.mark.usefixtures("exporter")
def test_a_stranger_of_the_same_user_gets_no_descriptor(payload: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(socket_address(SOURCE))
        connection.settimeout(5)
        connection.send(payload)
        data, fds, _, _ = socket.recv_fds(connection, 1024, 4)
    assert not data and not fds


def test_an_exporter_that_does_not_hold_the_key_is_not_believed(
    source: HostPool, destination: HostPool
) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1024)
        connection.send(os.urandom(CHALLENGE_BYTES))

    with exporter_that(answer), pytest.raises(HandoffFailed, match="does not hold the key"):
        ShmTransport(destination).connect(access(SOURCE))


@pytest.mark.usefixtures("exporter")
def test_who_says_nothing_keeps_nobody_waiting(destination: HostPool) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(16):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            silent.enter_context(stranger).connect(socket_address(SOURCE))
        began_s = time.monotonic()
        with window_onto(SOURCE, destination):
            assert time.monotonic() - began_s < 0.9


@pytest.mark.usefixtures("exporter")
def test_peers_of_another_shape_are_refused() -> None:
    other = HostPool(PULLER, NUM_BLOCKS, 4096)
    with pytest.raises(HandoffFailed, match="a block has"):
        ShmTransport(other).connect(access(SOURCE))
    other.close()


@pytest.mark.parametrize(
    "incarnation", ["", "5" * 31, "5" * 32 + "\n", "../" * 10 + "xx", "G" * 32]
)
def test_a_peer_cannot_choose_what_is_connected_to(destination: HostPool, incarnation: str) -> None:
    with pytest.raises(HandoffFailed, match="32 hex digits"):
        ShmTransport(destination).connect(access(incarnation))


def test_a_pool_on_a_gpu_is_refused(source: HostPool, destination: HostPool) -> None:
    on_gpu = PoolDescription(SOURCE, BLOCK_BYTES, NUM_BLOCKS, CudaMemory(bytes(16), bytes(64)))
    exporter = PoolExporter(on_gpu, [source.generations.fd], ENGINE_KEY)
    with pytest.raises(HandoffFailed, match="on a GPU"):
        ShmTransport(destination).connect(access(SOURCE))
    exporter.close()


# ---- exporters that send wrong data


def unsealed(num_bytes: int) -> int:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return fd


def _describe(pool: HostPool, incarnation: str = SOURCE, extra_blocks: int = 0) -> bytes:
    return PoolDescription(incarnation, BLOCK_BYTES, pool.num_blocks + extra_blocks).pack()


def _lie(kind: str, pool: HostPool) -> tuple[bytes, list[int], list[int]]:
    """What the exporter sends, with which descriptors, and which of them to close."""
    right = [pool.fd, pool.generations.fd]
    match kind:
        case "garbage":
            return b"\x80\x04pickle?", right, []
        case "other incarnation":
            return _describe(pool, "6" * 32), right, []
        case "wrong size":
            return _describe(pool, extra_blocks=1), right, []
        case "huge":
            return PoolDescription(SOURCE, BLOCK_BYTES, 2**60).pack(), right, []
        case "no blocks":
            return PoolDescription(SOURCE, BLOCK_BYTES, 0).pack(), right, []
        case "no descriptors":
            return _describe(pool), [], []
        case "one descriptor":
            return _describe(pool), right[:1], []
        case "swapped":
            return _describe(pool), right[::-1], []
        case "unsealed":
            fd = unsealed(NUM_BLOCKS * BLOCK_BYTES)
            return _describe(pool), [fd, pool.generations.fd], [fd]
        case _:  # "a file"
            fd = os.open("/dev/zero", os.O_RDONLY)
            return _describe(pool), [fd, pool.generations.fd], [fd]


def shake_hands(connection: socket.socket) -> None:
    """Perform an exporter's part of the handshake."""
    theirs = Listener(lambda o: pair_key(ENGINE_KEY, o.dialer), PURPOSE, (ADDRESS,))
    connection.send(theirs.challenge(connection.recv(1024)))
    theirs.check(connection.recv(1024))


@contextlib.contextmanager
def exporter_that(answer: Callable[[socket.socket], None]) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(socket_address(SOURCE))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    "kind",
    [
        "garbage",
        "other incarnation",
        "wrong size",
        "huge",
        "no blocks",
        "no descriptors",
        "one descriptor",
        "swapped",
        "unsealed",
        "a file",
    ],
)
def test_an_exporter_that_lies_is_refused(
    source: HostPool, destination: HostPool, kind: str
) -> None:
    packed, fds, own = _lie(kind, source)

    def answer(connection: socket.socket) -> None:
        shake_hands(connection)
        socket.send_fds(connection, [packed], fds)

    with exporter_that(answer), pytest.raises(HandoffFailed):
        ShmTransport(destination).connect(access(SOURCE))
    for fd in own:
        os.close(fd)


def test_a_wrong_canary_is_refused(destination: HostPool) -> None:
    impostor = HostPool(SOURCE, NUM_BLOCKS, BLOCK_BYTES)
    impostor.block(CANARY_BLOCK)[BLOCK_BYTES - 1] ^= 1
    exporter = export_host_pool(SOURCE, impostor, impostor.generations.fd)
    with pytest.raises(HandoffFailed, match="canary"):
        ShmTransport(destination).connect(access(SOURCE))
    exporter.close()
    impostor.close()


def test_generations_of_another_process_are_refused(
    source: HostPool, destination: HostPool
) -> None:
    exporter = export_host_pool(SOURCE, source, destination.generations.fd)
    with pytest.raises(HandoffFailed, match="generation page"):
        ShmTransport(destination).connect(access(SOURCE))
    exporter.close()


def test_an_exporter_that_hangs_is_given_up(destination: HostPool) -> None:
    is_over = threading.Event()
    start_s = time.monotonic()
    with exporter_that(lambda _: is_over.wait()):
        with pytest.raises(HandoffFailed, match="timed out"):
            ShmTransport(destination).connect(access(SOURCE))
        is_over.set()
    assert time.monotonic() - start_s < 3


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@needs_root
@pytest.mark.usefixtures("exporter")
def test_another_user_gets_no_memory() -> None:
    with peer_process("intrude", str(os.geteuid()), SOURCE) as process:
        assert json.loads(read_line(process)) == [0, 0]


@needs_root
def test_another_users_memory_is_not_taken(destination: HostPool) -> None:
    with peer_process("squat", str(os.geteuid()), SOURCE) as process:
        assert read_line(process) == "ready"
        with pytest.raises(HandoffFailed, match=f"user {peer.NOBODY}"):
            ShmTransport(destination).connect(access(SOURCE))
