"""The connections between stages on several hosts, over the loopback: messages, their order, and
the effect of a lost neighbour. The GPU is simulated by a stream that runs only on command.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from fakes.ranks.tcp_columns import tcp_stages

from baton.core.errors import EngineFailed, StartupFailed
from baton.engine.hosts.tcp_stages import TcpStages
from baton.engine.parallel.torch_communicator import _meet_with_addresses

WAIT_S = 20.0


class PlayedStream:
    """A stream that runs its work in order, when the test calls `run`. `Event` is an event on
    it."""

    def __init__(self) -> None:
        self._given: list[Callable[[], object]] = []
        stream = self

        class Event:
            def __init__(self) -> None:
                self._has_happened = threading.Event()

            def record(self) -> None:
                stream.launch(self._has_happened.set)

            def synchronize(self) -> None:
                assert self._has_happened.wait(WAIT_S)

        self.Event = Event

    def launch(self, act: Callable[[], object]) -> None:
        self._given.append(act)

    def run(self) -> None:
        given, self._given = self._given, []
        for act in given:
            act()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> PlayedStream:
    """The simulated stream that runs non-blocking copies."""
    stream, copy, empty = PlayedStream(), torch.Tensor.copy_, torch.empty

    def launch(self: torch.Tensor, x: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            stream.launch(lambda: copy(self, x))
            return self
        return copy(self, x)

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*shape, **options).zero_()

    monkeypatch.setattr(torch.Tensor, "copy_", launch)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", stream.Event)
    return stream


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def connected(
    threads: ThreadPoolExecutor, num_stages: int, *, is_on_gpu: bool = False
) -> list[TcpStages]:
    stages = tcp_stages(num_stages, is_on_gpu=is_on_gpu)
    list(threads.map(TcpStages.connect, stages))
    return stages


def close(stages: list[TcpStages]) -> None:
    for stage in stages:
        stage.close()


def test_before_they_begin_numbers_and_broadcasts_pass(threads: ThreadPoolExecutor) -> None:
    """Before `begin` tensors are neither sent nor received, so that a stage may lag behind."""
    stages = connected(threads, 3)
    for stage in stages[:2]:
        stage.send(torch.ones(1 << 22))  # more than the kernel buffers
    late = torch.ones(2)
    stages[1].receive(late)
    assert late.tolist() == [0.0, 0.0]
    assert [*threads.map(lambda stage: stage.least(7 - stage.stage), stages)] == [5, 5, 5]
    shared = [torch.full((2, 3), float(stage.stage + 1)) for stage in stages]
    list(threads.map(TcpStages.broadcast, stages, shared))
    assert all(torch.equal(each, torch.ones(2, 3)) for each in shared)
    for stage in stages:
        stage.begin()
    stages[0].send(torch.arange(4, dtype=torch.bfloat16))
    found = torch.empty(4, dtype=torch.bfloat16)
    stages[1].receive(found)
    assert found.tolist() == [0, 1, 2, 3]
    close(stages)


def test_a_stage_that_is_behind_gets_all_in_order(threads: ThreadPoolExecutor) -> None:
    first, second = stages = connected(threads, 2)
    for stage in stages:
        stage.begin()
    for step in range(12):
        first.send(torch.full((1 << 18,), step))  # 2 MiB: together more than the kernel buffers
    for step in range(12):
        found = torch.empty(1 << 18, dtype=torch.int64)
        second.receive(found)
        assert bool((found == step).all())
    close(stages)


def test_a_step_is_sent_as_its_place_in_the_stream_has_it(
    threads: ThreadPoolExecutor, stream: PlayedStream
) -> None:
    """A step's tensor is sent as of its place in the stream, although later steps, launched before
    its copy, overwrite the memory; only the sending thread waits for the device."""
    first, second = stages = connected(threads, 2, is_on_gpu=True)
    for stage in stages:
        stage.begin()
    residual, found, seen = torch.zeros(3), torch.zeros(3), list[list[float]]()
    for step in range(4):
        stream.launch(partial(residual.fill_, step))
        first.send(residual)
    receiving = threads.submit(second.receive, found)
    with pytest.raises(TimeoutError):
        receiving.result(0.1)
    stream.run()
    receiving.result(WAIT_S)
    for step in range(4):  # the host runs steps ahead of this device too
        stream.launch(lambda: seen.append(found.tolist()))
        if step < 3:
            second.receive(found)
    assert not seen
    stream.run()
    assert seen == [[float(step)] * 3 for step in range(4)]
    close(stages)


def test_another_shape_than_was_sent_is_no_step(threads: ThreadPoolExecutor) -> None:
    first, second = stages = connected(threads, 2)
    for stage in stages:
        stage.begin()
    first.send(torch.zeros(3))
    with pytest.raises(EngineFailed, match="stage 0 sent 12 bytes, not 16"):
        second.receive(torch.zeros(4))
    close(stages)


def test_a_neighbour_that_is_lost_is_named(threads: ThreadPoolExecutor) -> None:
    first, second = connected(threads, 2)
    first.begin()
    second.begin()
    first._behind._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    with pytest.raises(EngineFailed, match="the connection to stage 0 broke: it hung up"):
        second.receive(torch.zeros(4))
    close([first, second])


def test_a_neighbour_that_is_lost_ends_the_start(threads: ThreadPoolExecutor) -> None:
    first, second = connected(threads, 2)
    waiting = threads.submit(first.least, 3)
    second.close()
    with pytest.raises(StartupFailed, match="rank 0 cannot reach its stages"):
        waiting.result(WAIT_S)
    first.close()


def test_devices_of_two_kinds_are_refused() -> None:
    stages = tcp_stages(2)
    reported = [msgspec.msgpack.encode(("", kind, b"")) for kind in ("CPU", "GPU")]
    meet = _meet_with_addresses(stages[1], lambda mine: reported, "GPU")
    with pytest.raises(StartupFailed, match="--device: rank 1 computes on a GPU, rank 0 on a CPU"):
        meet(b"")
    close(stages)
