"""Which processes `baton up` restarts, when, and when it gives up; the processes are simulated."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.cli.deployment import child_group
from baton.cli.deployment.child import Child
from baton.cli.deployment.child_group import ChildGroup
from baton.cli.deployment.deployment import Deployment
from baton.core.config import ClusterConfig, GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed


class Mortal:
    """A child process that ends once `over` is set."""

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
    """A process that lived long may end again; one that ends repeatedly ends the deployment."""

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
        """End the process and wait until its successor has started."""
        (part,) = (each for each in deployment.children if each.name == name)
        cast(Any, part).over.set()
        while part in deployment.children or len(deployment.children) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async with asyncio.timeout(5):
        keeping = asyncio.create_task(deployment.keep())
        for _ in range(5):
            await end("p-0")
        monkeypatch.setattr("baton.cli.deployment.child_group._WELL_S", 1000.0)
        await end("p-0")  # its second end
        await end("gateway")
        assert not keeping.done()
        (part,) = (each for each in deployment.children if each.name == "p-0")
        cast(Any, part).over.set()
        assert await keeping == "p-0"


async def test_a_part_that_keeps_ending_is_started_later_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a limit on ends, restarts continue for ever, with growing delays of up to 5 s."""
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
    """A failed start counts as an end and is tried again."""
    printed: list[str] = []
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
    group = ChildGroup(lambda name, line: printed.append(line), max_ends=4)
    await group.launch("gateway-0", (), ClusterConfig())
    parts[0].began_s -= 1000.0
    parts[0].over.set()
    keeping = asyncio.create_task(group.keep())
    while len(parts) < 2:
        await asyncio.wait({keeping}, timeout=0.001)
        assert not keeping.done()
    assert cast(Any, group.children) == [parts[1]]
    assert delays_s == sorted({*delays_s}) and len(delays_s) == 4
    assert sum(line == "cannot be started: [Errno 24] Too many open files" for line in printed) == 3
    parts[1].over.set()
    assert await asyncio.wait_for(keeping, 1.0) == "gateway-0", "the fifth, one soon after another"


class LoneRedis:
    """`RedisServer` whose socket exists as the test decides."""

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
    """Redis is restarted once its socket has disappeared, not before the socket has appeared; a
    failed restart is tried again."""
    module = "baton.cli.deployment.deployment"
    for constant in ("_LOOK_AGAIN_S", "_REDIS_RESTART_S"):
        monkeypatch.setattr(f"{module}.{constant}", 0.001)
    redis = LoneRedis(tmp_path / "redis.sock")
    redis.num_failures = 2
    printed: list[str] = []
    configs = (EngineConfig(), NodeConfig(), GatewayConfig())
    deployment = Deployment(UpConfig(), *configs, lambda name, line: printed.append(line))
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
    assert printed[0] == f"{redis.socket_path} is gone: restarting, empty"
    assert printed.count("cannot be started: [Errno 13] Permission denied") == 2


async def test_a_part_that_keeps_ending_ends_all_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Group(ChildGroup):
        async def keep(self) -> str:
            return "decode-1"

    async def announce(_: ChildGroup) -> None: ...

    group = Group(lambda name, line: None)
    async with asyncio.timeout(2):
        assert await child_group.run(group, nullcontext(), announce) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: decode-1 exits repeatedly: giving up"
    assert hint.startswith("  try: ")


async def test_a_second_signal_hurries_a_start_that_is_given_up() -> None:
    """After a second signal all processes are asked to stop at once, not one after the other."""
    is_given_up, is_asked = asyncio.Event(), asyncio.Event()
    group = ChildGroup(lambda name, line: None)
    part = SimpleNamespace(request_stop=is_asked.set)
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
