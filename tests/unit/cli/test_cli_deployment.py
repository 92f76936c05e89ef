"""The reaction of `baton up` to processes that end, without starting any."""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.cli.deployment import gateways, up
from baton.cli.deployment.child import Child, lines_of, role_of
from baton.cli.deployment.deployment import Deployment
from baton.cli.deployment.gateways import shared_ports
from baton.client import NodeInfo
from baton.core.config import GatewayConfig, NodeConfig, UpConfig
from baton.core.engine_config import EngineConfig
from baton.core.errors import StartupFailed
from baton.core.process.logs import print_line
from baton.engine.kv.limits import EngineLimits
from baton.gateway.process.startup_message import READY
from baton.node.engine_process.startup_messages import describe_pool


def child(name: str, *lines: str, addresses: tuple[str, ...] = (), config: Any = None) -> Child:
    """A child process that has ended with code 1."""
    nothing = cast(Any, None)
    process = cast(Any, SimpleNamespace(returncode=1))
    found = Child(name, (config,), process, nothing, nothing)
    found.last_lines, found.addresses = list(lines), list(addresses)
    return found


@pytest.fixture(autouse=True)
async def loop() -> None:
    """An event loop, as a Child makes an asyncio.Event."""


@pytest.mark.parametrize(
    ("lines", "message", "hint"),
    [
        (("E grpc", "error: no port", "  try: another"), "p-0: no port", "another"),
        (("error: a", "  try: b", "error: no port"), "p-0: no port", ""),
        (("error: no port", "and more"), "p-0: no port", ""),
        (("Killed",), "p-0 ended with code 1; its last lines:\n  Killed", ""),
        ((), "p-0 ended with code 1 without a message", ""),
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
    alone = GatewayConfig(grpc_port=0, http_port=0)
    with shared_ports(alone) as configs:
        assert configs == {"gateway": alone}


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_port_that_is_taken_is_said_before_a_gateway_is_started(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = {"http_port": 0, "grpc_port": 0} | {flag[2:].replace("-", "_"): taken}
        with (
            pytest.raises(StartupFailed, match=f"cannot listen on .*{taken}") as failed,
            shared_ports(GatewayConfig(**ports)),
        ):
            raise AssertionError("it is taken")
        assert flag in failed.value.hint


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
    printed: list[str] = []
    deployment = Deployment(
        up, EngineConfig(), NodeConfig(), GatewayConfig(), lambda name, line: printed.append(line)
    )
    async with asyncio.timeout(5):
        with pytest.raises(StartupFailed, match=words):
            await deployment.__aenter__()
    assert not printed and not deployment.children


async def test_a_part_that_ends_before_all_are_linked_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that ends when ready, but before all are linked, fails the start with its error."""

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
    """A client of a gateway that sees engines of this deployment and of others."""

    def __init__(self, *nodes: NodeInfo) -> None:
        self.nodes = nodes

    async def __aenter__(self) -> PlayedGateway:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def model_info(self) -> SimpleNamespace:
        return SimpleNamespace(model="m", max_model_len=64, nodes=self.nodes)


def engine(name: str, node: int, *links: str) -> NodeInfo:
    """An engine at a node's address; its incarnation is its name."""
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


async def test_topology_has_the_blocks_that_requests_can_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The reported blocks are those of the node's own line, without the two reserved ones."""
    node = replace(engine("prefill-0", 1), num_blocks=102, block_size=16)
    limits = EngineLimits(num_blocks=102, block_size=16, max_model_len=64)
    deployment = SimpleNamespace(
        client=lambda: PlayedGateway(node), gateways=[], up=UpConfig(), startup_lines=[]
    )
    await up._print_topology(cast(Any, deployment))
    assert " 100 KV blocks = 1600 tokens\n" in capsys.readouterr().out
    assert describe_pool(limits).startswith("100 KV blocks of 16 = 1,600 tokens")


async def test_a_line_that_is_too_long_does_not_end_the_reading() -> None:
    stream = asyncio.StreamReader(limit=8)
    stream.feed_data(b"one\n" + b"x" * 40 + b"\ntwo\n\xff\n")
    stream.feed_eof()
    lines = [line async for line in lines_of(stream)]
    assert (lines[0], *lines[-2:]) == ("one", "two", "\ufffd")
    assert any("too long" in line for line in lines)


class Broken:
    """A stdout whose reader has gone, or on a full disk."""

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
    """Output is read to its end even if it cannot be printed: a full pipe blocks the child."""
    received: list[str] = []

    def report(name: str, line: str) -> None:
        received.append(line)
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
    assert received[:2] == ["one", "two"] and part.ready.result() == "127.0.0.1:1"


def test_adapters_need_engines_that_serve_them() -> None:
    gateway, up_config = GatewayConfig(lora_modules=("stubs=models/demo-stubs",)), UpConfig()
    parts = (NodeConfig(), gateway, print)
    with pytest.raises(StartupFailed, match="--lora-modules") as failed:
        Deployment(up_config, EngineConfig(model="demo"), *parts)
    assert "--enable-lora" in failed.value.hint
    Deployment(up_config, EngineConfig(model="demo", enable_lora=True), *parts)


@pytest.mark.parametrize(
    ("flag", "node"),
    [
        ("--port", NodeConfig(port=9000)),
        ("--engine-port", NodeConfig(engine_port=9000)),
        ("--advertise", NodeConfig(advertise="h:1")),
        ("--advertise-engine", NodeConfig(advertise_engine="h:1")),
        ("--name", NodeConfig(name="n")),
    ],
)
def test_what_only_one_node_can_have_is_refused(flag: str, node: NodeConfig) -> None:
    with pytest.raises(StartupFailed, match=f"^{flag} is for a single node") as failed:
        Deployment(UpConfig(), EngineConfig(model="demo"), node, GatewayConfig(), print)
    assert "--http-port" in failed.value.hint
