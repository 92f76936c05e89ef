"""What `baton up` makes of parts that end, without starting any."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.cli.deployment import child_group, gateways, up
from baton.cli.deployment.child import Child, lines_of, role_of
from baton.cli.deployment.child_group import ChildGroup
from baton.cli.deployment.deployment import Deployment
from baton.cli.deployment.gateways import shared_ports
from baton.client import NodeInfo
from baton.core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.process.logs import print_line
from baton.gateway.process.startup_message import READY


def child(name: str, *lines: str, addresses: tuple[str, ...] = (), config: Any = None) -> Child:
    """One that has ended with code 1."""
    nothing = cast(Any, None)
    found = Child(
        name, (config,), ClusterConfig(), cast(Any, SimpleNamespace(returncode=1)), nothing, nothing
    )
    found.last_lines, found.addresses = list(lines), list(addresses)
    return found


@pytest.fixture(autouse=True)
async def loop() -> None:
    """A Child makes an asyncio.Event."""


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        (("E grpc", "error: no port", "  try: another"), "p-0: no port", "another"),
        (("error: a", "  try: b", "error: no port"), "p-0: no port", ""),
        (("error: no port", "and more"), "p-0: no port", ""),
        (("Killed",), "p-0 ended with code 1; it said:\n  Killed", ""),
        ((), "p-0 ended with code 1 and said nothing more", ""),
    ],
)
async def test_a_part_s_own_error_is_passed_on(
    lines: tuple[str, ...], message: str, hint: str
) -> None:
    failure = child("p-0", *lines).failure()
    assert (failure.message, failure.hint) == (message, hint)


async def test_a_gateway_keeps_its_ports() -> None:
    config = GatewayConfig(grpc_port=0, http_port=0)
    ready = child("gateway", addresses=("http://[::1]:8001", "[::1]:50052"), config=config)
    (again,) = ready.configs_again()
    assert isinstance(again, GatewayConfig)
    assert (again.http_port, again.grpc_port) == (8001, 50052)
    assert child("gateway", config=config).configs_again() == (config,)
    urls = ("http://[::1]:9001", "http://[::1]:8001")
    (again,) = child("gateway-1", addresses=(*urls, "[::1]:50052"), config=config).configs_again()
    assert again == replace(config, own_http_port=9001, http_port=8001, grpc_port=50052)
    node = NodeConfig(port=0)
    assert child("p-0", addresses=("127.0.0.1:1",), config=node).configs_again() == (node,)


def test_gateways_share_two_ports_and_have_one_each() -> None:
    config = GatewayConfig(grpc_port=0, http_port=0, num_gateways=3, own_http_port=9001)
    with shared_ports(config) as configs:
        assert [*configs] == ["gateway-0", "gateway-1", "gateway-2"]
        assert [each.own_http_port for each in configs.values()] == [9001, 9002, 9003]
        (ports,) = {(each.http_port, each.grpc_port) for each in configs.values()}
        assert all(each.reuse_port and each.num_gateways == 1 for each in configs.values())
        for port in ports:
            with pytest.raises(StartupFailed, match="cannot listen"):
                hold_exclusively(port)
    for port in ports:
        hold_exclusively(port)
    with shared_ports(replace(config, own_http_port=0)) as configs:
        assert {each.own_http_port for each in configs.values()} == {None}, "a free one for each"
    with shared_ports(GatewayConfig()) as configs:
        assert configs == {"gateway": GatewayConfig()}


def hold_exclusively(port: int) -> None:
    with shared_ports(GatewayConfig(num_gateways=2, http_port=port, grpc_port=0)):
        pass


@pytest.mark.parametrize(
    ("up", "words"),
    [
        (UpConfig(mode="disaggregated", prefill_gpus="0,0"), "not a list of different GPUs"),
        (
            UpConfig(mode="disaggregated", redis_url="redis://127.0.0.1:1/0"),
            "Redis does not answer",
        ),
        (UpConfig(mode="disaggregated", redis_url="http://x"), "--redis-url"),
    ],
)
async def test_what_cannot_be_is_said_before_anything_is_started(up: UpConfig, words: str) -> None:
    said: list[str] = []
    deployment = Deployment(
        up, EngineConfig(), NodeConfig(), GatewayConfig(), lambda name, line: said.append(line)
    )
    async with asyncio.timeout(5):
        with pytest.raises(StartupFailed, match=words):
            await deployment.__aenter__()
    assert not said and not deployment.children


async def test_a_part_that_ends_before_all_are_linked_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It said `ready`, so nobody waits for its error any more."""

    async def never(*_: object) -> int:
        await asyncio.Event().wait()
        return 0

    async def now() -> int:
        return 1

    monkeypatch.setattr(Deployment, "wait_linked", never)
    deployment = Deployment(
        UpConfig(mode="disaggregated"),
        EngineConfig(),
        NodeConfig(),
        GatewayConfig(),
        lambda name, line: None,
    )
    for name, wait in (("gateway", never), ("p-0", now)):
        part = child(name, "error: no memory", addresses=("127.0.0.1:1",))
        part.process = cast(Any, SimpleNamespace(returncode=1, wait=wait))
        part.reader = asyncio.create_task(asyncio.sleep(0))
        deployment.children.append(part)
    async with asyncio.timeout(5):
        with pytest.raises(StartupFailed, match="p-0: no memory"):
            await deployment._until_linked()


