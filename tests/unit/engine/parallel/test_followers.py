"""Rank 0's side of the connections to other ranks, which the test simulates."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from baton.core.engine_config import EngineConfig
from baton.core.errors import BatonError, EngineFailed, StartupFailed
from baton.engine import local
from baton.engine.model.communicator import Communicator
from baton.engine.parallel import rank_group, rank_processes
from baton.engine.parallel.parallel_runner import ParallelRunner
from baton.engine.parallel.pipeline_runner import ResultSender
from baton.engine.parallel.rank_channel import COUNTS, MessageKind, RankChannel, RankMessage
from baton.engine.parallel.rank_group import RankGroup, report_failure
from baton.engine.parallel.rank_processes import Ranks, start_ranks

TIMEOUT_S = 0.2
START_TIMEOUT_S = 0.6
HANDLES = [b"", bytes(range(256))]


class World:
    """RankGroup over two channels; `lost` and `lines` collect what it reports of the ranks."""

    def __init__(
        self, timeout_s: float = TIMEOUT_S, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.ranks = [RankChannel(theirs) for _, theirs in pairs]
        self.lost: queue.SimpleQueue[BatonError] = queue.SimpleQueue()
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        ours = [RankChannel(ours) for ours, _ in pairs]
        self.followers = RankGroup(ours, timeout_s, start_timeout_s, self.lost.put, self.lines.put)

    def configured(self) -> list[RankMessage]:
        """Start both ranks and return the messages that they receive."""
        self.followers.configure([b"one", b"two"])
        messages = [message for rank in self.ranks if (message := rank.receive()) is not None]
        assert [bytes(message.payload) for message in messages] == [b"one", b"two"]
        return messages

    def connecting(self) -> None:
        """Let both ranks load and connect."""
        messages = self.configured()
        for rank, message, handle in zip(self.ranks, messages, HANDLES, strict=True):
            rank.send(MessageKind.ANSWER, handle, order=message.order)
        assert self.followers.meet(b"rank 0's") == [b"rank 0's", *HANDLES]
        for rank in self.ranks:
            message = rank.receive()
            assert message is not None and message.kind is MessageKind.CONNECT
            assert msgspec.msgpack.decode(message.payload) == [b"rank 0's", *HANDLES]

    def serving(self) -> None:
        """Let both ranks serve."""
        self.connecting()
        for number in (1, 2):
            self.taken(number, 2)

    def taken(self, number: int, count: int) -> None:
        """Rank `number` reports that it has handled `count` messages."""
        self.ranks[number - 1].send(MessageKind.TAKEN, COUNTS.pack(count, 0))

    def close(self) -> None:
        self.followers.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def test_an_order_is_done_when_all_have_answered_in_the_order_of_the_ranks(world: World) -> None:
    found: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    first = world.followers.order(MessageKind.PULL, [b"a", b"b"], found.put)
    second = world.followers.order(MessageKind.PULL, [b"c", b"d"], found.put)
    assert first != second
    received = [[rank.receive() for _ in range(2)] for rank in world.ranks]
    one, two = world.ranks
    two.send(MessageKind.ANSWER, b"2b", order=first)
    two.send(MessageKind.ANSWER, b"2d", order=second)
    one.send(MessageKind.ANSWER, b"1c", order=second)
    assert found.get(timeout=5) == [b"1c", b"2d"]
    assert found.empty()
    one.send(MessageKind.ANSWER, b"1a", order=first)
    assert found.get(timeout=5) == [b"1a", b"2b"]
    payloads = [[bytes(m.payload) for m in each if m is not None] for each in received]
    assert payloads == [[b"a", b"c"], [b"b", b"d"]]


def test_descriptors_and_large_payloads_arrive(world: World) -> None:
    read_end, write_end = os.pipe()
    payload = os.urandom(3000)
    world.followers.order(MessageKind.EXPORT_POOL, [payload, b""], lambda _: None, [read_end])
    messages = [rank.receive() for rank in world.ranks]
    os.write(write_end, b"through")
    assert messages[0] is not None and bytes(messages[0].payload) == payload
    assert os.read(messages[0].fds[0], 20) == b"through"
    for message in messages:
        assert message is not None
        os.close(message.fds[0])
    os.close(read_end)
    os.close(write_end)


def test_lines_are_told_with_their_rank(world: World) -> None:
    world.ranks[1].send(MessageKind.LINE, b"graphs captured")
    assert world.lines.get(timeout=5) == "rank 2: graphs captured"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EngineFailed("the GPU is out of memory"), "rank 2: the GPU is out of memory"),
        (StartupFailed("no such GPU", hint="--gpus 0"), "rank 2: no such GPU"),
    ],
)
def test_a_failure_carries_the_rank_s_message(
    world: World, error: BatonError, message: str
) -> None:
    report_failure(world.ranks[1], error, "")
    found = world.lost.get(timeout=5)
    assert (type(found), found.message) == (type(error), message)
    assert not isinstance(found, StartupFailed) or found.hint == "--gpus 0"
    for act in (world.followers.check, lambda: world.followers.send(MessageKind.STEP, b"")):
        with pytest.raises(type(error), match="rank 2"):
            act()
    unexplained = EngineFailed("a sum was cut off")
    assert world.followers.explain(unexplained) is found


@pytest.mark.parametrize("error", [EngineFailed("the step is lost"), ZeroDivisionError("of it")])
def test_a_step_whose_result_cannot_be_had_is_told(world: World, error: Exception) -> None:
    class Step:
        def collect(self) -> None:
            raise error

    ResultSender(world.ranks[1]).add(Step())  # type: ignore[arg-type]
    found = world.lost.get(timeout=5)
    text = str(error) if isinstance(error, EngineFailed) else "ZeroDivisionError: of it"
    assert isinstance(found, EngineFailed) and found.message == f"rank 2: {text}"


def test_a_rank_that_ends_is_lost(world: World) -> None:
    world.ranks[0].close()
    assert world.lost.get(timeout=5).message == "rank 1 ended"
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        world.followers.order_and_wait(MessageKind.EXPORT_POOL, [b"", b""])


def test_a_step_whose_device_waits_for_a_lost_rank_is_not_waited_for(world: World) -> None:
    """A step fails once a rank is lost: on a GPU, an all-reduce without it never completes."""

    class Runner:
        runs_ahead = True

        def launch(self, batch: object) -> Runner:
            return self

        def has_completed(self) -> bool:
            return False

    step = ParallelRunner(Runner(), world.followers).launch([])  # type: ignore[arg-type]
    assert not step.has_completed()
    world.ranks[0].close()
    world.lost.get(timeout=5)
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        step.has_completed()


def test_nobody_waits_for_answers_of_ranks_that_have_been_let_go() -> None:
    """A thread waiting for ranks (to read an adapter, as the engine ends) gets an error when the
    group closes; else the process could not exit."""
    world = World()
    reported: queue.SimpleQueue[BatonError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            world.followers.order_and_wait(MessageKind.ADAPTER, [b"", b""])
        except BatonError as error:
            reported.put(error)

    threading.Thread(target=ask, daemon=True).start()
    for rank in world.ranks:
        assert rank.receive() is not None
    world.close()
    assert reported.get(timeout=5).message == "the ranks have ended"
    assert world.lost.empty()


def test_ranks_that_are_killed_on_purpose_are_not_lost() -> None:
    """Ranks killed on purpose are not reported as lost: the engine's error is sent already."""
    world = World()

    class Process:
        def __init__(self, rank: RankChannel) -> None:
            self.rank = rank

        def kill(self) -> None:
            self.rank.close()
            time.sleep(0.05)

        def wait(self, timeout_s: float) -> None: ...

    processes = tuple(Process(rank) for rank in world.ranks)
    Ranks(EngineConfig(), Communicator(), world.followers, processes).kill()  # type: ignore[arg-type]
    assert world.lost.empty()


