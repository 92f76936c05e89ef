"""What `baton up` makes of parts that end, without starting any."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.cli.deployment import Child, Deployment, _failure_of, _with_the_same_ports
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
    failure = _failure_of(child("p-0", *lines))
    assert (failure.message, failure.hint) == (message, hint)


async def test_a_gateway_keeps_its_ports() -> None:
    config = GatewayConfig(grpc_port=0, http_port=0)
    ready = child("gateway", addresses=("http://[::1]:8001", "[::1]:50052"), config=config)
    (again,) = _with_the_same_ports(ready)
    assert isinstance(again, GatewayConfig)
    assert (again.http_port, again.grpc_port) == (8001, 50052)
    assert _with_the_same_ports(child("gateway", config=config)) == (config,)


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
