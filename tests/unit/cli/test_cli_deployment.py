"""What `baton up` makes of parts that end, without starting any."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.cli.deployment.child import Child, lines_of
from baton.cli.deployment.deployment import Deployment
from baton.core.config import EngineConfig, GatewayConfig, NodeConfig, UpConfig
from baton.core.errors import StartupFailed


def child(name: str, *lines: str, addresses: tuple[str, ...] = (), config: Any = None) -> Child:
    """One that has ended with code 1."""
    nothing = cast(Any, None)
    found = Child(name, (config,), cast(Any, SimpleNamespace(returncode=1)), nothing, nothing)
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
        ((), "p-0 ended with code 1; it said:\n  nothing", ""),
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


@pytest.mark.parametrize(
    ("up", "words"),
    [
        (UpConfig(prefill_gpus="0,0"), "not a list of different GPUs"),
        (UpConfig(redis_url="redis://127.0.0.1:1/0"), "Redis does not answer"),
        (UpConfig(redis_url="http://x"), "--redis-url"),
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
        UpConfig(), EngineConfig(), NodeConfig(), GatewayConfig(), lambda name, line: None
    )
    for name, wait in (("gateway", never), ("p-0", now)):
        part = child(name, "error: no memory", addresses=("127.0.0.1:1",))
        part.process = cast(Any, SimpleNamespace(returncode=1, wait=wait))
        part.reader = asyncio.create_task(asyncio.sleep(0))
        deployment.children.append(part)
    async with asyncio.timeout(5):
        with pytest.raises(StartupFailed, match="p-0: no memory"):
            await deployment._until_linked()


class Mortal:
    """A part that ends when it is told to."""

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

    async def launch(self: Deployment, name: str) -> Mortal:
        part = Mortal(name)
        self.children.append(cast(Any, part))
        return part

    monkeypatch.setattr(Deployment, "_launch", launch)
    for name, value in (("_MOST_ENDS", 2), ("_WELL_S", 0.0), ("_RESTART_S", 0.0)):
        monkeypatch.setattr(f"baton.cli.deployment.deployment.{name}", value)
    deployment = Deployment(
        UpConfig(), EngineConfig(), NodeConfig(), GatewayConfig(), lambda name, line: None
    )
    for name in ("gateway", "p-0"):
        await launch(deployment, name)

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
        monkeypatch.setattr("baton.cli.deployment.deployment._WELL_S", 1000.0)
        await end("p-0")  # the second
        await end("gateway")
        assert not keeping.done()
        (part,) = (each for each in deployment.children if each.name == "p-0")
        cast(Any, part).over.set()
        assert await keeping == "p-0"


async def test_a_line_that_is_too_long_does_not_end_the_reading() -> None:
    stream = asyncio.StreamReader(limit=8)
    stream.feed_data(b"one\n" + b"x" * 40 + b"\ntwo\n\xff\n")
    stream.feed_eof()
    lines = [line async for line in lines_of(stream)]
    assert (lines[0], *lines[-2:]) == ("one", "two", "\ufffd")
    assert any("too long" in line for line in lines)