@pytest.mark.parametrize("failing", ["_start", "RankGroup"])
def test_no_rank_is_left_behind_by_a_start_that_fails(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """All started ranks are killed if the second process or the RankGroup cannot be created."""
    ends: list[socket.socket] = []
    killed: list[int] = []

    class Process:
        def __init__(self, number: int) -> None:
            self.number = number

        def kill(self) -> None:
            killed.append(self.number)

        def wait(self, timeout_s: float) -> None:
            assert self.number in killed, "nobody tells it to end"

    def fail(*_: object) -> None:
        raise OSError("too many open files")

    def start(module: str) -> tuple[Process, RankChannel]:
        if ends and failing == "_start":
            fail()
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return Process(len(ends)), RankChannel(ours)

    monkeypatch.setattr(rank_processes, "_start", start)
    if failing == "RankGroup":
        monkeypatch.setattr(rank_processes, failing, fail)
    config = EngineConfig(device="cpu", tensor_parallel_size=3)
    with pytest.raises(OSError, match="too many"):
        start_ranks(config, "a module", lambda error: None, lambda line: None)
    assert killed == ([1] if failing == "_start" else [1, 2])
    for end in ends:
        assert end.recv(1) == b"", "it is still connected"
        end.close()


def test_a_rank_that_takes_nothing_is_lost_and_one_with_nothing_to_take_is_not(
    world: World,
) -> None:
    world.serving()
    time.sleep(2 * TIMEOUT_S)
    for count in range(3, 7):
        world.followers.send(MessageKind.STEP, b"step")
        time.sleep(TIMEOUT_S / 2)
        world.taken(1, count)
        world.taken(2, count)
    assert world.lost.empty()
    world.followers.send(MessageKind.STEP, b"step")
    world.taken(1, 7)
    found = world.lost.get(timeout=5)
    assert isinstance(found, EngineFailed)
    assert found.message.startswith("rank 2 has not answered")


@pytest.mark.parametrize("is_serving", [True, False])
def test_the_time_that_rank_0_stands_still_is_nobody_s(
    monkeypatch: pytest.MonkeyPatch, is_serving: bool
) -> None:
    """Time for which the host was frozen is not counted: the ranks could take no step."""
    world, frozen_s = World(60.0, 60.0), 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + frozen_s)
    monkeypatch.setattr(rank_group, "time", clock)
    if is_serving:
        world.serving()
        world.followers.send(MessageKind.STEP, b"step")
    else:
        world.connecting()
    for seconds in (0.0, 1000.0):
        frozen_s = seconds
        for line in (b"one", b"two"):  # rank 0 has checked the ranks by the second line
            world.ranks[0].send(MessageKind.LINE, line)
            world.lines.get(timeout=5)
    assert world.lost.empty()
    world.close()