class PlayedGateway:
    """A client of one that sees engines of ours and of others."""

    def __init__(self, *nodes: NodeInfo) -> None:
        self.nodes = nodes

    async def __aenter__(self) -> PlayedGateway:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def model_info(self) -> SimpleNamespace:
        return SimpleNamespace(nodes=self.nodes)


def engine(name: str, node: int, *links: str) -> NodeInfo:
    """At a node's address; its incarnation is its name."""
    role = role_of(name)
    return NodeInfo(name, role, name, True, 1, 1, links, f"127.0.0.1:{node}")


@pytest.mark.parametrize(
    ("nodes", "is_whole"),
    [
        ((engine("prefill-0", 1), engine("decode-0", 2, "prefill-0")), True),
        (
            (
                *(engine("prefill-0", 1), engine("decode-0", 2, "prefill-0")),
                *(engine("prefill-a", 8), engine("decode-a", 9)),
            ),
            True,
        ),
        ((engine("prefill-0", 1), engine("decode-a", 9, "prefill-0")), False),
        ((engine("prefill-0", 1), engine("decode-0", 2), engine("decode-a", 9)), False),
    ],
    ids=["alone", "beside others", "others alone", "not linked"],
)
async def test_others_on_the_same_redis_are_not_waited_for_and_do_not_count(
    nodes: tuple[NodeInfo, ...], *, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = (EngineConfig(), NodeConfig(), GatewayConfig())
    deployment = Deployment(UpConfig(mode="disaggregated"), *configs, lambda name, line: None)
    parts = (("gateway", 7), ("prefill-0", 1), ("decode-0", 2))
    deployment.children = [child(name, addresses=(f"127.0.0.1:{at}",)) for name, at in parts]
    monkeypatch.setattr(deployment, "client", lambda: PlayedGateway(*nodes))
    linking = asyncio.create_task(deployment.wait_linked())
    done, _ = await asyncio.wait({linking}, timeout=0.1)
    linking.cancel()
    assert bool(done) == is_whole


class Mortal:
    """A part that ends once `over` is set."""

    cluster = ClusterConfig()

    def __init__(self, name: str) -> None:
        self.name = name
        self.began_s = time.monotonic()
        self.process = SimpleNamespace(returncode=1)
        self.over = asyncio.Event()

    async def until_over(self, _: object) -> None:
        await self.over.wait()

    async def close(self) -> None:
        pass

    def configs_again(self) -> tuple[object, ...]:
        return ()


async def test_a_part_that_lived_long_may_end_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that keeps ending, one end soon after the other, ends all."""

    async def start(name: str, *_: object, **__: object) -> Mortal:
        return Mortal(name)

    monkeypatch.setattr(Child, "start", start)
    for constant, value in (("_WELL_S", 0.0), ("_RESTART_S", 0.0)):
        monkeypatch.setattr(f"baton.cli.deployment.child_group.{constant}", value)
    deployment = Deployment(
        UpConfig(mode="disaggregated"),
        EngineConfig(),
        NodeConfig(),
        GatewayConfig(),
        lambda name, line: None,
    )
    deployment.max_ends = 2
    for name in ("gateway", "p-0"):
        await deployment._launch(name)

    async def end(name: str) -> None:
        """And wait until another is there."""
        (part,) = (each for each in deployment.children if each.name == name)
        cast(Any, part).over.set()
        while part in deployment.children or len(deployment.children) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async with asyncio.timeout(5):
        keeping = asyncio.create_task(deployment.keep())
        for _ in range(5):
            await end("p-0")
        monkeypatch.setattr("baton.cli.deployment.child_group._WELL_S", 1000.0)
        await end("p-0")  # the second
        await end("gateway")
        assert not keeping.done()
        (part,) = (each for each in deployment.children if each.name == "p-0")
        cast(Any, part).over.set()
        assert await keeping == "p-0"


async def test_a_part_that_keeps_ending_is_started_later_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a bound on its ends, for ever."""
    delays_s: list[float] = []

    async def start(name: str, *_: object, **__: object) -> Mortal:
        part = Mortal(name)
        part.over.set()
        return part

    async def sleep(delay_s: float) -> None:
        delays_s.append(delay_s)
        if len(delays_s) == 40:
            raise StartupFailed("seen enough")

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr("baton.cli.deployment.child_group.asyncio.sleep", sleep)
    group = ChildGroup(lambda name, line: None)
    await group.launch("gateway-0", (), ClusterConfig())
    with pytest.raises(StartupFailed, match="seen enough"):
        await group.keep()
    assert delays_s == sorted(delays_s) and delays_s[0] == 0.0 and delays_s[-1] == 5.0
    assert len({*delays_s}) > 10


async def test_a_moment_without_descriptors_only_delays_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each start that fails counts as an end."""
    said: list[str] = []
    delays_s: list[float] = []
    parts: list[Mortal] = []
    num_failures = 3

    async def start(name: str, *_: object, **__: object) -> Mortal:
        nonlocal num_failures
        if parts and num_failures:
            num_failures -= 1
            raise OSError(24, "Too many open files")
        parts.append(Mortal(name))
        return parts[-1]

    async def sleep(delay_s: float) -> None:
        delays_s.append(delay_s)

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr("baton.cli.deployment.child_group.asyncio.sleep", sleep)
    group = ChildGroup(lambda name, line: said.append(line), max_ends=4)
    await group.launch("gateway-0", (), ClusterConfig())
    parts[0].began_s -= 1000.0
    parts[0].over.set()
    keeping = asyncio.create_task(group.keep())
    while len(parts) < 2:
        await asyncio.wait({keeping}, timeout=0.001)
        assert not keeping.done()
    assert cast(Any, group.children) == [parts[1]]
    assert delays_s == sorted({*delays_s}) and len(delays_s) == 4
    assert sum(line == "cannot be started: [Errno 24] Too many open files" for line in said) == 3
    parts[1].over.set()
    assert await asyncio.wait_for(keeping, 1.0) == "gateway-0", "the fifth, one soon after another"


async def test_a_line_that_is_too_long_does_not_end_the_reading() -> None:
    stream = asyncio.StreamReader(limit=8)
    stream.feed_data(b"one\n" + b"x" * 40 + b"\ntwo\n\xff\n")
    stream.feed_eof()
    lines = [line async for line in lines_of(stream)]
    assert (lines[0], *lines[-2:]) == ("one", "two", "\ufffd")
    assert any("too long" in line for line in lines)


class Broken:
    """A stdout that nobody reads any more, or on a disk that is full."""

    def write(self, text: str) -> None:
        raise BrokenPipeError

    flush = write


def test_lines_that_nobody_reads_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Broken())
    print_line("ready: prefill p")
    up._print_line("p-0", "a line")
    gateways._report("gateway-0", f"{READY}http://127.0.0.1:1")


@pytest.mark.parametrize("error", [BrokenPipeError(), UnicodeEncodeError("ascii", "", 0, 1, "")])
async def test_a_part_is_read_to_its_end_whatever_becomes_of_its_lines(error: Exception) -> None:
    """One whose pipe is full would stand still."""
    heard: list[str] = []

    def report(name: str, line: str) -> None:
        heard.append(line)
        raise error

    async def wait() -> int:
        return 1

    part = child("p-0")
    stream = asyncio.StreamReader()
    stream.feed_data(b"one\ntwo\nready: prefill p 127.0.0.1:1\n")
    stream.feed_eof()
    part.process = cast(Any, SimpleNamespace(returncode=1, stdout=stream, wait=wait))
    part.ready = asyncio.get_running_loop().create_future()
    part.watch = cast(Any, SimpleNamespace(close=lambda: None))
    part.reader = asyncio.create_task(part._read(report))
    await part.close()
    assert heard[:2] == ["one", "two"] and part.ready.result() == "127.0.0.1:1"


class LoneRedis:
    """`RedisServer`, whose socket is there or not as the test says."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.code: int | None = None
        self.num_starts, self.num_failures = 0, 0
        self.process = SimpleNamespace(poll=lambda: self.code)

    def start_again(self) -> None:
        self.num_starts += 1
        self.code = 1 if self.num_starts <= self.num_failures else None
        if self.code is not None:
            raise PermissionError(13, "Permission denied")


async def test_a_redis_is_started_again_once_nobody_can_reach_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not as long as its socket is only not there yet; and what fails is tried again."""
    module = "baton.cli.deployment.deployment"
    for constant in ("_LOOK_AGAIN_S", "_REDIS_RESTART_S"):
        monkeypatch.setattr(f"{module}.{constant}", 0.001)
    redis = LoneRedis(tmp_path / "redis.sock")
    redis.num_failures = 2
    said: list[str] = []
    configs = (EngineConfig(), NodeConfig(), GatewayConfig())
    deployment = Deployment(UpConfig(), *configs, lambda name, line: said.append(line))
    keeping = asyncio.create_task(deployment._keep_redis(cast(Any, redis)))
    await asyncio.sleep(0.02)
    assert not redis.num_starts, "it is not there yet"
    redis.socket_path.touch()
    await asyncio.sleep(0.02)
    redis.socket_path.unlink()
    async with asyncio.timeout(5):
        while redis.num_starts < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    keeping.cancel()
    await asyncio.wait({keeping})
    assert keeping.cancelled() and redis.num_starts == 3
    assert said[0] == f"{redis.socket_path} is gone: starts again, empty"
    assert said.count("cannot be started: [Errno 13] Permission denied") == 2


async def test_a_second_signal_hurries_a_start_that_is_given_up() -> None:
    """Parts that would be asked one after the other all are."""
    is_given_up, is_asked = asyncio.Event(), asyncio.Event()
    group = ChildGroup(lambda name, line: None)
    part = SimpleNamespace(ask_to_stop=is_asked.set)
    group.children = [cast(Any, part)]

    @asynccontextmanager
    async def starting() -> AsyncIterator[None]:
        try:
            await asyncio.Event().wait()
            yield
        finally:
            is_given_up.set()
            await is_asked.wait()

    async def announce(_: ChildGroup) -> None: ...

    running = asyncio.create_task(child_group.run(group, starting(), announce))
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGINT)
    async with asyncio.timeout(2):
        await is_given_up.wait()
        assert not is_asked.is_set()
        signal.raise_signal(signal.SIGINT)
        assert await running == 130
