"""Pulls that wait for a source's step: begun when the step has completed, and always reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes.handoff import block_pairs
from fakes.handoff.block_pairs import BlockPair, BlockRef
from fakes.handoff.memory_transport import MemoryPool, MemoryTransport, MemoryWindow

from baton.core.errors import HandoffFailed
from baton.kv_transfer.protocol.events import (
    OpenWindow,
    PullEnded,
    PullerEvent,
    StartPull,
    WindowFailed,
    WindowOpened,
)
from baton.kv_transfer.window.block_pairs import BlockPairs
from baton.kv_transfer.window.block_pieces import BlockPiece
from baton.kv_transfer.window.network_address import RemotePool
from baton.kv_transfer.window.transport import PullOutcome, Starter
from baton.node.peers.windows import Windows

SOURCE, OTHER = "a" * 32, "b" * 32


class World:
    """One open window; `outcomes` by pull number."""

    def __init__(self) -> None:
        self.source, pool = MemoryPool(4, 8), MemoryPool(4, 8)
        self.source.num_steps = 1
        self.posted: list[Callable[[], None]] = []
        self.transport = Transport(pool, {SOURCE: self.source})
        self.outcomes: dict[int, PullOutcome] = {}
        self.answers: list[WindowOpened | WindowFailed] = []
        self.windows = Windows(
            self.transport.open, self.posted.append, self.take, lambda run: run()
        )
        self.windows.open(OpenWindow(SOURCE))
        self.run()

    def take(self, event: PullerEvent) -> None:
        if isinstance(event, PullEnded):
            assert event.seq not in self.outcomes, "reported twice"
            self.outcomes[event.seq] = event.outcome
        else:
            assert isinstance(event, WindowOpened | WindowFailed)
            self.answers.append(event)

    def run(self) -> None:
        for pull in [*self.transport.window.pulls]:
            pull.finish()
        while self.posted:
            self.posted.pop(0)()

    def pull(self, number: int, step: int) -> None:
        pair = BlockPair(BlockRef(2, 0), 3)
        pull = StartPull(f"transfer {number}", number, SOURCE, block_pairs.join(pair), step)
        self.windows.pulls.start(pull)


class Transport(MemoryTransport):
    """Records its windows."""

    def __init__(self, pool: MemoryPool, sources: dict[str, MemoryPool]) -> None:
        super().__init__(pool, sources)
        self.all: list[MemoryWindow] = []

    def connect(self, source: RemotePool, piece: BlockPiece | None = None) -> MemoryWindow:
        self.window = super().connect(source)
        self.all.append(self.window)
        return self.window


def test_an_opening_is_answered_once() -> None:
    world = World()
    assert world.answers == [WindowOpened(SOURCE, sees_steps=True)]
    world.windows.open(OpenWindow(OTHER))
    world.run()
    (_, failed) = world.answers
    assert isinstance(failed, WindowFailed) and failed.incarnation == OTHER
    assert "no pool" in failed.error.message


def test_whatever_goes_wrong_an_opening_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def open_it(opening: OpenWindow) -> MemoryWindow:
        raise OSError("too many open files")

    monkeypatch.setattr(world.windows, "_connect", open_it)
    world.windows.open(OpenWindow(OTHER))
    world.run()
    (_, failed) = world.answers
    assert isinstance(failed, WindowFailed) and failed.error.message.startswith("OSError")


def test_a_window_that_comes_behind_its_close_is_closed() -> None:
    world = World()
    world.windows.close(SOURCE)
    world.windows.open(OpenWindow(SOURCE))
    world.windows.close(SOURCE)
    world.windows.open(OpenWindow(SOURCE))
    world.run()
    assert world.answers[1:] == [WindowOpened(SOURCE, sees_steps=True)]
    assert [each.is_closed for each in world.transport.all] == [True, True, False]


def test_a_pull_begins_when_its_step_is_over() -> None:
    world = World()
    world.pull(0, step=1)
    world.pull(1, step=3)
    world.pull(2, step=2)
    world.windows.pulls.poll()
    assert world.windows.pulls.are_waiting and len(world.windows.pulls) == 3
    world.run()
    assert world.outcomes == {0: PullOutcome.OK}
    world.source.num_steps = 2
    world.windows.pulls.poll()
    assert world.windows.pulls.are_waiting, "one waits still"
    world.run()
    assert world.outcomes == {0: PullOutcome.OK, 2: PullOutcome.OK}
    world.source.num_steps = 9
    world.windows.pulls.poll()
    assert not world.windows.pulls.are_waiting
    world.run()
    assert set(world.outcomes.values()) == {PullOutcome.OK} and len(world.windows.pulls) == 0


def test_cancelled_before_its_step_it_never_begins() -> None:
    world = World()
    world.pull(0, step=2)
    world.pull(1, step=2)
    world.windows.pulls.cancel("transfer 0")
    world.source.num_steps = 2
    world.windows.pulls.poll()
    world.run()
    assert world.outcomes == {0: PullOutcome.CANCELLED, 1: PullOutcome.OK}


def test_a_window_that_closes_begins_what_is_finished_and_fails_the_rest() -> None:
    world = World()
    world.pull(0, step=2)
    world.pull(1, step=3)
    world.source.num_steps = 2
    world.windows.close(SOURCE)
    world.run()
    assert world.outcomes == {0: PullOutcome.OK, 1: PullOutcome.FAILED}
    world.windows.pulls.poll()
    assert not world.windows.pulls.are_waiting and len(world.windows.pulls) == 0


@pytest.mark.parametrize("error", [HandoffFailed("no such block"), RuntimeError("out of memory")])
def test_a_pull_that_cannot_be_prepared_fails(error: Exception) -> None:
    world = World()

    def prepare(pairs: BlockPairs) -> Starter:
        raise error

    world.transport.window.prepare = prepare  # type: ignore[method-assign]
    world.pull(0, step=2)
    world.run()
    assert world.outcomes == {0: PullOutcome.FAILED}