def test_a_rank_may_load_for_as_long_as_it_comes_further(world: World) -> None:
    """A rank may load as long as it reports progress; a loaded rank may wait for it silently."""
    one, two = world.ranks
    messages = world.configured()
    one.send(MessageKind.ANSWER, order=messages[0].order)
    for number in range(6):
        time.sleep(START_TIMEOUT_S / 3)
        two.send(MessageKind.TAKEN, COUNTS.pack(0, 1000 + number))
    assert world.lost.empty()
    check_hung(world, rank=2)


def test_to_say_that_it_lives_is_not_to_come_further(world: World) -> None:
    """Liveness is not progress of a start: a rank on another host reports it from its first moment
    on, whatever it waits for."""
    world.configured()
    until_s = time.monotonic() + 5 * START_TIMEOUT_S
    while world.lost.empty() and time.monotonic() < until_s:
        for rank in world.ranks:
            with suppress(OSError):  # the rank is lost already
                rank.send(MessageKind.TAKEN, COUNTS.pack(0, 1000))
        time.sleep(START_TIMEOUT_S / 20)
    assert not world.lost.empty(), "they may go on for ever"
    check_hung(world, rank=1)


def test_a_rank_that_does_not_come_to_serve_is_lost(world: World) -> None:
    world.connecting()
    world.taken(2, 2)
    check_hung(world, rank=1)


def check_hung(world: World, *, rank: int) -> None:
    """The rank is lost after START_TIMEOUT_S, and rank 0 no longer waits."""
    found = world.lost.get(timeout=2 * START_TIMEOUT_S)
    assert isinstance(found, StartupFailed)
    assert found.message == f"rank {rank} has made no progress in its start for 0.6 s"
    assert "--rank-start-timeout-s" in found.hint
    with pytest.raises(StartupFailed, match=f"rank {rank} has made no progress"):
        world.followers.meet(b"")


def test_a_step_that_fails_by_itself_keeps_its_own_message(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.parallel.rank_group._LAST_MESSAGE_S", 0.01)
    error = EngineFailed("the step failed")
    assert world.followers.explain(error) is error


def test_a_start_that_fails_over_a_rank_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed start names the lost rank, even if rank 0's own error comes first."""
    world, is_asked = World(), threading.Event()
    explain = world.followers.explain

    def explained(error: Exception) -> Exception:
        is_asked.set()
        return explain(error)

    def fail(*_: object) -> None:
        raise StartupFailed("gloo does not connect the ranks")

    monkeypatch.setattr(world.followers, "_on_line", lambda line: is_asked.wait(timeout=2))
    monkeypatch.setattr(world.followers, "explain", explained)
    monkeypatch.setattr(local, "ModelRunner", fail)
    ranks = Ranks(EngineConfig(), Communicator(), world.followers)
    monkeypatch.setattr(local, "start_ranks", lambda *_: ranks)
    world.ranks[0].send(MessageKind.LINE, b"loaded")
    world.ranks[0].close()
    with pytest.raises(EngineFailed, match="rank 1 ended"):
        local.LocalEngine.load(EngineConfig(), print)
    world.ranks[1].close()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_device_that_waits_for_a_lost_rank_is_not_given_back(runs_ahead: bool) -> None:
    world, closed = World(), []
    runner = SimpleNamespace(runs_ahead=runs_ahead, close=lambda: closed.append(True))
    engine = local.LocalEngine.__new__(local.LocalEngine)
    engine.runner, engine._disk = cast(Any, runner), None
    engine.ranks = Ranks(EngineConfig(), Communicator(), world.followers)
    for rank in world.ranks:
        rank.close()
    world.lost.get(timeout=5)
    engine.close()
    assert closed == ([] if runs_ahead else [True])


def test_who_learns_why_a_rank_cannot_be_reached_keeps_nobody_waiting(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("no room")

    both_ask = threading.Barrier(2, timeout=2)

    def explain(error: BatonError) -> BatonError:
        both_ask.wait()
        return error

    monkeypatch.setattr(RankChannel, "send", broken)
    monkeypatch.setattr(world.followers, "explain", explain)
    with ThreadPoolExecutor(2) as threads:
        sent = [threads.submit(world.followers.send, MessageKind.STEP) for _ in range(2)]
        for each in sent:
            with pytest.raises(EngineFailed, match="rank 1 cannot be reached: no room"):
                each.result()
